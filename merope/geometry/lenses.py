"""Lens models with closed-form inverses, and what all lenses share.

A lens maps pixels to unit rays and points to pixels, both in the camera frame with OpenCV axes (x right, y down,
z forward). The centre of the top-left pixel is (0.5, 0.5), so the image spans [0, width] x [0, height].

Parameters are numbers or tensors whose shapes broadcast to `batch_shape`, one lens per camera; these dimensions are
the leading ones of pixels and points. Values and gradients are finite for every input: where a model is undefined,
`valid` is False, the ray is (0, 0, 1) and the pixel is the principal point.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from merope.errors import invalid
from merope.geometry.lens_parameters import (
    INSIDE_SPHERE,
    NOT_NEGATIVE,
    POSITIVE,
    UNIT_INTERVAL,
    Condition,
    as_parameter,
    settle_parameters,
)

AnyLens = TypeVar("AnyLens", bound="Batched")

MAX_PLANE_RADIUS = 1e3  # focal lengths from the principal point, 89.94 degrees for a pinhole; powers overflow beyond
MIN_DEPTH = 1e-6  # smallest divisor of a unit direction: below, float32 rounding decides the pixel
MIN_DISTANCE = 1e-18  # nearer points count as the camera centre: the gradient of their direction overflows float32
SQRT_FLOOR = 1e-14  # bounds the gradient of a square root at the rim of a lens; moves pixels there by about 1e-14


class Batched(Protocol):
    """One lens or many."""

    @property
    def batch_shape(self) -> torch.Size: ...


class Lens(Batched, Protocol):
    """What the rest of the library needs from a lens."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...

    def unproject(self, pixels: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ..., 2] -> [*batch, ..., 3], bool
        """Unit rays in the camera frame, and where the lens model is defined."""

    def project(self, points: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ..., 3] -> [*batch, ..., 2], bool
        """Pixels of camera-frame points of any scale, and where the lens model is defined and invertible."""

    def to(self, target: torch.device | torch.dtype | str) -> Self:
        """The same lens with its parameters on another device or in another precision."""


def moved(lens: AnyLens, target: torch.device | torch.dtype | str) -> AnyLens:
    """The same lens with its parameters on another device or in another precision."""
    if isinstance(target, torch.dtype):  # a rounded lens is another one
        rounded = {name: value.to(target) for name, value in parameters(lens).items()}
        return replace(lens, **rounded)  # type: ignore[type-var]
    return remade(lens, {name: value.to(target) for name, value in tensors(lens).items()})


def parameters(lens: Batched) -> dict[str, Tensor]:
    """What a lens is made of but for its size; each broadcasts to batch_shape."""
    assert is_dataclass(lens)
    values = {f.name: getattr(lens, f.name) for f in fields(lens) if f.init}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def tensors(lens: Batched) -> dict[str, Tensor]:
    """Its parameters, and what a lens of the library has derived of them; each broadcasts to batch_shape."""
    if not isinstance(lens, FocalLens):
        return parameters(lens)
    return {name: value for name, value in vars(lens).items() if isinstance(value, Tensor)}


def remade(lens: AnyLens, changed: dict[str, Tensor]) -> AnyLens:
    """The lens with other tensors, picked from those of lenses that were checked when they were made.

    A lens of the library is not checked again, and nothing is derived again: on a GPU the host would wait for it.
    """
    if not isinstance(lens, FocalLens):
        return replace(lens, **changed)  # type: ignore[type-var]
    copied = copy.copy(lens)
    for name, value in changed.items():
        object.__setattr__(copied, name, value)
    object.__setattr__(copied, "batch_shape", torch.broadcast_shapes(*(value.shape for value in changed.values())))
    return copied


def aligned(lens: Batched, like: Tensor, *names: str) -> tuple[Tensor, ...]:  # [*batch, ...] -> each [*batch, 1, ...]
    """Parameters in the precision and on the device of `like`, with the batch dimensions leading."""
    shape = lens.batch_shape + (1,) * (like.dim() - len(lens.batch_shape))
    return tuple(getattr(lens, name).to(like).expand(lens.batch_shape).reshape(shape) for name in names)


