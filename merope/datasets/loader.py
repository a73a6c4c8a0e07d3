"""From a manifest to batches: an endless, resumable stream of clips that names and counts what it cannot read."""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from merope.curation.curate import Curation, Manifest
from merope.datasets.clip import Clip
from merope.datasets.sampler import ClusterSampler, SamplerState, names_fingerprint
from merope.errors import invalid
from merope.formats.parts import usable_cores
from merope.formats.trajectory import Trajectory
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import stacked

LOG = logging.getLogger(__name__)

MOST_STAND_INS = 100
"""Clips that are tried in the place of one that cannot be read; if none of them can, something else is wrong."""


Item = TypeVar("Item")
Collated = TypeVar("Collated")
ItemOut = TypeVar("ItemOut", covariant=True)


class ClipSource(Protocol[ItemOut]):
    """A table of clips (or of what was made of them) that can be loaded one by one, in any process.

    Sources inherit from it, and say more about their clips where they know more.
    """

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the clip is called in a manifest and in messages."""

    def clip(self, index: int) -> ItemOut:
        """Load it; raise if it cannot be read."""

    def trajectory(self, index: int) -> Trajectory:
        """The path of a clip under its name, for curation. Sources that need not read its frames do not."""
        clip: Any = self.clip(index)
        path, first_view = f"of {clip.name}", clip.world_from_camera.unflatten(0, (clip.views, -1))[0]
        return Trajectory(first_view, clip.is_metric, path, clip.timestamps_s, name=self.name(index))

    def made_of(self, index: int) -> Any:
        """What a clip follows from besides its files, as JSON. One that was cached from something else is not it."""
        return None

    def doubts(self) -> list[str]:
        """What looks wrong with the clips, to be said before hours are spent on them."""
        return []


@dataclass(frozen=True, eq=False)
class Batch:
    """B clips of T frames, of rigs all views of each."""

    names: tuple[str, ...]
    frames: Tensor  # uint8 [B, views · T, H, W, 3]
    cameras: Cameras  # [B, views · T]
    captions: tuple[str, ...]


def collate(clips: Sequence[Clip]) -> Batch:
    """Clips of one length, size and kind of lens as a batch."""
    frames = [clip.frames for clip in clips if clip.frames is not None]
    shapes = {(clip.views, *frame.shape) for clip, frame in zip(clips, frames, strict=False)}
    if len(frames) != len(clips) or len(shapes) != 1:
        names = ", ".join(clip.name for clip in clips)
        raise invalid(f"frames of {names}", "of one shape", sorted(shapes), "load all clips with one size and length")
    poses = torch.stack([clip.world_from_camera for clip in clips])
    return Batch(
        names=tuple(clip.name for clip in clips),
        frames=torch.stack(frames),
        cameras=Cameras(poses, stacked([clip.lens for clip in clips]), views=clips[0].views),
        captions=tuple(clip.caption for clip in clips),
    )


def curation_of(source: ClipSource[object], manifest: Manifest, file: str = "manifest") -> Curation:
    """The manifest's clusters and prototypes in the order of the source, matched by name.

    The manifest may hold other clips too, such as those of another split. A clip whose prototype is one of these stands
    for itself.
    """
    row = {name: index for index, name in enumerate(manifest.ids)}
    names = [source.name(index) for index in range(len(source))]
    missing = [name for name in names if name not in row]
    if missing:
        got = f"{len(missing)} of {len(names)} not in it, such as {missing[0]!r}; its first is {manifest.ids[0]!r}"
        fix = "curate these very clips: merope curate --videos MANIFEST or --nuscenes ROOT"
        raise invalid(file, "a manifest with a row for every clip", got, fix)
    rows, own = torch.tensor([row[name] for name in names]), torch.arange(len(names))
    place = torch.full((len(manifest.ids),), -1)
    place[rows] = own
    prototype = place[manifest.curation.prototype[rows]]
    return Curation(manifest.curation.cluster[rows], torch.where(prototype < 0, own, prototype))


@dataclass(frozen=True)
class _Loaded(Generic[Item]):
    """What was read for a draw: its own clip, or the first that could be read in its stead."""

    clip: Item | None
    skipped: dict[int, str]  # index -> why it could not be read


class LoaderState(SamplerState):
    """Where a stream stands, and of which clips it is."""

    clips: int  # fingerprint of their names, in their order


class _Clips(Dataset[_Loaded[Item]]):
    """Loads in worker processes. Who stands in for whom follows from the table alone, never from what came before."""

    def __init__(self, source: ClipSource[Item], sampler: ClusterSampler) -> None:
        self.source, self.sampler = source, sampler

    def __getitem__(self, index: int) -> _Loaded[Item]:
        skipped: dict[int, str] = {}
        for candidate in (index, *self.sampler.stand_ins(index)[:MOST_STAND_INS]):
            try:
                return _Loaded(self.source.clip(candidate), skipped)
            except Exception as error:  # whatever a broken file sets off: it is named, counted and survived
                skipped[candidate] = f"{type(error).__name__}: {error}"
        return _Loaded(None, skipped)


def _leave_stops_to_the_run(worker: int) -> None:
    """torchrun and schedulers send SIGTERM to workers, too: one that died of it would take the run's step with it.

    A worker ends when the run is done with it, or is gone.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class ClipLoader(Generic[Item, Collated]):
    """An endless stream of batches in the sampler's order, epoch after epoch.

    A clip that cannot be read is logged by name and counted in `skipped`; another of its cluster takes its place. So
    all ranks use up the sampler's draws at one pace, and the stream is the same for any number of them. `state_dict`
    speaks of what was handed out, not of what workers have fetched ahead: a resumed loader goes on with the next clip.
    """

    def __init__(
        self,
        source: ClipSource[Item],
        sampler: ClusterSampler,
        batch_size: int,
        workers: int = 0,
        collate: Callable[[Sequence[Item]], Collated] = collate,  # type: ignore[assignment]
    ) -> None:
        if len(source) == 0:
            raise invalid("source", "at least one clip", "none", "check the manifest and the split")
        if len(sampler.cluster) != len(source):
            fix = "pass the sampler of curation_of(source, manifest)"
            raise invalid("sampler", f"over the {len(source)} clips of the source", len(sampler.cluster), fix)
        cores = usable_cores()
        if workers > cores and sampler.rank == 0:
            LOG.warning("data.workers = %d is more than there are cores; %d are used", workers, cores)
        self.source, self.sampler, self.batch_size, self.workers = source, sampler, batch_size, min(workers, cores)
        self.collate = collate
        self.skipped: dict[str, str] = {}  # name of a clip -> why
        self._handed_out = sampler.state_dict()

    def __iter__(self) -> Iterator[Collated]:
        self.sampler.load_state_dict(self._handed_out)
        pending: list[Item] = []
        while True:
            epoch, used = self.sampler.epoch, self.sampler.position
            clips = _Clips(self.source, self.sampler)
            init, workers = _leave_stops_to_the_run, self.workers
            for item in DataLoader(clips, None, sampler=self.sampler, num_workers=workers, worker_init_fn=init):
                used += self.sampler.world_size
                self._note(item.skipped)
                if item.clip is None:
                    last, reason = list(item.skipped.items())[-1]
                    count, name = len(item.skipped), self.source.name(last)
                    raise ValueError(f"none of {count} clips could be read, the last: {name}: {reason}")
                pending.append(item.clip)
                if len(pending) == self.batch_size:
                    self._handed_out = self.sampler.state_dict(epoch, used)
                    yield self.collate(pending)
                    pending = []

    def _note(self, skipped: dict[int, str]) -> None:
        for index, reason in skipped.items():
            name = self.source.name(index)
            if name not in self.skipped:
                LOG.warning("skipped clip %s: %s", name, reason)
            self.skipped[name] = reason

    def state_dict(self) -> LoaderState:
        """Where the stream stands: everything before it has been handed out."""
        return LoaderState(**self._handed_out, clips=self._clips)

    @cached_property
    def _clips(self) -> int:
        """The sampler knows numbers of clips alone: as many others would be taken for them."""
        return names_fingerprint(self.source.name(index) for index in range(len(self.source)))

    def load_state_dict(self, state: SamplerState | LoaderState) -> None:
        """Go on from a saved state with the next `iter`; refused when it is of other clips."""
        mine, theirs = self._clips, state.get("clips")
        if theirs not in (None, mine):  # none in checkpoints of older versions
            fix = "resume with the manifest of the first run, or use another run.out"
            raise invalid("the clips of the data", f"those of the run, in their order ({theirs})", mine, fix)
        self.sampler.load_state_dict(state)
        self._handed_out = self.sampler.state_dict()
