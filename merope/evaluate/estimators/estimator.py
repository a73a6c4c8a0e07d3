"""What a pose estimator takes and gives."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.trajectory import check_near
from merope.geometry.lenses import Lens
from merope.geometry.poses import check_rigid


@dataclass(frozen=True, eq=False)
class PoseEstimate:
    """Poses recovered from the T frames of a clip: camera-to-world, OpenCV axes, in a world of the estimator's choice.

    Frames without an answer have `valid` False and the identity for a pose. `is_metric`: the unit is the metre;
    otherwise one scale for the whole clip is unknown. Nothing is aligned: metrics relate poses to the first frame.
    """

    world_from_camera: Tensor  # [T, 4, 4] float64, always finite and rigid
    valid: Tensor  # bool [T]
    is_metric: bool
    name: str  # of the estimator, with what distinguishes its variants
    weights_sha256: str | None = None  # of the files that a learned estimator loaded
    note: str = ""  # why frames are missing, in words
    inliers: int | None = None  # points that fit the pose of the frame with the fewest; None if not counted
    check: str = ""  # what a second estimator says of these poses; empty if none was asked
    doubt: str = ""  # why these poses should not be believed; empty if they can be
    lens: Lens | None = None  # what was found where none was given
    points: Tensor | None = None  # [N, 3] of the scene, in the same world and unit; None if there are none

    def __post_init__(self) -> None:
        poses, valid = self.world_from_camera, self.valid
        if poses.ndim != 3 or valid.dtype != torch.bool or valid.shape != poses.shape[:1]:
            got = f"{list(poses.shape)} and {valid.dtype} {list(valid.shape)}"
            raise invalid("world_from_camera and valid", "[T, 4, 4] and bool [T]", got, "give one flag per pose")
        poses = torch.where(valid[:, None, None], poses.to(torch.float64), torch.eye(4, dtype=torch.float64))
        object.__setattr__(self, "world_from_camera", check_rigid(poses))
        check_near(self.world_from_camera)


class PoseEstimator(Protocol):
    """Recovers the camera of every frame of a clip."""

    def __call__(
        self,
        frames: Tensor,  # uint8 [T, H, W, 3]
        lens: Lens | None,  # of the frames; None if it is not known
    ) -> PoseEstimate:
        """Poses of all frames. A clip that is too hard gives invalid frames and a note, not an exception."""


def failed(count: int, name: str, note: str, is_metric: bool = False) -> PoseEstimate:
    """The estimate of a clip from which nothing was recovered."""
    nothing = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
    return PoseEstimate(nothing, torch.zeros(count, dtype=torch.bool), is_metric, name, note=note)


def check_frames(frames: Tensor, lens: Lens | None) -> None:
    """Refuse what is not a clip of uint8 RGB frames, and a lens that is not theirs."""
    if not isinstance(frames, Tensor) or frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
        got = f"{frames.dtype} {list(frames.shape)}" if isinstance(frames, Tensor) else type(frames).__name__
        fix = "for float images in [0, 1] pass (255 * frames).round().to(torch.uint8), channels last"
        raise invalid("frames", "a uint8 tensor [T, H, W, 3]", got, fix)
    if 0 in frames.shape:
        raise invalid("frames", "at least one frame of at least one pixel", list(frames.shape), "check the video")
    if lens is None:
        return
    count, height, width, _ = frames.shape
    if (lens.height, lens.width) != (height, width):
        got = f"{lens.height}×{lens.width}"
        fix = "scale it with merope.geometry.lens_batches.resized(lens, width, height)"
        raise invalid("lens", f"of the frames' size {height}×{width}", got, fix)
    if tuple(lens.batch_shape) not in ((), (count,)):
        raise invalid("lens", f"one, or one per frame [{count}]", list(lens.batch_shape), "pass the lens of this clip")
