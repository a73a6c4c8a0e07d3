"""Additive conditioning: what the cameras see, as numbers per token that are added to a layer's input.

Unlike every other file here this is not an operator on pairs of tokens. Nothing in attention relates two cameras: the
model has to learn that from sums. Ray features are those of CameraCtrl (He et al. 2025) and of Lyra 2.0 (Shen et al.
2026), the latitude-up map is that of UCPE (Zhang et al. 2026).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from merope.encodings.option_types import check_types
from merope.encodings.rotary import check_positive
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Equirectangular, Lens
from merope.geometry.rays import check_grid, patch_pixels

UP_STEP_RAD = 0.1
"""How far a ray is turned towards the sky to see which way that is in the image; on a panorama at most half the way."""

POLE_FLOOR = 1e-6
"""Sine of the angle to the vertical below which a ray has no direction "up"."""


class AdditiveFeatures(Protocol):
    """Numbers per token that describe its camera and rays."""

    @property
    def channels(self) -> int:
        """Numbers per token."""

    def features(
        self,
        cameras: Cameras,
        grid: tuple[int, int],  # rows, columns
    ) -> Tensor:  # [B or 1, N, channels] in the dtype of cameras
        """One row per token, camera-major, then row-major; zero for what has no ray."""


@dataclass(frozen=True)
class RayFeatures:
    """The rays of a grid of points inside every patch, in the frame of the first posed camera.

    kind: "plucker" is (o × d, d), CameraCtrl's; "origin_direction" is (o, d), Lyra 2.0's.
    samples: rays per side of a patch, through the centres of samples × samples equal cells.
    translation_scale: multiplies all camera centres o (metres), once for a whole data set.
    Channels: ray by ray, row-major inside the patch, six numbers each.
    """

    kind: Literal["plucker", "origin_direction"] = "plucker"
    samples: int = 8
    translation_scale: float = 1.0

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        if self.samples < 1:
            raise invalid("samples", "an int ≥ 1", repr(self.samples), "8 gives 384 channels")
        check_positive("translation_scale", self.translation_scale, "1 keeps metres")

    @property
    def channels(self) -> int:
        """Six numbers per ray."""
        return 6 * self.samples**2

    def features(
        self,
        cameras: Cameras,
        grid: tuple[int, int],  # rows, columns
    ) -> Tensor:  # [B or 1, N, 6 · samples²]
        """Rays of all tokens; a ray that the lens does not see, or of a camera without a pose, is six zeros."""
        rows, columns = check_grid(grid)
        rays, valid = cameras.rays((rows * self.samples, columns * self.samples))  # camera frame
        origin_from_camera = cameras.relative_to(cameras.origin())[..., None, :, :]  # [(B,) V, 1, 4, 4]
        directions = (origin_from_camera[..., :3, :3] @ rays[..., None]).squeeze(-1)
        centres = (self.translation_scale * origin_from_camera[..., :3, 3]).expand_as(directions)
        first = torch.linalg.cross(centres, directions) if self.kind == "plucker" else centres
        numbers = torch.where(valid[..., None], torch.cat((first, directions), dim=-1), 0.0)
        cells = numbers.unflatten(-2, (rows, self.samples, columns, self.samples)).transpose(-4, -3)
        return cells.reshape(-1, cameras.count * rows * columns, self.channels).to(cameras.dtype)


@dataclass(frozen=True)
class LatitudeUp:
    """UCPE's latitude-up map: the image direction (u, v) in which "up" lies, and the ray's latitude in radians.

    The world must be aligned with gravity, y down as in OpenCV, so that up is (0, −1, 0): the one thing that relative
    poses cannot say. Turning the world about the vertical, or shifting it, changes nothing.
    """

    channels: ClassVar[int] = 3

    def features(
        self,
        cameras: Cameras,
        grid: tuple[int, int],  # rows, columns
    ) -> Tensor:  # [B or 1, N, 3]
        """(u, v) of unit length and latitude; zeros where the lens sees nothing and for cameras without a pose.

        (u, v) alone is zero for rays along the vertical, and where the turned ray leaves the lens.
        """
        rays, valid = cameras.rays(grid)
        up = -cameras.world_from_camera[..., 1, None, :3].expand_as(rays)  # Rᵀ (0, −1, 0), camera frame
        sine = (up * rays).sum(-1, keepdim=True)
        across = up - sine * rays
        tilted = valid[..., None] & (across.detach().norm(dim=-1, keepdim=True) > POLE_FLOOR)
        cosine = torch.where(tilted, across, up).norm(dim=-1, keepdim=True)  # 1 at the poles, where it is not read
        # Rodrigues about rays × up: perpendicular to the ray, so that the third term of the formula vanishes.
        step_rad = torch.full_like(sine, UP_STEP_RAD)
        if isinstance(cameras.lens, Equirectangular):  # beyond the zenith a panorama goes down, on its other side
            step_rad = torch.minimum(step_rad, torch.atan2(cosine, sine) / 2)
        turned = step_rad.cos() * rays + step_rad.sin() * across / cosine
        pixels, seen = _project(cameras.lens, turned)
        step = pixels - patch_pixels(cameras.lens, grid).to(cameras.device)
        if isinstance(cameras.lens, Equirectangular):  # its left and right edge are one meridian: the short way round
            width = cameras.lens.width
            step = torch.cat((torch.remainder(step[..., :1] + width / 2, width) - width / 2, step[..., 1:]), dim=-1)
        image_up = _unit_or_zero(step, tilted & seen[..., None])
        latitude = torch.atan2(sine, torch.where(tilted, cosine, 0.0))
        numbers = torch.cat((image_up, torch.where(valid[..., None], latitude, 0.0)), dim=-1)
        return numbers.reshape(-1, cameras.count * rays.shape[-2], self.channels).to(cameras.dtype)


class AdditiveCamera(nn.Module):
    """hidden + W · features, with W zero at first: a pretrained block is unchanged until it learns.

    It stands before the query and key projections of self-attention only, q = Wq(x'), k = Wk(x'), v = Wv(x) with
    x the modulated input and x' = AdditiveCamera(x): the camera decides where to look, never what is copied (Lyra 2.0;
    the paper's CameraCtrl-style baseline). One per block. There is no bias, so tokens without a camera get nothing.
    """

    def __init__(self, features: AdditiveFeatures, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features.channels, dim, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(
        self,
        hidden: Tensor,  # [B, N, dim]
        features: Tensor,  # [B or 1, N, channels]
    ) -> Tensor:  # [B, N, dim]
        """What the query and key projections are given; in the dtype of hidden."""
        batches = (1, hidden.shape[0])
        if features.ndim != 3 or features.shape[0] not in batches or features.shape[1] != hidden.shape[1]:
            expected = f"[{hidden.shape[0]} or 1, {hidden.shape[1]}, {self.linear.in_features}] like hidden"
            raise invalid("features", expected, list(features.shape), "append zero rows for tokens without a camera")
        return hidden + self.linear(features.to(self.linear.weight.dtype)).to(hidden.dtype)


def _project(
    lens: Lens,
    points: Tensor,  # [(B,) V, P, 3]
) -> tuple[Tensor, Tensor]:  # [(B,) V, P, 2], bool [(B,) V, P]
    """Pixels of camera-frame points of every camera, where a lens may lack the leading dimensions of the poses."""
    missing = points.ndim - 2 - len(lens.batch_shape)
    leading = tuple(range(missing))
    pixels, valid = lens.project(points.movedim(leading, tuple(range(-1 - missing, -1))))
    return pixels.movedim(tuple(range(-1 - missing, -1)), leading), valid.movedim(tuple(range(-missing, 0)), leading)


def _unit_or_zero(
    vectors: Tensor,  # [..., 2]
    defined: Tensor,  # bool [..., 1]
) -> Tensor:  # [..., 2]
    """Vectors of length 1, zero where not defined, with finite gradients everywhere."""
    length = torch.where(defined, vectors, torch.ones_like(vectors)).norm(dim=-1, keepdim=True)
    return torch.where(defined, vectors / length, 0.0)
