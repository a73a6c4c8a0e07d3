"""Poses that another program has already recovered, from a file in any format that the library reads."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.evaluate.estimators.estimator import PoseEstimate, check_frames
from merope.formats import read
from merope.formats.checks import require_increasing_times
from merope.formats.trajectory import Trajectory
from merope.geometry.lenses import Lens


@dataclass(frozen=True)
class PrecomputedEstimator:
    """The poses of one clip from a file or folder (docs/formats.md).

    One pose per frame; or fewer, where the format names its images by frame number, as a COLMAP model does that could
    not register all. `is_metric` overrules what the format implies. `video_frames` is the length of the video that the
    file was made from, where only its first frames are asked for.
    """

    path: Path | str
    format: str | None = None
    is_metric: bool | None = None
    video_frames: int | None = None

    @property
    def name(self) -> str:
        return f"precomputed ({Path(self.path).name})"

    def __call__(self, frames: Tensor, lens: Lens | None = None) -> PoseEstimate:  # uint8 [T, H, W, 3]
        check_frames(frames, None)
        trajectory = read(self.path, self.format, is_metric=self.is_metric)
        require_increasing_times(trajectory, self.path)
        index = self._frames_of(trajectory, len(frames))
        asked = index < len(frames)
        poses = torch.eye(4, dtype=torch.float64).repeat(len(frames), 1, 1)
        valid = torch.zeros(len(frames), dtype=torch.bool)
        poses[index[asked]], valid[index[asked]] = trajectory.world_from_camera[asked], True
        missing = len(frames) - int(asked.sum())
        note = f"{missing} of {len(frames)} frames are not in the file" if missing else ""
        return PoseEstimate(poses, valid, trajectory.is_metric, self.name, note=note)

    def _frames_of(self, trajectory: Trajectory, count: int) -> Tensor:  # int64 [poses]
        """The frame of each pose. Image numbers count from 0 or from 1; which, must show in the first or the last."""
        asked, count = count, self.video_frames or count
        if trajectory.count == count:
            return torch.arange(count)
        stems = [Path(name).stem for name in trajectory.frame_names or ()]
        numbers = torch.tensor([int(stem) for stem in stems if stem.isdecimal()], dtype=torch.int64)
        if len(numbers) == trajectory.count < count and len(numbers.unique()) == len(numbers):
            low, high = int(numbers.min()), int(numbers.max())
            if low == 0 and high < count:
                return numbers
            if low > 0 and high == count:
                return numbers - 1
        if trajectory.count == asked:
            return torch.arange(asked)
        got = f"{trajectory.count} poses for {count} frames"
        fix = "write one pose per frame, or name the images of a partial model 000000, 000001, …"
        raise invalid(f"poses in {self.path}", "one per frame, or numbered by frame", got, fix)
