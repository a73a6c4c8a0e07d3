"""Training clips of the procedural world."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from merope.datasets.data_kind import Data
from merope.datasets.loader import ClipSource
from merope.errors import invalid
from merope.world.clips import HELD_OUT_SEEDS, WorldClips

MIXED_WORLDS = 1 << 17
"""Worlds that a mixture draws from where `worlds` does not say how many."""
HELD_OUT_WORLDS = 1024
"""Worlds that a mixture may validate on."""


@dataclass(frozen=True, eq=False)
class UndrawnClip:
    """A clip of the procedural world, to be rendered where the model is."""

    clips: WorldClips
    seed: int


@dataclass(frozen=True)
class WorldSource(ClipSource[UndrawnClip]):
    """A table of worlds, as a source of a mixture."""

    clips: WorldClips
    first_seed: int
    count: int

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"world {self.first_seed + index}"

    def clip(self, index: int) -> UndrawnClip:
        return UndrawnClip(self.clips, self.first_seed + index)


@dataclass(frozen=True)
class WorldData(Data):
    """Clips of the procedural world.

    Without `worlds` clips are rendered as they are needed, each of a fresh world. With it, so many clips are rendered,
    encoded by the model's VAE and kept in memory, and steps draw from them again and again.
    """

    kind: Literal["world"]
    frames: int = 13
    height: int = 72
    width: int = 128
    frame_rate_hz: float = 4.0
    fov_deg: tuple[float, float] = (70.0, 70.0)  # horizontal, drawn uniformly
    xi: tuple[float, float] = (0.0, 0.0)  # mirror parameter of the unified camera model; 0 is a pinhole
    rig_yaw_deg: tuple[float, ...] = (0.0,)  # where the views of a rig look, right positive
    rig_fov_deg: tuple[float, ...] = ()  # of each view; fov_deg where it is left out
    rig_offset_m: float = 0.0  # of each camera from the middle of the rig, in its own direction
    noise_draws: int = 1  # places of a batch that share a rendered clip, each with noise of its own
    keep_renders: Path | None = None  # folder whose clips other runs with the same clips need not make again
    worlds: int | None = None  # clips that are kept in memory; None: every clip is fresh
    first_worlds: int = 256  # of them, made before the first step
    worlds_per_step: float = 4.0  # made between the steps, until there are `worlds`
    knows_places: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.noise_draws < 1:
            raise invalid("data.noise_draws", "at least 1", self.noise_draws, "1 gives every place a clip of its own")
        if not 0.0 <= self.worlds_per_step < math.inf:
            raise invalid("data.worlds_per_step", "at least 0", self.worlds_per_step, "4 is usual")

    def check_pool(self) -> None:
        """Refuse more first clips than there are in all. A mixture draws from all worlds at once and needs no pool."""
        if self.worlds is not None and not 1 <= self.first_worlds <= self.worlds:
            expected = f"in [1, data.worlds = {self.worlds}]"
            raise invalid("data.first_worlds", expected, self.first_worlds, "training begins with these")

    @property
    def views(self) -> int:
        return len(self.rig_yaw_deg)

    def mixed_clips(self, prefix_frames: int) -> tuple[WorldSource, WorldSource]:  # to train on, to validate on
        """The worlds that a mixture draws from."""
        clips, count = self.clips(prefix_frames), MIXED_WORLDS if self.worlds is None else self.worlds
        return WorldSource(clips, HELD_OUT_SEEDS, count), WorldSource(clips, 0, HELD_OUT_WORLDS)

    def clips(self, prefix_frames: int) -> WorldClips:  # clean frames of the objective
        """What the clips are like. A drive begins with at least one frame before it changes."""
        shared = {key.name: getattr(self, key.name) for key in fields(WorldClips) if hasattr(self, key.name)}
        return WorldClips(**shared, prefix_frames=max(prefix_frames, 1))
