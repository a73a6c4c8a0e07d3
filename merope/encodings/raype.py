"""What RayPE (Yin et al. 2026) reads of a ray: its direction, that of its moment, and how long the moment is."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from merope.encodings.option_types import check_types
from merope.encodings.rotary import check_positive
from merope.geometry.cameras import Cameras

MOMENT_FLOOR = 1e-3
"""Moments shorter than this, in scaled metres, have this length: there a direction of the moment would be rounding."""


@dataclass(frozen=True)
class RayCoordinates:
    """(d, m / ‖m‖, log ‖m‖) of the ray through every patch's centre, in the frame of the first posed camera.

    d is the ray's direction and m = o × d its moment. The rays of the first camera pass the origin and have none: their
    second part is 0, and shorter than 1 below MOMENT_FLOOR.

    translation_scale: multiplies camera centres o (metres), once for a whole data set.
    """

    channels: ClassVar[int] = 7

    translation_scale: float = 1.0

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        check_positive("translation_scale", self.translation_scale, "1 keeps metres")

    def features(
        self,
        cameras: Cameras,
        grid: tuple[int, int],  # rows, columns
    ) -> Tensor:  # [B or 1, N, 7]
        """One row per token; zeros for what has no ray or no pose."""
        rays, valid = cameras.rays(grid)
        poses = cameras.relative_to(cameras.origin())
        directions = rays @ poses[..., :3, :3].mT
        centres = (self.translation_scale * poses[..., None, :3, 3]).expand_as(directions)
        moments = torch.linalg.cross(centres, directions)
        lengths = moments.square().sum(-1, keepdim=True).clamp_min(MOMENT_FLOOR**2).sqrt()
        numbers = torch.cat((directions, moments / lengths, lengths.log()), dim=-1)
        numbers = torch.where(valid[..., None], numbers, 0.0)
        return numbers.reshape(-1, cameras.count * rays.shape[-2], self.channels).to(cameras.dtype)
