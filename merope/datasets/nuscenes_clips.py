"""Training clips of nuScenes: windows of one camera or of several at once.

Clips of one camera have frames of other drives where history is wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merope.datasets.clip import Clip
from merope.datasets.data_kind import FrameData, PlacedClips
from merope.datasets.history_source import FrameLibrary, HistorySource
from merope.datasets.loader import ClipSource
from merope.datasets.nuscenes import FRAME_RATE_HZ, Frames, NuScenes, Window, read_split
from merope.errors import invalid
from merope.formats.trajectory import Trajectory
from merope.geometry.lens_batches import in_row
from merope.geometry.lenses import Lens

LARGEST_SKEW_S = 0.75 / FRAME_RATE_HZ
"""Between frames of two cameras that count as one moment: they fire in turn, at the same rate."""


@dataclass(frozen=True)
class NuScenesSource(ClipSource[Clip]):
    """Windows of a nuScenes camera as clips of one size."""

    data: NuScenes
    windows: Sequence[Window]
    height: int
    width: int

    def __len__(self) -> int:
        return len(self.windows)

    def name(self, index: int) -> str:
        return self.data.name(self.windows[index])

    def trajectory(self, index: int) -> Trajectory:
        return self.data.trajectory(self.windows[index])

    def clip(self, index: int) -> Clip:
        return self.data.clip(self.windows[index], self.height, self.width)


@dataclass(frozen=True)
class NuScenesRigSource(ClipSource[Clip]):
    """Windows of several cameras. To every frame of the first one belong those of the others nearest in time.

    Each image keeps the pose of its own instant. Clips are named after the first camera, so that a manifest of its
    paths serves the rig, too.
    """

    first: NuScenesSource
    others: Sequence[NuScenes]
    rows: Sequence[NDArray[np.int64]]  # of each other camera, for every frame of the first: its own frame

    @classmethod
    def of(cls, first: NuScenesSource, others: Sequence[NuScenes]) -> Self:
        """The windows of the first camera that all others have seen, too."""
        rows = [nearest_frames(first.data.frames, other.frames) for other in others]
        is_seen = np.stack(rows).min(axis=0) >= 0
        windows = [window for window in first.windows if is_seen[window.rows].all()]
        return cls(replace(first, windows=windows), others, rows)

    def __len__(self) -> int:
        return len(self.first)

    def name(self, index: int) -> str:
        return self.first.name(index)

    def trajectory(self, index: int) -> Trajectory:
        return self.first.trajectory(index)

    def clip(self, index: int) -> Clip:
        clip, window = self.first.clip(index), self.first.windows[index]
        assert clip.frames is not None
        parts: list[tuple[Tensor, Tensor, Lens]] = [(clip.frames, clip.world_from_camera, clip.lens)]
        for other, rows in zip(self.others, self.rows, strict=True):
            parts.append(other.seen(rows[window.rows], self.first.height, self.first.width))
        frames, poses, lenses = zip(*parts, strict=True)
        lens = in_row(lenses, [window.count] * len(parts))
        return replace(clip, frames=torch.cat(frames), world_from_camera=torch.cat(poses), lens=lens, views=len(parts))


def nearest_frames(of: Frames, among: Frames) -> NDArray[np.int64]:  # [frames of `of`]
    """For every frame of a camera the frame of another that is nearest in time; −1 where none is near."""
    rows = np.full(len(of.scene), -1)
    for scene in np.intersect1d(of.scene, among.scene):
        ours, theirs = np.flatnonzero(of.scene == scene), np.flatnonzero(among.scene == scene)
        wanted, times = of.timestamp_us[ours], among.timestamp_us[theirs]
        after = np.searchsorted(times, wanted).clip(0, len(times) - 1)
        before = (after - 1).clip(0)
        nearest = np.where(np.abs(times[before] - wanted) < np.abs(times[after] - wanted), before, after)
        rows[ours] = np.where(np.abs(times[nearest] - wanted) * 1e-6 <= LARGEST_SKEW_S, theirs[nearest], -1)
    return rows


@dataclass(frozen=True)
class NuScenesData(PlacedClips, FrameData):
    """Windows of a nuScenes camera, or of several as the views of a rig."""

    kind: Literal["nuscenes"]
    root: Path
    version: str = "v1.0-trainval"
    split_file: Path | None = None  # JSON {"train": [scene, …], "val": […]}; None takes all scenes
    split: str = "train"
    validation_split: str = "val"
    window_step: int = 1  # frames between the beginnings of windows
    cameras: tuple[str, ...] = ("CAM_FRONT",)  # channels; several are the views of a rig, which begins with the first
    knows_places: ClassVar[bool] = True
    places = ("split", "validation_split")

    def __post_init__(self) -> None:
        if not self.cameras or len(set(self.cameras)) < len(self.cameras):
            raise invalid("data.cameras", "different channels, at least one", list(self.cameras), "name each once")

    @property
    def views(self) -> int:
        return len(self.cameras)

    def validation_clips(self) -> ClipSource[Clip] | None:
        return None if self.split_file is None else super().validation_clips()

    def clips_with_history(self, count: int, latent_stride: int) -> tuple[HistorySource, HistorySource | None]:
        """History comes from the training split, also for validation clips: it is what was driven before."""
        clips = self._windows(self.split)
        held_out = None if self.split_file is None else self._windows(self.validation_split)
        library = FrameLibrary.of(clips.data, self._scenes(self.split))
        with_history = HistorySource(clips, library, count, latent_stride)
        return with_history, None if held_out is None else HistorySource(held_out, library, count, latent_stride)

    def _scenes(self, split: str) -> list[str] | None:
        return None if self.split_file is None else read_split(self.split_file, split)

    def clips_of(self, place: str) -> NuScenesSource | NuScenesRigSource:  # a split
        first = self._windows(place)
        if self.views == 1:
            return first
        rig = NuScenesRigSource.of(first, [NuScenes(self.root, self.version, name) for name in self.cameras[1:]])
        if not len(rig):
            fix = "check that the images of all channels are in the tables"
            raise invalid("data.cameras", "seen together in some clip", list(self.cameras), fix)
        return rig

    def _windows(self, split: str) -> NuScenesSource:
        tables = NuScenes(self.root, self.version, self.cameras[0])
        windows = tables.windows(self.frames, step=self.window_step, scenes=self._scenes(split))
        if not windows:
            fix = f"the longest scene of {self.root} has {tables.longest_scene}"
            raise invalid("data.frames", "at most the frames of a scene", self.frames, fix)
        return NuScenesSource(tables, windows, self.height, self.width)
