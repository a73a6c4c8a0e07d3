"""A data set that the library does not know, in one file. A test makes its entry in DATA_KINDS and trains on it."""

from dataclasses import dataclass
from typing import Literal

import torch

from merope.datasets.clip import Clip
from merope.datasets.data_kind import FrameData
from merope.datasets.loader import ClipSource
from merope.geometry.lenses import Pinhole


@dataclass(frozen=True)
class ColouredClips(ClipSource[Clip]):
    """Frames of one colour each, along a straight line."""

    colours: tuple[int, ...]
    data: "ColouredData"

    def __len__(self) -> int:
        return len(self.colours)

    def name(self, index: int) -> str:
        return f"colour {self.colours[index]}"

    def clip(self, index: int) -> Clip:
        count, height, width = self.data.frames, self.data.height, self.data.width
        world_from_camera = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
        world_from_camera[:, 2, 3] = torch.arange(count)
        return Clip(
            name=self.name(index),
            world_from_camera=world_from_camera,
            lens=Pinhole(width, width, width / 2, height / 2, width, height),
            timestamps_s=torch.arange(count, dtype=torch.float64),
            fps=1.0,
            frames=torch.full((count, height, width, 3), self.colours[index], dtype=torch.uint8),
        )


@dataclass(frozen=True)
class ColouredData(FrameData):
    """Clips of one colour."""

    kind: Literal["coloured"]
    colours: tuple[int, ...]
    validation_colours: tuple[int, ...] = ()

    def training_clips(self) -> ColouredClips:
        return ColouredClips(self.colours, self)

    def validation_clips(self) -> ColouredClips:
        return ColouredClips(self.validation_colours, self)
