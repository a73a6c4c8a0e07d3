"""What stands where in the procedural world: streets, houses, lamps, trees and parked cars from seeded random numbers.

Scene frame: OpenCV axes (x right, y down, z forward), metres, float64. The origin is the first camera's usual place, in
the middle of the right lane of street 0, CAMERA_HEIGHT_M above the ground plane y = CAMERA_HEIGHT_M; street 0 runs
along +z there. Everything stands upright: a solid is turned about y only. Every world has the same slots (so that
worlds stack); what would stand on another street is absent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

CAMERA_HEIGHT_M = 1.5
LANE_M = 3.5
SIDEWALK_M = 2.6
STREET_HALF_LENGTH_M = 260.0
STRAIGHT_PER_M = 1e-6  # curvature of a straight street: never 0, so that arc length = angle / curvature holds

FACADE, POLE, TRUNK, CAR, CABIN, CROWN = range(6)  # materials; crowns are ellipsoids, the others boxes

FACADE_COLOURS = (
    (0.80, 0.74, 0.62), (0.63, 0.33, 0.26), (0.74, 0.57, 0.36), (0.60, 0.60, 0.58), (0.55, 0.62, 0.68),
    (0.84, 0.82, 0.77), (0.70, 0.45, 0.38), (0.62, 0.66, 0.52),
)  # fmt: skip
CAR_COLOURS = ((0.65, 0.08, 0.08), (0.08, 0.16, 0.42), (0.78, 0.78, 0.80), (0.12, 0.12, 0.13), (0.40, 0.45, 0.47))
LEAF_COLOURS = ((0.24, 0.42, 0.13), (0.33, 0.47, 0.15), (0.17, 0.36, 0.16), (0.46, 0.46, 0.15))


@dataclass(frozen=True, eq=False)
class Streets:
    """Circular arcs of constant width on the ground; `curvature_per_m` is positive for a right-hand bend."""

    origin_x_m: Tensor  # [B, R] of a point of the centre line
    origin_z_m: Tensor  # [B, R]
    heading_rad: Tensor  # [B, R] of the centre line there, from +z towards +x
    curvature_per_m: Tensor  # [B, R], never 0
    lanes: Tensor  # [B, R] per direction, 1 or 2
    half_width_m: Tensor  # [B, R] centre line to kerb

    def each(self, change: Callable[[Tensor], Tensor]) -> "Streets":
        """The same streets with every tensor changed: reshaped, repeated, cast."""
        return Streets(*(change(getattr(self, f.name)) for f in fields(self)))


@dataclass(frozen=True, eq=False)
class Solids:
    """Upright boxes and, after the first `boxes` of them, ellipsoids."""

    centre_m: Tensor  # [B, N, 3]
    half_m: Tensor  # [B, N, 3] half sizes or radii along the solid's own axes
    yaw_rad: Tensor  # [B, N] about y, from +z towards +x
    colour: Tensor  # [B, N, 3] float32
    grain: Tensor  # [B, N] float32, where in the noise its texture begins
    present: Tensor  # bool [B, N]
    material: Tensor  # int64 [N]
    thing: Tensor  # int64 [N]: solids of one tree, lamp or car share a number
    boxes: int


class Dice:
    """One stream of uniform numbers per world: world b depends on its own seed only, whatever it is stacked with."""

    def __init__(self, seeds: Sequence[int], device: torch.device | str) -> None:
        streams = [torch.rand(2048, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in seeds]
        self.values, self.used = torch.stack(streams).to(device), 0

    def uniform(self, count: int, low: float = 0.0, high: float = 1.0) -> Tensor:  # [B, count]
        self.used += count
        return low + (high - low) * self.values[:, self.used - count : self.used]

    def pick(self, count: int, table: Sequence[Sequence[float]], jitter: float = 0.06) -> Tensor:  # [B, count, 3]
        """Colours of a table, each a little lighter or darker."""
        colours = self.values.new_tensor(table)
        chosen = colours[(self.uniform(count) * len(table)).long()]
        return chosen * (1.0 + self.uniform(count, -jitter, jitter)[..., None])


def street_coordinates(
    streets: Streets,  # tensors [...]
    x_m: Tensor,  # [...] broadcastable with them
    z_m: Tensor,
) -> tuple[Tensor, Tensor]:  # [...] twice
    """Where points lie on streets: metres to the right of the centre line, and metres along it.

    With the street's origin at 0 and its heading along z, an arc of curvature k is the circle about (1/k, 0), and
    lateral = (1 − |1 − k(x, z)|) / k, written without the cancellation that loses a straight street.
    """
    x, z = x_m - streets.origin_x_m, z_m - streets.origin_z_m
    cosine, sine = streets.heading_rad.cos(), streets.heading_rad.sin()
    x, z = cosine * x - sine * z, sine * x + cosine * z
    k = streets.curvature_per_m
    square = x.square() + z.square()
    lateral = (2.0 * x - k * square) / (1.0 + (1.0 - 2.0 * k * x + k.square() * square).clamp_min(0.0).sqrt())
    return lateral, torch.atan2(k * z, 1.0 - k * x) / k


def beside_street(
    streets: Streets,  # tensors [B, R]
    street: int,
    along_m: Tensor,  # [B, n]
    lateral_m: Tensor,  # [B, n]
) -> tuple[Tensor, Tensor, Tensor]:  # x, z and the street's heading there, [B, n] each
    """The inverse of `street_coordinates` for one street."""
    one = streets.each(lambda t: t[:, street, None])
    k, turn = one.curvature_per_m, one.curvature_per_m * along_m
    x = torch.sin(turn / 2.0).square() * 2.0 / k + lateral_m * turn.cos()
    z = turn.sin() / k - lateral_m * turn.sin()
    cosine, sine = one.heading_rad.cos(), one.heading_rad.sin()
    return one.origin_x_m + cosine * x + sine * z, one.origin_z_m - sine * x + cosine * z, one.heading_rad + turn


def lay_streets(dice: Dice) -> Streets:
    """Street 0, straight or bending, and three streets across it: one behind the start, two ahead."""
    zero = dice.uniform(1, 0.0, 0.0)
    bend = dice.uniform(1, -1.0, 1.0)
    curvature = torch.where(bend.abs() < 0.4, STRAIGHT_PER_M, bend * (1.0 / 220.0))
    lanes = (1.0 + dice.uniform(1)).round()
    half_width = lanes * LANE_M + 2.3  # the shoulder on which cars park
    main = Streets(LANE_M / 2.0 - lanes * LANE_M, zero, zero, curvature, lanes, half_width)
    along = torch.cat((dice.uniform(1, -45, -28), dice.uniform(1, 34, 62), dice.uniform(1, 105, 145)), dim=-1)
    x, z, heading = beside_street(main, 0, along, torch.zeros_like(along))
    across = heading + math.pi / 2.0 + dice.uniform(3, -0.12, 0.12)
    one_lane = torch.ones_like(along)
    cross = Streets(x, z, across, STRAIGHT_PER_M * one_lane, one_lane, (LANE_M + 0.6) * one_lane)
    return Streets(*(torch.cat((getattr(main, f.name), getattr(cross, f.name)), dim=-1) for f in fields(main)))


@dataclass(frozen=True, eq=False)
class _Parts:
    """Solids of one kind on their way into the list; heights are above the ground, `thing` counts within a family."""

    x_m: Tensor  # [B, n]
    z_m: Tensor
    yaw_rad: Tensor
    bottom_m: Tensor
    size_m: tuple[Tensor, Tensor, Tensor]  # along own x, height, along own z: [B, n] each
    colour: Tensor  # [B, n, 3]
    material: int
    family: int


def _on_other_streets(streets: Streets, parts: _Parts) -> Tensor:  # bool [B, n]
    """Whether a solid reaches onto the carriageway or side walk of a street other than the one that it stands along."""
    streets = streets.each(lambda t: t[..., None])
    lateral, along = street_coordinates(streets, parts.x_m[:, None], parts.z_m[:, None])
    turn = parts.yaw_rad[:, None] - streets.heading_rad - streets.curvature_per_m * along
    across, lengthwise = parts.size_m[0][:, None] / 2.0, parts.size_m[2][:, None] / 2.0
    reach = across * turn.cos().abs() + lengthwise * turn.sin().abs()
    crosses = turn.sin().abs() > 0.5
    return (crosses & (lateral.abs() - reach < streets.half_width_m + SIDEWALK_M)).any(dim=1)


def _houses(dice: Dice, streets: Streets, street: int, along_m: Tensor, side: Tensor, family: int) -> _Parts:
    """Houses in rows, front walls parallel to the street."""
    count = along_m.shape[-1]
    depth, front = dice.uniform(count, 8.0, 14.0), dice.uniform(count, 11.0, 20.0)
    height = 3.1 * (2.0 + 4.99 * dice.uniform(count).square()).floor() + dice.uniform(count, 0.6, 1.4)
    setback = SIDEWALK_M + dice.uniform(count, 0.3, 4.0)
    lateral = side * (streets.half_width_m[:, street, None] + setback + depth / 2.0)
    x, z, heading = beside_street(streets, street, along_m + dice.uniform(count, -1.0, 1.0), lateral)
    colour = dice.pick(count, FACADE_COLOURS)
    return _Parts(x, z, heading, torch.zeros_like(x), (depth, height, front), colour, FACADE, family)


def _lamps(dice: Dice, streets: Streets, count: int, family: int) -> list[_Parts]:
    """Street lamps on alternate sides of street 0: a pole, and an arm that reaches over the road."""
    step = torch.arange(count, device=dice.values.device, dtype=torch.float64)
    along, side = -40.0 + 22.0 * step + dice.uniform(count, -4, 4), 1.0 - 2.0 * (step % 2)
    height, arm = dice.uniform(count, 5.0, 8.0), dice.uniform(count, 1.2, 2.0)
    kerb = streets.half_width_m[:, :1]
    x, z, heading = beside_street(streets, 0, along, side * (kerb + 0.5))
    arm_x, arm_z, _ = beside_street(streets, 0, along, side * (kerb + 0.5 - arm / 2.0))
    thin, flat = torch.full_like(height, 0.18), torch.full_like(height, 0.14)
    grey = dice.pick(count, ((0.28, 0.30, 0.30),))
    pole = _Parts(x, z, heading, torch.zeros_like(x), (thin, height, thin), grey, POLE, family)
    return [pole, _Parts(arm_x, arm_z, heading, height, (arm, flat, 2.0 * thin), grey, POLE, family)]


def _trees(dice: Dice, streets: Streets, count: int, family: int) -> list[_Parts]:
    """Trees at the outer edge of the side walks: a trunk, a crown and two smaller ones around it."""
    along, side = _slots(dice, count, -36.0, 14.0, 4.0)
    x, z, heading = beside_street(streets, 0, along, side * (streets.half_width_m[:, :1] + SIDEWALK_M - 0.4))
    trunk, girth = dice.uniform(count, 2.2, 3.2), dice.uniform(count, 0.25, 0.4)
    radius, tall = dice.uniform(count, 1.2, 1.9), dice.uniform(count, 1.1, 1.6)
    bark, leaves = dice.pick(count, ((0.30, 0.22, 0.15),)), dice.pick(count, LEAF_COLOURS, 0.15)
    wide, high = 2.0 * radius, 2.0 * radius * tall
    parts = [
        _Parts(x, z, heading, torch.zeros_like(x), (girth, trunk + 0.6, girth), bark, TRUNK, family),
        _Parts(x, z, heading, trunk, (wide, high, wide), leaves, CROWN, family),
    ]
    azimuth = dice.uniform(count, 0.0, 2.0 * math.pi)
    for turn in (0.0, 2.4):
        small, out = dice.uniform(count, 0.55, 0.8), dice.uniform(count, 0.6, 0.85) * radius
        bottom = trunk + dice.uniform(count, 0.1, 0.45) * high * (1.0 - small)
        aside_x, aside_z = out * (azimuth + turn).cos(), out * (azimuth + turn).sin()
        size = (small * wide, 0.9 * small * high, small * wide)
        parts.append(_Parts(x + aside_x, z + aside_z, heading, bottom, size, 0.92 * leaves, CROWN, family))
    return parts


def _cars(dice: Dice, streets: Streets, count: int, family: int) -> list[_Parts]:
    """Cars parked on the shoulders of street 0: a body and a cabin."""
    along, side = _slots(dice, count, -20.0, 26.0, 8.0)
    lateral = side * (streets.half_width_m[:, :1] - 1.1)
    x, z, heading = beside_street(streets, 0, along, lateral)
    cabin_x, cabin_z, _ = beside_street(streets, 0, along - 0.25 * side, lateral)
    heading = heading + torch.where(side > 0.0, 0.0, math.pi)  # with the traffic of their side
    length, width = dice.uniform(count, 3.9, 4.7), dice.uniform(count, 1.7, 1.85)
    body, cabin = dice.uniform(count, 0.82, 0.95), dice.uniform(count, 0.5, 0.62)
    colour, zero = dice.pick(count, CAR_COLOURS), torch.zeros_like(x)
    return [
        _Parts(x, z, heading, zero, (width, body, length), colour, CAR, family),
        _Parts(cabin_x, cabin_z, heading, body, (width - 0.25, cabin, 0.52 * length), colour, CABIN, family),
    ]


def _slots(dice: Dice, count: int, first_m: float, pitch_m: float, jitter_m: float) -> tuple[Tensor, Tensor]:
    """Places along a street in pairs, one on each side (+1 right, −1 left), each shifted by up to jitter_m."""
    index = torch.arange(count, device=dice.values.device, dtype=torch.float64)
    along = first_m + pitch_m * index.div(2, rounding_mode="floor") + dice.uniform(count, -jitter_m, jitter_m)
    return along, (1.0 - 2.0 * (index % 2)).expand_as(along)


def furnish(dice: Dice, streets: Streets) -> Solids:
    """All solids of the worlds."""
    parts = [_houses(dice, streets, 0, *_slots(dice, 20, -42.0, 22.0, 0.0), family=0)]
    for street in (1, 2, 3):
        along, side = _slots(dice, 8, -62.0, 22.0, 0.0)
        along = along + torch.where(along > -35.0, 75.0, 0.0)  # none where street 0 and its houses are
        parts.append(_houses(dice, streets, street, along, side, family=street))
    parts += (
        _lamps(dice, streets, 8, family=4) + _trees(dice, streets, 20, family=5) + _cars(dice, streets, 10, family=6)
    )
    parts.sort(key=lambda part: part.material == CROWN)
    return _listed(dice, streets, parts)


def _listed(dice: Dice, streets: Streets, parts: list[_Parts]) -> Solids:
    """One list of solids; a thing is absent as a whole where any of its solids would stand on another street."""
    counts = [part.x_m.shape[-1] for part in parts]
    device = dice.values.device
    size = torch.cat([torch.stack(part.size_m, dim=-1) for part in parts], dim=1)
    middle = torch.cat([CAMERA_HEIGHT_M - part.bottom_m for part in parts], dim=1) - size[..., 1] / 2.0
    x, z = torch.cat([part.x_m for part in parts], dim=1), torch.cat([part.z_m for part in parts], dim=1)
    thing = torch.cat([100 * p.family + torch.arange(n, device=device) for p, n in zip(parts, counts, strict=True)])
    present = torch.cat([~_on_other_streets(streets, part) for part in parts], dim=1)
    return Solids(
        centre_m=torch.stack((x, middle, z), dim=-1),
        half_m=size / 2.0,
        yaw_rad=torch.cat([part.yaw_rad.expand_as(part.x_m) for part in parts], dim=1),
        colour=torch.cat([part.colour for part in parts], dim=1).clamp(0.0, 1.0).float(),
        grain=dice.uniform(sum(counts), 0.0, 100.0).float(),
        present=without_things(present, ~present, thing),
        material=torch.tensor(
            [p.material for p, n in zip(parts, counts, strict=True) for _ in range(n)], device=device
        ),
        thing=thing,
        boxes=sum(n for part, n in zip(parts, counts, strict=True) if part.material != CROWN),
    )


def without_things(
    present: Tensor,  # bool [B, N]
    struck: Tensor,  # bool [B, N]
    thing: Tensor,  # int64 [N]
) -> Tensor:  # bool [B, N]
    """The solids without every thing (tree, lamp, car, house) of which a solid was struck."""
    gone = torch.zeros(present.shape[0], int(thing.max()) + 1, dtype=torch.int32, device=present.device)
    return present & (gone.index_add(1, thing, struck.int())[:, thing] == 0)
