"""From a manifest to batches: an endless, resumable stream of clips that names and counts what it cannot read."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from merope.data.clip import Clip
from merope.data.sampler import ClusterSampler, SamplerState
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import stacked

LOG = logging.getLogger(__name__)


class ClipSource(Protocol):
    """A table of clips that can be loaded one by one, in any process."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What the clip is called in a manifest and in messages."""

    def clip(self, index: int) -> Clip:
        """Load it. ValueError or OSError for a clip that cannot be read."""


@dataclass(frozen=True, eq=False)
class Batch:
    """B clips of T frames."""

    names: tuple[str, ...]
    frames: Tensor  # uint8 [B, T, H, W, 3]
    cameras: Cameras  # [B, T]
    captions: tuple[str, ...]
    fps: Tensor  # [B]


def collate(clips: Sequence[Clip]) -> Batch:
    """Clips of one length, size and kind of lens as a batch."""
    frames = [clip.frames for clip in clips if clip.frames is not None]
    shapes = {tuple(frame.shape) for frame in frames}
    if len(frames) != len(clips) or len(shapes) != 1:
        names = ", ".join(clip.name for clip in clips)
        raise invalid(f"frames of {names}", "of one shape", sorted(shapes), "load all clips with one size and length")
    poses = torch.stack([clip.world_from_camera for clip in clips])
    return Batch(
        names=tuple(clip.name for clip in clips),
        frames=torch.stack(frames),
        cameras=Cameras(poses, stacked([clip.lens for clip in clips])),
        captions=tuple(clip.caption for clip in clips),
        fps=torch.tensor([clip.fps for clip in clips]),
    )


@dataclass(frozen=True)
class _Skipped:
    name: str
    reason: str


class _Clips(Dataset["Clip | _Skipped"]):
    """Loads in worker processes; a clip that cannot be read comes back as its name and the reason."""

    def __init__(self, source: ClipSource) -> None:
        self.source = source

    def __getitem__(self, index: int) -> "Clip | _Skipped":
        try:
            return self.source.clip(index)
        except (ValueError, OSError) as error:
            return _Skipped(self.source.name(index), str(error))


class ClipLoader:
    """An endless stream of batches in the sampler's order, epoch after epoch.

    A clip that cannot be read is left out, logged by name and counted in `skipped`; the batch is filled with the next
    one. `state_dict` speaks of what was handed out, not of what workers have fetched ahead, so a resumed loader goes on
    with the very next clip.
    """

    def __init__(self, source: ClipSource, sampler: ClusterSampler, batch_size: int, workers: int = 0) -> None:
        if len(source) == 0:
            raise invalid("source", "at least one clip", "none", "check the manifest and the split")
        self.source, self.sampler, self.batch_size, self.workers = source, sampler, batch_size, workers
        self.skipped: dict[str, str] = {}  # name of a clip -> why
        self._handed_out = sampler.state_dict()

    def __iter__(self) -> Iterator[Batch]:
        self.sampler.load_state_dict(self._handed_out)
        pending: list[Clip] = []
        failures = 0
        while True:
            epoch, used = self.sampler.epoch, self.sampler.position
            items = DataLoader(_Clips(self.source), sampler=self.sampler, batch_size=None, num_workers=self.workers)
            for item in items:
                used += self.sampler.world_size
                if isinstance(item, _Skipped):
                    failures += 1
                    self._skip(item, failures)
                    continue
                failures = 0
                pending.append(item)
                if len(pending) == self.batch_size:
                    self._handed_out = self.sampler.state_dict(epoch, used)
                    yield collate(pending)
                    pending = []

    def _skip(self, item: _Skipped, failures: int) -> None:
        if item.name not in self.skipped:
            LOG.warning("skipped clip %s: %s", item.name, item.reason)
        self.skipped[item.name] = item.reason
        if failures > max(100, len(self.source)):
            raise RuntimeError(f"none of the last {failures} clips could be read, the last: {item.name}: {item.reason}")

    def state_dict(self) -> SamplerState:
        """Where the stream stands: everything before it has been handed out."""
        return self._handed_out

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on from a saved state with the next `iter`."""
        self.sampler.load_state_dict(state)
        self._handed_out = state
