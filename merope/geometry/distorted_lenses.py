"""Polynomial lens models, inverted with Newton's method.

The iterations run without gradients. One more Newton step, of which only the gradient is kept, gives the solution its
exact first derivatives by pixels and parameters (implicit function theorem). Either model is used only up to where it
stops being one-to-one. That limit is found at construction: rebuild a lens whose parameters were changed in place.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from merope.geometry.lenses import (
    MAX_PLANE_RADIUS,
    FocalLens,
    aligned,
    forward_unless,
    perspective_divide,
    perspective_rays,
)

MIN_SLOPE = 1e-4  # a flatter curve counts as no longer growing, so gradients of the inverse stay below 1e4
LIMIT_SAMPLES = 1024
BISECTION_STEPS = 60  # down to float64 precision
NEWTON_STEPS = 20  # four or five are usual, more are needed where the image ends

Coefficients = Sequence[Tensor]
Margin = Callable[[Tensor, Coefficients], Tensor]

FISHEYE = ("k1", "k2", "k3", "k4")
BROWN = ("p1", "p2", "k1", "k2", "k3", "k4", "k5", "k6")


def growth_limit(lens: FocalLens, names: tuple[str, ...], margin: Margin, upper: float) -> Tensor:  # [*batch]
    """Where margin(x, coefficients) first stops being positive as x goes from 0 to `upper`, in radians."""
    like = torch.empty(*lens.batch_shape, 1, dtype=torch.float64, device=getattr(lens, names[0]).device)
    coefficients = tuple(c.detach() for c in aligned(lens, like, *names))
    grid = torch.linspace(0.0, upper, LIMIT_SAMPLES, dtype=like.dtype, device=like.device)
    last = (margin(grid, coefficients) > 0.0).int().cumprod(dim=-1).sum(dim=-1, keepdim=True) - 1  # [*batch, 1]
    low, high = grid[last], grid[(last + 1).clamp_max(LIMIT_SAMPLES - 1)]
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2.0
        positive = margin(middle, coefficients) > 0.0
        low, high = torch.where(positive, middle, low), torch.where(positive, high, middle)
    return low[..., 0]


def fisheye_curve(angle: Tensor, k: Coefficients) -> tuple[Tensor, Tensor]:  # [...] -> [...], [...]
    """Plane radius t (1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8) of the angle t, and its slope."""
    t2 = angle.square()
    k1, k2, k3, k4 = k
    radius = angle * (1.0 + t2 * (k1 + t2 * (k2 + t2 * (k3 + t2 * k4))))
    return radius, 1.0 + t2 * (3.0 * k1 + t2 * (5.0 * k2 + t2 * (7.0 * k3 + t2 * 9.0 * k4)))


def fisheye_angle(radius: Tensor, k: Coefficients, max_angle: Tensor) -> Tensor:  # [...] -> [...]
    """Inverse of `fisheye_curve` for radii up to that of `max_angle`: Newton's method, bisection where it fails."""
    with torch.no_grad():
        low, high = torch.zeros_like(radius), max_angle.expand_as(radius)
        angle, last_step = torch.minimum(radius, high), high
        for _ in range(BISECTION_STEPS):
            value, slope = fisheye_curve(angle, k)
            done = (value - radius).abs() <= 16.0 * torch.finfo(radius.dtype).eps * radius
            if bool(done.all()):
                break
            low, high = torch.where(value < radius, angle, low), torch.where(value < radius, high, angle)
            step = (radius - value) / slope.clamp_min(MIN_SLOPE)
            # Newton steps that do not shrink may go to and fro for ever between both ends of the bracket.
            good = (angle + step >= low) & (angle + step <= high) & (step.abs() <= 0.75 * last_step.abs())
            last_step = torch.where(good, step, (low + high) / 2.0 - angle)
            angle = torch.where(done, angle, angle + last_step)
    value, slope = fisheye_curve(angle, k)
    step = (radius - value) / slope.detach().clamp_min(MIN_SLOPE)
    return angle + (step - step.detach())


def _fisheye_margin(angle: Tensor, k: Coefficients) -> Tensor:
    return fisheye_curve(angle, k)[1] - MIN_SLOPE


