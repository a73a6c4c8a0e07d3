"""Where rays meet a plane, upright boxes and upright ellipsoids: closed forms, and the nearest hit among many solids.

All functions take any floating dtype and are component-major (x, y, z first), which keeps each component contiguous.
A distance is metres along a unit ray to the first surface in front of the origin, inf where there is none.

Many rays against many solids: a solid that stands upright lies inside a vertical cylinder, which fills a wedge of
bearings seen from the camera. Two products per pair of ray and solid tell whether the ray is inside the wedge. Only the
few pairs inside are intersected. This leaves nothing out, whatever the lens. For thin cones of rays each solid is
widened a little. There is no matrix product, so a training run's TF32 or autocast settings change nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-20  # stands in for a direction component of 0, whose slab is then passed at ±1e20 m instead of ±inf or NaN
WEDGE_MARGIN = 1e-5  # widens wedges beyond float32 rounding of the cosines
ROUND = 1.1  # an ellipsoid whose radii grow by d holds all within d / ROUND of it, if none is over twice another


def ray_plane(
    drop_m: Tensor,  # [n] signed distance from the origin to the plane, along its normal
    slope: Tensor,  # [n] component of the unit direction along the same normal
) -> Tensor:  # [n] metres
    """Distance to a plane, from either side."""
    distance = drop_m / torch.where(slope == 0.0, TINY, slope)
    return torch.where((distance > 0.0) & (slope != 0.0), distance, math.inf)


def box_interval(
    origin: Tensor,  # [3, n] in the box's frame
    direction: Tensor,  # [3, n]
    half: Tensor,  # [3, n] half sizes
) -> tuple[Tensor, Tensor]:  # [n] twice
    """Where lines enter and leave a box, in units of `direction`; lines that leave before they enter miss it."""
    inverse = 1.0 / torch.where(direction.abs() < TINY, TINY, direction)
    middle, reach = -origin * inverse, half * inverse.abs()
    return (middle - reach).amax(dim=0), (middle + reach).amin(dim=0)


def ellipsoid_interval(
    origin: Tensor,  # [3, n] in the ellipsoid's frame
    direction: Tensor,  # [3, n]
    radii: Tensor,  # [3, n]
) -> tuple[Tensor, Tensor]:  # [n] twice
    """Where lines enter and leave an ellipsoid, in units of `direction`; (inf, -inf) where they miss it.

    Scaled to the unit sphere: distance to the line's nearest point, and the half chord there. The offset of that point
    is computed as a vector, which loses nothing far away, unlike |o|² − 1.
    """
    o, d = origin / radii, direction / radii
    length = d.square().sum(dim=0).clamp_min(TINY)
    nearest = -(o * d).sum(dim=0) / length
    square = (1.0 - (o + nearest * d).square().sum(dim=0)) / length
    half_chord = square.clamp_min(0.0).sqrt()
    missed = square < 0.0
    return torch.where(missed, math.inf, nearest - half_chord), torch.where(missed, -math.inf, nearest + half_chord)


Interval = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def first_surface(enter: Tensor, leave: Tensor) -> Tensor:  # [n], [n] -> [n]
    """Distance to the first surface in front of the origin; the far one for an origin inside."""
    distance = torch.where(enter > 0.0, enter, leave)
    return torch.where((leave >= enter) & (distance > 0.0), distance, math.inf)


def turned_into(
    yaw_cos_sin: Tensor,  # [2, n]
    vectors: Tensor,  # [3, n] scene axes
) -> Tensor:  # [3, n] axes of something turned about y by yaw
    """Vectors in the axes of an upright solid."""
    cosine, sine = yaw_cos_sin
    x, y, z = vectors
    return torch.stack((cosine * x - sine * z, y, sine * x + cosine * z))


@dataclass(frozen=True, eq=False)
class SeenSolids:
    """Solids as C cameras see them: in each solid's own axes, the camera at `origin`."""

    origin: Tensor  # [3, C · N] of the camera, metres
    half: Tensor  # [3, C · N]
    yaw_cos_sin: Tensor  # [2, C · N]
    bearing: Tensor  # [C, N, 2] horizontal unit vector (x, z) from the camera to the solid, scene axes
    wedge_cos: Tensor  # [C, N] cosine of the wedge's half-angle: -2 all bearings, 2 for absent solids
    far_m: Tensor  # [C · N] at least the distance to the solid's farthest point


