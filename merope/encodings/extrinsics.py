"""Extrinsics as features: the twelve numbers of every frame's pose, for methods that have no rays.

So MotionCtrl (Wang et al. 2024) and ReCamMaster (Bai et al. 2025) describe a camera: the 3×4 matrix, flattened. It does
not say where in the image a token is, nor what the lens is.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from merope.encodings.gta import scaled_poses
from merope.encodings.option_types import check_types
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.rays import check_grid


@dataclass(frozen=True)
class Extrinsics:
    """Rows of (R | t) of every camera in the frame of the first posed one, the same for all tokens of a frame.

    translation_scale: multiplies t (metres), once for a whole data set.
    """

    channels: ClassVar[int] = 12

    translation_scale: float = 1.0

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        if not 0 <= self.translation_scale < math.inf:
            raise invalid("translation_scale", "finite and at least 0", self.translation_scale, "1 keeps metres")

    def features(
        self,
        cameras: Cameras,
        grid: tuple[int, int],  # rows, columns
    ) -> Tensor:  # [B or 1, N, 12]
        """Twelve numbers per token, row-major; zeros, which no pose has, for cameras without one."""
        rows, columns = check_grid(grid)
        poses = scaled_poses(cameras.relative_to(cameras.origin()), self.translation_scale)
        numbers = poses[..., :3, :].flatten(-2)  # [(B,) V, 12]
        if cameras.has_pose is not None:
            numbers = torch.where(cameras.has_pose[..., None], numbers, 0.0)
        per_token = numbers.repeat_interleave(rows * columns, dim=-2)
        return per_token.reshape(-1, *per_token.shape[-2:]).to(cameras.dtype)