@dataclass(frozen=True, eq=False)
class KannalaBrandt(FocalLens):
    """OpenCV fisheye: a direction t radians off axis has plane radius t (1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8).

    `max_angle` [*batch], at most pi, is how far off axis the lens sees.
    """

    width: int
    height: int
    k1: float | Tensor = 0.0
    k2: float | Tensor = 0.0
    k3: float | Tensor = 0.0
    k4: float | Tensor = 0.0
    max_angle: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "max_angle", growth_limit(self, FISHEYE, _fisheye_margin, math.pi))

    def _rays(self, plane: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 2] -> [..., 3], bool
        max_angle, *k = aligned(self, plane[..., 0], "max_angle", *FISHEYE)
        max_radius = fisheye_curve(max_angle, k)[0].detach()
        r2 = plane.square().sum(dim=-1)
        valid = valid & (r2 <= max_radius.square())
        off_axis = _is_off_axis(r2)
        radius = torch.where(valid & off_axis, r2, (max_radius / 2.0).square()).sqrt()
        angle = fisheye_angle(radius, k, max_angle)
        xy = plane * torch.where(off_axis, angle.sin() / radius, 1.0)[..., None]
        z = torch.where(off_axis, angle.cos(), 1.0)
        return forward_unless(valid, torch.cat((xy, z[..., None]), dim=-1)), valid

    def _plane(self, unit: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 3] -> [..., 2], bool
        xy, z = unit[..., :2], unit[..., 2]
        max_angle, *k = aligned(self, z, "max_angle", *FISHEYE)
        sine2 = xy.square().sum(dim=-1)
        off_axis = _is_off_axis(sine2)
        sine = torch.where(off_axis, sine2, 1.0).sqrt()
        angle = torch.atan2(sine, z)
        radius, _ = fisheye_curve(angle, k)
        plane = xy * torch.where(off_axis, radius / sine, 1.0)[..., None]
        return plane, valid & torch.where(off_axis, angle < max_angle, z > 0.0)


def _is_off_axis(radius2: Tensor) -> Tensor:
    """Where a squared radius matters: nearer the axis angle, sine and plane radius agree to rounding."""
    return radius2 > torch.finfo(radius2.dtype).eps


def radial_factor(r2: Tensor, k: Coefficients) -> tuple[Tensor, Tensor]:  # [...] -> [...], [...]
    """(1 + k1 r^2 + k2 r^4 + k3 r^6) / (1 + k4 r^2 + k5 r^4 + k6 r^6), and its derivative by r^2."""
    k1, k2, k3, k4, k5, k6 = k
    denominator = 1.0 + r2 * (k4 + r2 * (k5 + r2 * k6))
    factor = (1.0 + r2 * (k1 + r2 * (k2 + r2 * k3))) / denominator
    top, bottom = k1 + r2 * (2.0 * k2 + r2 * 3.0 * k3), k4 + r2 * (2.0 * k5 + r2 * 3.0 * k6)
    return factor, (top - factor * bottom) / denominator


def _brown_margin(angle: Tensor, coefficients: Coefficients) -> Tensor:
    """Positive where all perspective radii up to tan(angle) are certain to keep apart.

    The Jacobian is symmetric with eigenvalues f and f + 2 r^2 df/dr^2, which tangential distortion lowers by at most
    6 |p| r. A map with a positive definite Jacobian on a disk is one-to-one there.
    """
    p1, p2, *k = coefficients
    r = angle.tan()
    factor, derivative = radial_factor(r.square(), k)
    eigenvalue = factor + (2.0 * r.square() * derivative).clamp_max(0.0) - 6.0 * torch.hypot(p1, p2) * r
    return torch.minimum(eigenvalue - MIN_SLOPE, MAX_PLANE_RADIUS - r * factor)


