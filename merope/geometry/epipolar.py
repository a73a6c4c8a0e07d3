"""Epipolar arcs on the unit sphere and the disparity anchors along them (paper, Eq. 9).

A key ray seen from the query camera starts at `far_direction` (u∞, the point at infinite depth) and runs along a great
circle to the epipole e, the direction of the key camera's centre (depth zero).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from merope.geometry.quaternions import quaternion_from_axis_angle

BASELINE_FLOOR_M = 1e-6
"""Centres closer than this count as coincident: there is no epipole."""

ARC_FLOOR = 1e-6
"""‖e − (e·u∞)u∞‖ below this: the arc has no direction, the ray points to or away from the other centre."""

ROUNDING_MARGIN = 4.0
"""Singular zones are this many times wider than what rounding of the centres can do."""


@dataclass(frozen=True, eq=False)
class EpipolarArc:
    """The arc from `far_direction` towards the epipole; `angle_rad` is 0 where the arc is degenerate."""

    far_direction: Tensor  # [..., 3] unit, u∞
    tangent: Tensor  # [..., 3] unit where defined, else zero: t̂
    angle_rad: Tensor  # [...] β_max
    defined: Tensor  # [...] bool
    zone: Tensor  # [...] radians within which rounding decides about the epipole's direction


def epipolar_arc(
    far_direction: Tensor,  # [..., 3] unit, query camera frame
    displacement_m: Tensor,  # [..., 3] key centre in the query camera frame, Δo
    rounding_m: Tensor | None = None,  # [...] by which the displacement may be off
) -> EpipolarArc:
    """Great-circle arc of a key ray in the query camera (paper, Eq. 9, with β_max by atan2).

    Degenerate arcs (coincident centres; epipole parallel or antiparallel to the ray) collapse to `far_direction`. An
    arc also counts as degenerate where rounding of the centres would pick its direction.
    """
    baseline_m = torch.linalg.vector_norm(displacement_m, dim=-1, keepdim=True)
    rounding = torch.zeros_like(baseline_m) if rounding_m is None else rounding_m[..., None]
    apart = baseline_m >= BASELINE_FLOOR_M + ROUNDING_MARGIN * rounding
    epipole = torch.where(apart, displacement_m, far_direction) / torch.where(apart, baseline_m, 1.0)
    cosine = (epipole * far_direction).sum(-1, keepdim=True)
    across = epipole - cosine * far_direction
    sine = torch.linalg.vector_norm(torch.where(apart, across, torch.ones_like(across)), dim=-1, keepdim=True)
    zone = direction_zone(rounding, torch.where(apart, baseline_m, 1.0))
    defined = apart & (sine >= zone)
    tangent = torch.where(defined, across / torch.where(defined, sine, 1.0), 0.0)
    angle = torch.where(defined, torch.atan2(torch.where(defined, sine, 0.0), torch.where(defined, cosine, 1.0)), 0.0)
    shape = tangent.shape[:-1]
    return EpipolarArc(
        far_direction.expand_as(tangent),
        tangent,
        angle.squeeze(-1),
        defined.squeeze(-1),
        zone.squeeze(-1).expand(shape),
    )


def direction_zone(
    rounding_m: Tensor,  # [...]
    baseline_m: Tensor,  # [...]
) -> Tensor:  # [...] radians
    """How close to a singular direction an epipole counts as being there: 1e-6, or more where rounding is coarser."""
    return (ROUNDING_MARGIN * rounding_m / baseline_m).clamp_min(ARC_FLOOR)


def anchor_directions(
    arc: EpipolarArc,
    fractions: Tensor,  # [L] ρ in [0, 1]
) -> Tensor:  # [..., L, 3] unit
    """Directions at angular fractions ρ of the arc: cos(ρβ) u∞ + sin(ρβ) t̂ (paper, Eq. 9)."""
    angle = arc.angle_rad[..., None, None] * fractions[:, None]
    directions = angle.cos() * arc.far_direction[..., None, :] + angle.sin() * arc.tangent[..., None, :]
    return directions / torch.linalg.vector_norm(directions, dim=-1, keepdim=True)


def arc_turns(
    arc: EpipolarArc,
    fractions: Tensor,  # [L] ρ in [0, 1]
) -> Tensor:  # [..., L, 4]
    """Quaternions of the arc's own rotation by ρβ: they carry u∞ to the anchor directions, within the arc's plane."""
    axis = torch.linalg.cross(arc.far_direction, arc.tangent)
    angle = arc.angle_rad[..., None] * fractions
    return quaternion_from_axis_angle(axis[..., None, :].expand(*angle.shape, 3), angle)