def fitted(lens: Batched, name: str, coordinates: Tensor, size: int) -> Tensor:  # [*batch or 1, ...] -> [*batch, ...]
    """Check pixels or points [..., size] and expand their leading dimensions to the batch shape of the lens."""
    if not isinstance(coordinates, Tensor):
        raise invalid(name, f"a torch.Tensor [..., {size}]", type(coordinates).__name__, "use torch.as_tensor")
    if coordinates.dtype not in (torch.float32, torch.float64):
        fix = f"pass {name}.float(); half precision cannot tell neighbouring pixels apart"
        raise invalid(name, "floating point, float32 or float64", coordinates.dtype, fix)
    if coordinates.dim() == 0 or coordinates.shape[-1] != size:
        raise invalid(name, f"[..., {size}]", list(coordinates.shape), "put the coordinates last")
    batch, leading = lens.batch_shape, coordinates.shape[:-1]
    if len(leading) < len(batch) or any(n != b and 1 not in (n, b) for n, b in zip(leading, batch, strict=False)):
        fix = "lead with one dimension, of that size or 1, per batch dimension"
        raise invalid(name, f"[*{list(batch)}, ..., {size}]", list(coordinates.shape), fix)
    return coordinates.expand(*torch.broadcast_shapes(leading, batch + (1,) * (len(leading) - len(batch))), size)


def _focal_and_centre(lens: Batched, like: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ...] -> [*batch, 1, ..., 2] × 2
    fx, fy, cx, cy = aligned(lens, like, "fx", "fy", "cx", "cy")
    return torch.stack((fx, fy), dim=-1), torch.stack((cx, cy), dim=-1)


def pixels_to_plane(lens: Batched, pixels: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ..., 2] -> same, bool
    """Plane coordinates ((u - cx) / fx, (v - cy) / fy); 0 and invalid where not finite or absurdly far out."""
    pixels = fitted(lens, "pixels", pixels, 2)
    focal, centre = _focal_and_centre(lens, pixels[..., 0])
    near = ((pixels - centre) / focal).norm(dim=-1) < MAX_PLANE_RADIUS
    return (torch.where(near[..., None], pixels, centre) - centre) / focal, near


def plane_to_pixels(lens: Batched, plane: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ..., 2], bool
    """Pixels (fx x + cx, fy y + cy), the principal point where invalid or absurdly far out."""
    focal, centre = _focal_and_centre(lens, plane[..., 0])
    valid = valid & (plane.norm(dim=-1) < MAX_PLANE_RADIUS)
    return torch.where(valid[..., None], plane, 0.0) * focal + centre, valid


def unit_directions(lens: Batched, points: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ..., 3] -> same, bool
    """Points scaled to length 1; (0, 0, 1) and invalid for the camera centre and for non-finite points."""
    points = fitted(lens, "points", points, 3)
    # Directions do not depend on scale, so a constant scale keeps gradients exact and squares from overflowing.
    scale = points.detach().abs().amax(dim=-1)
    usable = (scale > MIN_DISTANCE) & (scale < math.inf)
    return normalize(forward_unless(usable, points) / torch.where(usable, scale, 1.0)[..., None], dim=-1), usable


def forward_unless(valid: Tensor, vectors: Tensor) -> Tensor:  # bool [...], [..., 3] -> [..., 3]
    """The vectors where valid, the optical axis (0, 0, 1) elsewhere."""
    return torch.where(valid[..., None], vectors, vectors.new_tensor([0.0, 0.0, 1.0]))


def perspective_rays(plane: Tensor) -> Tensor:  # [..., 2] -> [..., 3]
    """Unit rays along (x, y, 1)."""
    return normalize(pad(plane, (0, 1), value=1.0), dim=-1)


def perspective_divide(xy: Tensor, depth: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 2], [...], bool
    """Plane coordinates xy / depth, valid where depth is positive."""
    valid = valid & (depth > MIN_DEPTH)
    return xy / torch.where(valid, depth, 1.0)[..., None], valid


def _raised(vectors: Tensor, z: Tensor) -> Tensor:  # [..., 3], [...] -> [..., 3]
    return torch.cat((vectors[..., :2], (vectors[..., 2] + z)[..., None]), dim=-1)


def _sphere_rays(directions: Tensor, valid: Tensor, xi: Tensor) -> tuple[Tensor, Tensor]:  # [..., 3] -> [..., 3], bool
    """The points s q - (0, 0, xi) at which lines along unit vectors q from (0, 0, -xi) leave the unit sphere."""
    q_z = directions[..., 2]
    square = q_z.square() + (1.0 - xi.square()) * directions[..., :2].square().sum(dim=-1)
    distance = xi * q_z + square.clamp_min(SQRT_FLOOR).sqrt()
    valid = valid & (square >= 0.0) & (distance > MIN_DEPTH)
    return forward_unless(valid, _raised(distance[..., None] * directions, -xi)), valid