def distort(plane: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:  # [..., 2] -> [..., 2], [..., 2, 2]
    """Brown-Conrady distortion of perspective coordinates, and the inverse of its Jacobian, without gradient.

    x' = x f + 2 p1 x y + p2 (r^2 + 2 x^2), y' = y f + p1 (r^2 + 2 y^2) + 2 p2 x y, f the radial factor.
    """
    p1, p2, *k = coefficients
    x, y = plane.unbind(dim=-1)
    r2 = x.square() + y.square()
    factor, derivative = radial_factor(r2, k)
    x_distorted = x * factor + 2.0 * p1 * x * y + p2 * (r2 + 2.0 * x.square())
    y_distorted = y * factor + p1 * (r2 + 2.0 * y.square()) + 2.0 * p2 * x * y
    with torch.no_grad():
        xx = factor + 2.0 * x.square() * derivative + 2.0 * p1 * y + 6.0 * p2 * x
        yy = factor + 2.0 * y.square() * derivative + 6.0 * p1 * y + 2.0 * p2 * x
        xy = 2.0 * (x * y * derivative + p1 * x + p2 * y)
        adjugate = torch.stack((torch.stack((yy, -xy), dim=-1), torch.stack((-xy, xx), dim=-1)), dim=-2)
        inverse = adjugate / (xx * yy - xy.square()).clamp_min(MIN_SLOPE**2)[..., None, None]
    return torch.stack((x_distorted, y_distorted), dim=-1), inverse


def _newton_step(plane: Tensor, target: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:  # [..., 2] twice
    """A better solution of distort(plane) = target, and the error of the given one."""
    distorted, inverse = distort(plane, coefficients)
    error = distorted - target
    return plane - (inverse * error[..., None, :]).sum(dim=-1), error


def _confined(plane: Tensor, limit: Tensor) -> Tensor:  # [..., 2], [...] -> [..., 2]
    return plane * (limit / torch.maximum(plane.norm(dim=-1), limit))[..., None]


def _undistort(
    target: Tensor,  # [..., 2]
    coefficients: Coefficients,
    max_tangent: Tensor,  # [...]
) -> tuple[Tensor, Tensor]:  # [..., 2], bool [...]
    """Perspective coordinates within `max_tangent` whose distortion is `target`, and where they were found."""
    tolerance = torch.finfo(target.dtype).eps ** 0.75 * (1.0 + target.norm(dim=-1))  # the next step squares the error
    plane = _confined(target, max_tangent)
    for _ in range(NEWTON_STEPS):
        better, error = _newton_step(plane, target, coefficients)
        plane, found = _confined(better, max_tangent), error.norm(dim=-1) <= tolerance
        if bool(found.all()):
            break
    return plane, found & (better.norm(dim=-1) <= max_tangent)


@dataclass(frozen=True, eq=False)
class BrownConrady(FocalLens):
    """OpenCV's perspective lens with rational radial (k1..k6) and tangential (p1, p2) distortion.

    `max_tangent` [*batch] is the perspective radius |(X, Y)| / Z up to which the lens sees.
    """

    width: int
    height: int
    k1: float | Tensor = 0.0
    k2: float | Tensor = 0.0
    p1: float | Tensor = 0.0
    p2: float | Tensor = 0.0
    k3: float | Tensor = 0.0
    k4: float | Tensor = 0.0
    k5: float | Tensor = 0.0
    k6: float | Tensor = 0.0
    max_tangent: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        max_angle = growth_limit(self, BROWN, _brown_margin, math.atan(MAX_PLANE_RADIUS))
        object.__setattr__(self, "max_tangent", max_angle.tan())

    def _rays(self, plane: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 2] -> [..., 3], bool
        max_tangent, *coefficients = aligned(self, plane[..., 0], "max_tangent", *BROWN)
        with torch.no_grad():
            undistorted, found = _undistort(plane, coefficients, max_tangent)
        valid = valid & found
        undistorted, plane = (torch.where(valid[..., None], points, 0.0) for points in (undistorted, plane))
        better, _ = _newton_step(undistorted, plane, coefficients)
        return perspective_rays(undistorted + (better - better.detach())), valid

    def _plane(self, unit: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # [..., 3] -> [..., 2], bool
        plane, valid = perspective_divide(unit[..., :2], unit[..., 2], valid)
        max_tangent, *coefficients = aligned(self, unit[..., 2], "max_tangent", *BROWN)
        valid = valid & (plane.norm(dim=-1) < max_tangent)
        distorted, _ = distort(torch.where(valid[..., None], plane, 0.0), coefficients)
        return distorted, valid
