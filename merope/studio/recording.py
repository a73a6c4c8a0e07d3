"""What a drive leaves: a video that grows block by block in the session's folder, and the cameras of its frames."""

import os
from pathlib import Path

import torch
from torch import Tensor

from merope import formats
from merope.formats.growing_video import append_frames, fragment_ends
from merope.formats.trajectory import Trajectory
from merope.geometry.lenses import Lens

POSE_FORMATS = {"json": "merope", "tum": "tum", "kitti": "kitti"}
"""Kinds of pose files that can be saved, by the ending of the file, and the format of each."""


class Recording:
    """The video and the cameras of one drive. Only the first block cannot be taken back."""

    def __init__(self, video: Path, fps: float, lens: Lens) -> None:
        self.video, self.fps, self.lens = video, fps, lens
        self._blocks: list[Tensor] = []  # each [T, 4, 4]

    @property
    def frames(self) -> int:
        return sum(len(block) for block in self._blocks)

    @property
    def poses(self) -> Tensor:  # [T, 4, 4]
        return torch.cat(self._blocks)

    def add(self, frames: Tensor, world_from_camera: Tensor) -> None:  # uint8 [T, H, W, 3], [T, 4, 4]
        append_frames(self.video, frames, self.frames, self.fps)
        self._blocks.append(world_from_camera)

    def take_back(self) -> None:
        """Forget the last block."""
        os.truncate(self.video, fragment_ends(self.video)[len(self._blocks) - 2])
        self._blocks.pop()

    def write_cameras(self, kind: str) -> Path:
        """The cameras as a pose file beside the video."""
        return write_cameras(self.poses, self.lens, self.fps, self.video.with_suffix(f".{kind}"))


def write_cameras(world_from_camera: Tensor, lens: Lens, fps: float, file: Path) -> Path:  # [T, 4, 4]
    """A pose file in the format of its ending."""
    times_s = torch.arange(len(world_from_camera), dtype=torch.float64) / fps
    path = Trajectory(world_from_camera, True, "commanded in merope studio", times_s, lens, name=file.stem)
    formats.write(path, file, POSE_FORMATS[file.suffix[1:]])
    return file