def _ellipsoid_plane(vectors: Tensor, valid: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """(x, y) / (alpha d + (1 - alpha) z) with d = sqrt(beta (x^2 + y^2) + z^2); [..., 3] to [..., 2]."""
    xy, z = vectors[..., :2], vectors[..., 2]
    d = (beta * xy.square().sum(dim=-1) + z.square()).clamp_min(SQRT_FLOOR).sqrt()
    seen = z > -_reach(alpha / (1.0 - alpha)) * d
    return perspective_divide(xy, alpha * d + (1.0 - alpha) * z, valid & seen)


def _ellipsoid_rays(plane: Tensor, valid: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Rays along (x, y, z): z = (1 - beta alpha^2 r^2) / (alpha sqrt(1 - (2 alpha - 1) beta r^2) + 1 - alpha)."""
    bend = (2.0 * alpha - 1.0) * beta
    valid = valid & (bend * plane.square().sum(dim=-1) <= 1.0)
    plane = torch.where(valid[..., None], plane, 0.0)
    r2 = plane.square().sum(dim=-1)
    root = (1.0 - bend * r2).clamp_min(SQRT_FLOOR).sqrt()
    z = (1.0 - beta * alpha.square() * r2) / (alpha * root + 1.0 - alpha)
    return normalize(torch.cat((plane, z[..., None]), dim=-1), dim=-1), valid


def _reach(xi: Tensor) -> Tensor:
    """Rays of the unified model are those with z > -reach |ray|; beyond, images repeat or do not exist."""
    return torch.minimum(xi, 1.0 / xi)


@dataclass(frozen=True, eq=False)
class FocalLens(ABC):
    """A lens with a plane before it: pixel (fx x + cx, fy y + cy) of the plane point (x, y)."""

    fx: float | Tensor
    fy: float | Tensor
    cx: float | Tensor
    cy: float | Tensor
    batch_shape: torch.Size = field(init=False, repr=False)
    conditions: ClassVar[Mapping[str, Condition]] = {}  # of further parameters
    to = moved

    def __post_init__(self) -> None:
        settle_parameters(self, **self.conditions)

    def unproject(self, pixels: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ..., 2] -> [*batch, ..., 3], bool
        return self._rays(*pixels_to_plane(self, pixels))

    def project(self, points: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ..., 3] -> [*batch, ..., 2], bool
        return plane_to_pixels(self, *self._plane(*unit_directions(self, points)))

    @abstractmethod
    def _rays(self, plane: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ..., 2] -> [*batch, ..., 3]
        """Unit rays of plane points, and where they are valid."""

    @abstractmethod
    def _plane(self, unit: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [*batch, ..., 3] -> [*batch, ..., 2]
        """Plane points of unit directions, and where they are valid."""


@dataclass(frozen=True, eq=False)
class Pinhole(FocalLens):
    """Plane point (x, y) = (X, Y) / Z; sees what is in front of the camera."""

    width: int
    height: int

    def _rays(self, plane: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 2] -> [..., 3], bool
        return perspective_rays(plane), valid

    def _plane(self, unit: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 3] -> [..., 2], bool
        return perspective_divide(unit[..., :2], unit[..., 2], valid)


@dataclass(frozen=True, eq=False)
class UnifiedCamera(FocalLens):
    """Unified model of Mei: plane point (X, Y) / (Z + xi |(X, Y, Z)|). A pinhole for xi = 0."""

    xi: float | Tensor
    width: int
    height: int
    conditions: ClassVar = {"xi": NOT_NEGATIVE}

    @classmethod
    def from_fov(cls, x_fov_deg: float | Tensor, xi: float | Tensor, width: int, height: int) -> Self:
        """The centred lens with square pixels that sees x_fov_deg degrees along the middle row of its image."""
        fov, mirror = as_parameter("x_fov_deg", x_fov_deg), as_parameter("xi", xi, NOT_NEGATIVE)
        reach_deg = 2.0 * torch.rad2deg(torch.acos(-_reach(mirror)))
        if not bool(((fov > 0.0) & (fov < reach_deg)).all()):
            expected = f"above 0 and below {reach_deg.tolist()}, the reach of xi = {mirror.tolist()}"
            raise invalid("x_fov_deg", expected, fov.tolist(), "narrow it or move xi towards 1")
        half = torch.deg2rad(fov) / 2.0
        focal = (width / 2.0) * (half.cos() + mirror) / half.sin()
        return cls(focal, focal, width / 2.0, height / 2.0, mirror, width, height)

    def _rays(self, plane: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 2] -> [..., 3], bool
        return _sphere_rays(perspective_rays(plane), valid, *aligned(self, plane[..., 0], "xi"))

    def _plane(self, unit: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 3] -> [..., 2], bool
        (xi,) = aligned(self, unit[..., 0], "xi")
        return perspective_divide(unit[..., :2], unit[..., 2] + xi, valid & (unit[..., 2] > -_reach(xi)))


@dataclass(frozen=True, eq=False)
class ExtendedUnified(FocalLens):
    """Plane point (X, Y) / (alpha d + (1 - alpha) Z) with d = sqrt(beta (X^2 + Y^2) + Z^2)."""

    alpha: float | Tensor
    beta: float | Tensor
    width: int
    height: int
    conditions: ClassVar = {"alpha": UNIT_INTERVAL, "beta": POSITIVE}

    def _rays(self, plane: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 2] -> [..., 3], bool
        return _ellipsoid_rays(plane, valid, *aligned(self, plane[..., 0], "alpha", "beta"))

    def _plane(self, unit: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 3] -> [..., 2], bool
        return _ellipsoid_plane(unit, valid, *aligned(self, unit[..., 0], "alpha", "beta"))


@dataclass(frozen=True, eq=False)
class DoubleSphere(FocalLens):
    """Double sphere of Usenko et al.: the point on the unit sphere, moved by xi along z, through the unified model."""

    xi: float | Tensor
    alpha: float | Tensor
    width: int
    height: int
    conditions: ClassVar = {"xi": INSIDE_SPHERE, "alpha": UNIT_INTERVAL}

    def _rays(self, plane: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 2] -> [..., 3], bool
        xi, alpha = aligned(self, plane[..., 0], "xi", "alpha")
        return _sphere_rays(*_ellipsoid_rays(plane, valid, alpha, torch.ones_like(alpha)), xi)

    def _plane(self, unit: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 3] -> [..., 2], bool
        xi, alpha = aligned(self, unit[..., 0], "xi", "alpha")
        return _ellipsoid_plane(_raised(unit, xi), valid, alpha, torch.ones_like(alpha))


@dataclass(frozen=True, eq=False)
class Equirectangular:
    """Full panorama: d = (cos lat sin lon, -sin lat, cos lat cos lon), lon = u / W 2 pi - pi, lat = pi / 2 - v / H pi.

    Pixels outside the image would repeat directions and are invalid. The poles project to longitude 0.
    """

    width: int
    height: int
    batch_shape: torch.Size = field(init=False, repr=False)
    to = moved

    def __post_init__(self) -> None:
        settle_parameters(self)

    def unproject(self, pixels: Tensor) -> tuple[Tensor, Tensor]:  # [..., 2] -> [..., 3], bool
        pixels = fitted(self, "pixels", pixels, 2)
        size = pixels.new_tensor([self.width, self.height])
        valid = ((pixels >= 0.0) & (pixels <= size)).all(dim=-1)
        turns = torch.where(valid[..., None], pixels, size / 2.0) / size - 0.5
        longitude, latitude = turns[..., 0] * (2.0 * math.pi), turns[..., 1] * -math.pi
        level = latitude.cos()
        return torch.stack((level * longitude.sin(), -latitude.sin(), level * longitude.cos()), dim=-1), valid

    def project(self, points: Tensor) -> tuple[Tensor, Tensor]:  # [..., 3] -> [..., 2], bool
        unit, valid = unit_directions(self, points)
        eps = torch.finfo(unit.dtype).eps
        xz = unit[..., 0::2]
        xz = torch.where(xz.norm(dim=-1, keepdim=True) > eps, xz, unit.new_tensor([0.0, eps]))
        longitude, latitude = torch.atan2(xz[..., 0], xz[..., 1]), torch.atan2(-unit[..., 1], xz.norm(dim=-1))
        turns = torch.stack((longitude / (2.0 * math.pi), latitude / -math.pi), dim=-1) + 0.5
        return turns * unit.new_tensor([self.width, self.height]), valid
