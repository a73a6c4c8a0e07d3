"""Training clips of nuScenes: windows of one camera, with frames of other drives where history is wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from merope.datasets.clip import Clip
from merope.datasets.data_kind import FrameData
from merope.datasets.history_source import FrameLibrary, HistorySource
from merope.datasets.loader import ClipSource
from merope.datasets.nuscenes import NuScenes, Window, read_split
from merope.errors import invalid
from merope.formats.trajectory import Trajectory


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
class NuScenesData(FrameData):
    """Windows of a nuScenes camera."""

    kind: Literal["nuscenes"]
    root: Path
    version: str = "v1.0-trainval"
    split_file: Path | None = None  # JSON {"train": [scene, …], "val": […]}; None takes all scenes
    split: str = "train"
    validation_split: str = "val"
    window_step: int = 1  # frames between the beginnings of windows
    knows_places: ClassVar[bool] = True

    def training_clips(self) -> NuScenesSource:
        return self._windows(self.split)

    def validation_clips(self) -> NuScenesSource | None:
        return None if self.split_file is None else self._windows(self.validation_split)

    def clips_with_history(self, count: int, latent_stride: int) -> tuple[HistorySource, HistorySource | None]:
        """History comes from the training split, also for validation clips: it is what was driven before."""
        clips, held_out = self.training_clips(), self.validation_clips()
        library = FrameLibrary.of(clips.data, self._scenes(self.split))
        with_history = HistorySource(clips, library, count, latent_stride)
        return with_history, None if held_out is None else HistorySource(held_out, library, count, latent_stride)

    def _scenes(self, split: str) -> list[str] | None:
        return None if self.split_file is None else read_split(self.split_file, split)

    def _windows(self, split: str) -> NuScenesSource:
        tables = NuScenes(self.root, self.version)
        windows = tables.windows(self.frames, step=self.window_step, scenes=self._scenes(split))
        if not windows:
            fix = f"the longest scene of {self.root} has {tables.longest_scene}"
            raise invalid("data.frames", "at most the frames of a scene", self.frames, fix)
        return NuScenesSource(tables, windows, self.height, self.width)