def seen_solids(
    centre_m: Tensor,  # [C, N, 3] float64, relative to the camera, scene axes
    half_m: Tensor,  # [C, N, 3]
    yaw_rad: Tensor,  # [C, N]
    present: Tensor,  # bool [C, N]
    spread: Tensor | float = 0.0,  # [C, 1], the largest tangent of a cone's half-angle in `pairs_in_reach`
    dtype: torch.dtype = torch.float32,
) -> SeenSolids:
    """Prepare solids for `pairs_in_reach`: all differences in float64, cast last."""
    yaw = torch.stack((yaw_rad.cos(), yaw_rad.sin())).flatten(1)
    origin = turned_into(yaw, -centre_m.movedim(-1, 0).flatten(1))
    flat = centre_m[..., ::2]
    distance = torch.linalg.vector_norm(flat, dim=-1)
    far = ROUND * (torch.linalg.vector_norm(centre_m, dim=-1) + torch.linalg.vector_norm(half_m, dim=-1))
    radius = torch.linalg.vector_norm(half_m[..., ::2] + (far * spread)[..., None], dim=-1)
    outside = distance > radius * (1.0 + WEDGE_MARGIN)
    sine = torch.where(outside, radius / distance.clamp_min(TINY), 0.0)
    wedge = torch.where(outside, (1.0 - sine.square()).sqrt() - WEDGE_MARGIN, -2.0)
    wedge = torch.where(present, wedge, 2.0)
    bearing = flat / distance.clamp_min(TINY)[..., None]
    half = half_m.movedim(-1, 0).flatten(1)
    return SeenSolids(*(t.to(dtype).contiguous() for t in (origin, half, yaw, bearing, wedge, far.flatten())))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rays and solids that they meet or pass by."""

    solid: Tensor  # int64 [M], c · N + n
    ray: Tensor  # int64 [M], c · P + p
    near_m: Tensor  # [M] metres, where the ray comes near the solid; negative if it starts there

    def of_rays(
        self,
        number: Tensor,  # int64 [C · P], a ray's new number, or -1
        copies: int,
    ) -> "Pairs":
        """The pairs of numbered rays, each repeated for the rays number · copies to number · copies + copies − 1."""
        new = number.index_select(0, self.ray)
        kept = (new >= 0).nonzero().squeeze(-1)
        ray = new.index_select(0, kept)[:, None] * copies + torch.arange(copies, device=number.device)
        solid, near = (t.index_select(0, kept).repeat_interleave(copies) for t in (self.solid, self.near_m))
        return Pairs(solid, ray.flatten(), near)


def pairs_in_reach(
    solids: SeenSolids,
    numbers: range,  # of the solids to try
    interval: Interval,
    directions: Tensor,  # [3, C, P] unit, scene axes
    spread: Tensor | None = None,  # [C, P] tangent of the half-angle of a cone about each ray; None: the ray alone
) -> Pairs:
    """All rays with the solids that any ray of their cone meets, and a few others.

    If a ray of the cone meets a solid t metres away, the cone's axis passes within t · spread of the solid. So the axis
    meets the solid widened by far_m · spread, and lies in the wedge of that.
    """
    inside = _inside_wedges(solids, numbers, directions)
    solid, pixel = inside.flatten(0, 1).nonzero(as_tuple=True)
    camera = solid.div(len(numbers), rounding_mode="floor")
    solid = solid + camera * (solids.wedge_cos.shape[1] - len(numbers)) + numbers.start
    ray = camera * directions.shape[-1] + pixel
    direction = turned_into(solids.yaw_cos_sin.index_select(1, solid), directions.flatten(1).index_select(1, ray))
    half = solids.half.index_select(1, solid)
    if spread is not None:
        half = half + solids.far_m.index_select(0, solid) * spread.flatten().index_select(0, ray)
    enter, leave = interval(solids.origin.index_select(1, solid), direction, half)
    met = ((leave >= enter) & (leave > 0.0)).nonzero().squeeze(-1)
    return Pairs(*(part.index_select(0, met) for part in (solid, ray, enter)))


def _inside_wedges(
    solids: SeenSolids,
    numbers: range,
    directions: Tensor,  # [3, C, P]
) -> Tensor:  # bool [C, n, P]
    x, _, z = directions
    level = (x.square() + z.square()).sqrt().clamp_min(TINY)
    x, z = (x / level)[:, None], (z / level)[:, None]
    some = slice(numbers.start, numbers.stop)
    bearing_x, bearing_z = solids.bearing[:, some].movedim(-1, 0)[..., None]
    return torch.addcmul(bearing_x * x, bearing_z, z) >= solids.wedge_cos[:, some, None]


def nearest(
    solids: SeenSolids,
    interval: Interval,
    pairs: Pairs,
    directions: Tensor,  # [3, R] unit, scene axes
) -> tuple[Tensor, Tensor]:  # [R] metres, int64 [R]
    """Distance to the nearest of its solids along each ray, and that solid; inf and -1 for none."""
    solid, ray = pairs.solid, pairs.ray
    direction = turned_into(solids.yaw_cos_sin.index_select(1, solid), directions.index_select(1, ray))
    origin, half = (part.index_select(1, solid) for part in (solids.origin, solids.half))
    distance = first_surface(*interval(origin, direction, half))
    met = distance.isfinite().nonzero().squeeze(-1)
    solid, ray, distance = (part.index_select(0, met) for part in (solid, ray, distance))
    best = directions.new_full((directions.shape[1],), math.inf).scatter_reduce(0, ray, distance, "amin")
    winner = torch.where(distance == best.index_select(0, ray), solid, -1)
    return best, solid.new_full(best.shape, -1).scatter_reduce(0, ray, winner, "amax")
