"""Examples of a mixture: every clip by the encoder of its source, joined to one batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from merope.curation.curate import Curation
from merope.datasets.cache import CachedClip
from merope.datasets.clip import Clip
from merope.datasets.data_kind import Data, FileData, FrameData
from merope.datasets.history_source import ClipWithHistory
from merope.datasets.kinds import MixtureData, Opened
from merope.datasets.loader import MOST_STAND_INS, ClipSource
from merope.datasets.mixture import MixedSource, Sourced, joined, source_curation
from merope.datasets.world_data import UndrawnClip, WorldData, WorldSource
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import changed, kind, stacked
from merope.geometry.lenses import Lens
from merope.train.clip_streams import (
    ClipStream,
    Encoder,
    FrameEncoder,
    check_sizes,
    encoder_for,
    finished_stream,
    opened_clips,
)
from merope.train.config import TrainConfig
from merope.train.model import Model
from merope.train.streams import Examples, Share

SAME_RATE = 0.02  # of a frame rate: 12 Hz of a camera are not 12 to the digit


class WorldEncoder:
    """Renders worlds where the model is, and has them encoded as frames."""

    def __init__(self, model: Model) -> None:
        self.frames = FrameEncoder(model)

    def collate(self, clips: Sequence[UndrawnClip]) -> Any:
        """One clip, drawn."""
        ((clips_like, seed),) = [(clip.clips, clip.seed) for clip in clips]
        cameras = clips_like.cameras([seed], self.frames.model.device)
        drawn = Clip(
            name=f"world {seed}",
            world_from_camera=cameras.world_from_camera[0].cpu(),
            lens=clips_like.rig(seed).lenses(clips_like.frames),
            timestamps_s=torch.arange(clips_like.frames, dtype=torch.float64) / clips_like.frame_rate_hz,
            fps=clips_like.frame_rate_hz,
            frames=clips_like.pictures([seed], cameras)[0].cpu(),
            views=clips_like.views,
        )
        return self.frames.collate([drawn])

    def examples(self, batch: Any, places: tuple[int, ...], step: int) -> Examples:
        return self.frames.examples(batch, places, step)


class MixedEncoder:
    """Clips of several sources as one batch. Each is encoded by itself: sources differ in how."""

    collate = staticmethod(tuple)

    def __init__(self, names: tuple[str, ...], encoders: tuple[Encoder, ...]) -> None:
        self.names, self.encoders = names, encoders

    def examples(self, batch: tuple[Sourced, ...], places: tuple[int, ...], step: int) -> Examples:
        parts = []
        for item, place in zip(batch, places, strict=True):
            encoder, name = self.encoders[item.source], self.names[item.source]
            examples = encoder.examples(encoder.collate([item.clip]), (place,), step)
            parts.append(replace(examples, names=(f"{name}/{examples.names[0]}",), sources=(item.source,)))
        return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: Sequence[Examples]) -> Examples:
    """Examples of one clip each as one batch. None of them has history: it comes one clip at a time."""
    cameras = [part.cameras for part in parts]
    poses = torch.cat([camera.world_from_camera for camera in cameras])
    lenses = stacked([_of_one_clip(camera.lens) for camera in cameras])
    return Examples(
        names=tuple(name for part in parts for name in part.names),
        places=tuple(place for part in parts for place in part.places),
        clean=torch.cat([part.clean for part in parts]),
        text=torch.cat([part.text for part in parts]),
        no_text=parts[0].no_text,
        cameras=Cameras(poses, lenses, views=cameras[0].views),
        sources=tuple(source for part in parts for source in part.sources),
    )


def _of_one_clip(lens: Lens) -> Lens:  # [1, 1] or [1, T] -> [1] or [T]
    return changed(lens, lambda value: value[0] if value.ndim == 2 else value)


def mixed_stream(config: TrainConfig, data: MixtureData, model: Model, share: Share) -> ClipStream:
    """The stream of a config whose data are a mixture."""
    if config.history is not None and not any(own.knows_places for own in data.sources if isinstance(own, FrameData)):
        fix = "add nuScenes, or leave out [history]"
        raise invalid("data.sources with [history]", "one at least that knows places", data.source_names, fix)
    source, held_out = data.opened(partial(_open, config, model))
    check_alike(data, source, config.run.micro_batch)
    encoders = tuple(
        WorldEncoder(model) if isinstance(part, WorldSource) else encoder_for(config, model, part)
        for part in source.parts
    )
    curation, chances = mixed_curation(data, source)
    encoder = MixedEncoder(data.source_names, encoders)
    return finished_stream(config, source, held_out, encoder, share, curation, chances)


def mixed_curation(data: MixtureData, source: MixedSource) -> tuple[Curation, Tensor | None]:  # of all clips, chances
    """One set of clusters over all sources, drawn alike; or the clusters of each, with its weight."""
    if data.clusters is not None:
        return source_curation(source, data), None
    curations = [
        source_curation(part, own) if isinstance(own, FileData) else _one_cluster(len(part))
        for own, part in zip(data.sources, source.parts, strict=True)
    ]
    return joined(curations, [own.weight for own in data.sources])


def _one_cluster(count: int) -> Curation:
    return Curation(torch.zeros(count, dtype=torch.long), torch.arange(count))


def _open(config: TrainConfig, model: Model, data: Data) -> Opened:
    """The clips of a source."""
    if isinstance(data, WorldData):
        check_sizes(config, model, data.height, data.width, data.frames)
        return data.mixed_clips(config.objective.prefix_frames)
    assert isinstance(data, FileData)
    return opened_clips(config, model, data)


@dataclass(frozen=True)
class Likeness:
    """What clips must share to be mixed, seen on one of them."""

    size: tuple[int, int, int, int]  # views, frames, height, width
    frame_rate_hz: float
    scale: str
    lens: str


def check_alike(data: MixtureData, source: MixedSource, micro_batch: int) -> None:
    """Refuse sources that cannot be mixed, by the first clip of each that can be read."""
    seen = {name: likeness(first_readable(name, part)) for name, part in zip(source.names, source.parts, strict=True)}
    rates = {name: one.frame_rate_hz for name, one in seen.items()}
    if max(rates.values()) > (1 + SAME_RATE) * min(rates.values()) and "frame_rate" not in data.may_differ:
        shown = {name: f"{rate:.4g} Hz" for name, rate in rates.items()}
        _refuse("frame rate", shown, 'resample them, or set data.may_differ = ["frame_rate"]')
    if "scale" not in data.may_differ:
        fix = 'scale all to metres, or set data.may_differ = ["scale"]: the model then learns no metres'
        _compare("scale", {name: one.scale for name, one in seen.items()}, fix)
    fix = "give all the same frames, height and width"
    _compare("views × frames × height × width", {name: "×".join(map(str, one.size)) for name, one in seen.items()}, fix)
    if micro_batch > 1:
        fix = "set run.micro_batch = 1, which leaves the run what it is"
        _compare("lens within a batch", {name: one.lens for name, one in seen.items()}, fix)


def _compare(what: str, values: dict[str, str], fix: str) -> None:
    if len(set(values.values())) > 1:
        _refuse(what, values, fix)


def _refuse(what: str, values: dict[str, str], fix: str) -> None:
    got = ", ".join(f"{name} with {value}" for name, value in values.items())
    raise invalid("data.sources", f"of one {what}", got, fix)


def likeness(clip: Any) -> Likeness:
    """Of what a source delivers."""
    if isinstance(clip, ClipWithHistory):
        clip = clip.clip
    if isinstance(clip, UndrawnClip):
        like = clip.clips
        size = (like.views, like.frames, like.height, like.width)
        return Likeness(size, like.frame_rate_hz, "metres", type(like.lens(clip.seed)).__name__)
    path: Any = clip.trajectory if isinstance(clip, CachedClip) else clip
    steps_s = path.timestamps_s.diff()
    rate_hz = 1.0 / float(steps_s.median()) if isinstance(clip, CachedClip) else clip.fps
    frames = len(path.world_from_camera) // (1 if isinstance(clip, CachedClip) else clip.views)
    size = (clip.views, frames, path.lens.height, path.lens.width)
    return Likeness(size, rate_hz, "metres" if path.is_metric else "an arbitrary one", kind(path.lens).split()[0])


def first_readable(name: str, source: ClipSource[Any]) -> Any:
    """The first clip of a few that can be read; the loader names the others when it comes to them."""
    reason = "none"
    for index in range(min(len(source), MOST_STAND_INS)):
        try:
            return source.clip(index)
        except Exception as error:  # whatever a broken file sets off
            reason = f"{source.name(index)}: {error}"
    raise invalid(f"source {name!r} of the mixture", "a clip that can be read", reason, "mend it, or leave it out")
