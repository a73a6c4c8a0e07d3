"""Colours of the procedural world's surfaces, band-limited: what is finer than a pixel fades to its mean.

Patterns are in metres on their surface. A mark (line, window, slab) is averaged over the pixel's footprint in closed
form, one axis at a time; noise fades out where its cells shrink below the footprint. Arrays are component-major: points
and directions [3, n], colours [3, n] in [0, 1].

Footprint: a ray turned by a small angle moves its hit on a surface with normal n, along a tangent e, by at most
distance · angle · √(1 + (d·e / d·n)²).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from merope.world.street import (
    CABIN,
    CAR,
    CROWN,
    LANE_M,
    SIDEWALK_M,
    STREET_HALF_LENGTH_M,
    TRUNK,
    Streets,
    street_coordinates,
)

NOISE_CELLS = 128
STOREY_M = 3.1
GRAZING = 1e-4  # smallest cosine of incidence that a footprint is computed for


@dataclass(frozen=True, eq=False)
class Surface:
    """n hits on solids, in each solid's own axes (x, y down, z), its centre at 0."""

    point_m: Tensor  # [3, n]
    direction: Tensor  # [3, n] of the ray, unit
    half_m: Tensor  # [3, n]
    spread_m: Tensor  # [n] distance times the angle between neighbouring rays
    colour: Tensor  # [3, n] of the solid
    grain: Tensor  # [n]
    sun: Tensor  # [3, n]
    sunlight: Tensor  # [n] 0 … 1

    def lit(self, normal: Tensor) -> Tensor:  # [3, n] unit, outwards -> [n]
        """Brightness of a matt surface under sky and sun."""
        return 0.62 + 0.46 * self.sunlight * (normal * self.sun).sum(dim=0).clamp_min(0.0)


def band(x: Tensor, low: Tensor | float, high: Tensor | float, width: Tensor) -> Tensor:  # [n] -> [n]
    """How much of the window of `width` about x lies in [low, high]."""
    return ((x + width / 2.0).clamp_max(high) - (x - width / 2.0).clamp_min(low)).clamp_min(0.0) / width


def pulses(x: Tensor, period: Tensor | float, mark: float, width: Tensor) -> Tensor:  # [n] -> [n]
    """How much of the window of `width` about x lies in marks [0, mark] that repeat every `period`."""

    def marked_up_to(end: Tensor) -> Tensor:
        turns = (end / period).floor()
        return turns * mark + (end - turns * period).clamp_max(mark)

    return (marked_up_to(x + width / 2.0) - marked_up_to(x - width / 2.0)) / width


def footprint(spread_m: Tensor, tangent: Tensor, normal: Tensor) -> Tensor:  # d·e, d·n: [n] -> [n]
    """Extent of a pixel on a surface along a tangent, metres."""
    return spread_m * (1.0 + (tangent / normal.abs().clamp_min(GRAZING)).square()).sqrt() + 1e-6


@cache
def noise_table(device: torch.device) -> Tensor:  # [1, 1, cells + 1, cells + 1] in [-1, 1], mean 0, periodic
    table = torch.rand(NOISE_CELLS, NOISE_CELLS, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    return pad((table - table.mean())[None, None], (0, 1, 0, 1), mode="circular").to(device)


def noise(x_m: Tensor, y_m: Tensor, cell_m: float, width_m: Tensor) -> Tensor:  # [n] -> [n] in [-1, 1]
    """Bilinear value noise with cells of cell_m, faded out where a pixel of width_m covers more than a cell."""
    turns = torch.stack((x_m, y_m), dim=-1) * (1.0 / (cell_m * NOISE_CELLS))
    grid = (turns - turns.floor()) * 2.0 - 1.0
    values = grid_sample(noise_table(x_m.device), grid[None, None], align_corners=True)[0, 0, 0]
    return values * (1.6 - width_m / cell_m).clamp(0.0, 1.0)


def mixed(base: Tensor, over: Tensor | Sequence[float], amount: Tensor) -> Tensor:  # [3, n], [3, n] or 3, [n] -> [3, n]
    """`over` laid on `base`."""
    over = over if isinstance(over, Tensor) else base.new_tensor(over)[:, None]
    return base + amount * (over - base)


def ground_colour(
    streets: Streets,  # tensors [R, n]
    x_m: Tensor,  # [n] scene frame
    z_m: Tensor,
    direction: Tensor,  # [3, n]
    spread_m: Tensor,  # [n]
    grass: Tensor,  # [3, n]
    grain: Tensor,  # [2, n]
) -> Tensor:  # [3, n]
    """Grass, side walks with slabs and kerbs, asphalt, and the paint on it."""
    lateral, along = street_coordinates(streets, x_m, z_m)
    heading = streets.heading_rad + streets.curvature_per_m * along
    cosine, sine = heading.cos(), heading.sin()
    x, y, z = direction
    wide, long = footprint(spread_m, cosine * x - sine * z, y), footprint(spread_m, sine * x + cosine * z, y)
    kerb, end = streets.half_width_m, STREET_HALF_LENGTH_M
    within = band(along, -end, end, long)
    asphalt = band(lateral, -kerb, kerb, wide) * within
    paved = band(lateral, -kerb - SIDEWALK_M, kerb + SIDEWALK_M, wide) * within
    edging = (band(lateral.abs(), kerb, kerb + 0.18, wide) * within).amax(dim=0)
    slabs = torch.maximum(pulses(lateral, 0.65, 0.04, wide), pulses(along, 0.65, 0.04, long))
    slabs = (slabs * (paved - asphalt)).amax(dim=0)
    paint = _paint(streets, lateral, along, wide, long, asphalt)
    coarse_width = footprint(spread_m, (x.square() + z.square()).sqrt(), y)
    fine, patches, clumps = (
        noise(x_m + grain[0], z_m + grain[1], cell, coarse_width) for cell in (0.3, 2.7, 7.0)
    )  # fmt: skip
    asphalt = asphalt.amax(dim=0)
    colour = grass * (1.0 + 0.16 * fine + 0.14 * patches + 0.12 * clumps)
    colour = mixed(colour, (0.62, 0.60, 0.57), paved.amax(dim=0)) * (1.0 - 0.28 * slabs)
    colour = mixed(colour, (0.74, 0.73, 0.70), edging)
    colour = mixed(colour, (0.30, 0.30, 0.315), asphalt) * (1.0 + asphalt * (0.07 * fine + 0.08 * patches))
    return mixed(colour, (0.90, 0.90, 0.87), paint * (0.92 + 0.08 * patches))


def _paint(streets: Streets, lateral: Tensor, along: Tensor, wide: Tensor, long: Tensor, asphalt: Tensor) -> Tensor:
    """Lane lines, which stop before junctions, and zebra crossings there: [R, n] -> [n]."""
    side, lanes, kerb = lateral.abs(), streets.lanes, streets.half_width_m
    dashes = pulses(along, 9.0, 4.0, long)
    edges = band(side - lanes * LANE_M, -0.08, 0.08, wide)
    several = lanes > 1.5
    centre = band(lateral, -0.08, 0.08, wide) * torch.where(several, 1.0, dashes)
    between = band(side - LANE_M, -0.07, 0.07, wide) * torch.where(several, dashes, 0.0)
    near_junction = _of_the_other(band(lateral, -kerb - 5.0, kerb + 5.0, wide))
    lines = torch.maximum(edges, torch.maximum(centre, between)) * (1.0 - near_junction)
    crossing = _of_the_other(band(side, kerb + 1.0, kerb + 3.8, wide))
    zebra = crossing * pulses(lateral, 1.1, 0.55, wide) * band(lateral, 0.4 - kerb, kerb - 0.4, wide)
    return (torch.maximum(lines, zebra) * asphalt).amax(dim=0)


def _of_the_other(values: Tensor) -> Tensor:  # [R, n] -> [R, n]
    """For street 0 the largest value of the streets across it, for those the value of street 0."""
    return torch.cat((values[1:].amax(dim=0, keepdim=True), values[:1].expand_as(values[1:])))


def facade_colour(wall: Surface) -> Tensor:  # [3, n]
    """House walls: stained plaster over a plinth, a cornice, framed windows and a door; plain roofs."""
    across, normal, on_x, on_top = _faces(wall)
    x, y, z = wall.point_m
    half_u = torch.where(on_x, wall.half_m[2], wall.half_m[0])
    u, v, top = torch.where(on_x, z, x) + half_u, wall.half_m[1] - y, 2.0 * wall.half_m[1]
    tangent = torch.where(on_x, wall.direction[2], wall.direction[0])
    wide, high = footprint(wall.spread_m, tangent, across), footprint(wall.spread_m, wall.direction[1], across)
    storeys = band(v, 0.4, top - 0.7, high)
    speckle = noise(u + wall.grain, v, 0.22, wide + high)
    stain = noise(u * 0.6 + wall.grain, v * 0.3, 0.9, wide + high)
    ledge = pulses(v, STOREY_M, 0.16, high) * storeys
    colour = wall.colour * (1.0 + 0.06 * speckle + 0.07 * stain) * (1.0 - 0.10 * ledge)
    colour = mixed(colour, wall.colour * 0.55, band(v, -1.0, 0.55, high))
    colour = mixed(colour, (0.86, 0.84, 0.80), band(v, top - 0.4, top + 1.0, high))
    colour = _with_openings(colour, wall, (u, v), (wide, high), 2.0 * half_u, storeys)
    roof = mixed(0.5 * wall.colour, (0.36, 0.34, 0.33), torch.full_like(u, 0.6))
    return torch.where(on_top, roof, colour) * wall.lit(normal)


def _with_openings(
    colour: Tensor,  # [3, n] of the wall without them
    wall: Surface,
    place_m: tuple[Tensor, Tensor],  # along the wall from its left end, above the ground: [n] each
    width_m: tuple[Tensor, Tensor],  # footprint along the same axes
    length_m: Tensor,  # [n] of the wall
    storeys: Tensor,  # [n] 1 where windows may be
) -> Tensor:  # [3, n]
    """A window every 2.9 m or so on every storey, each with its own curtain, and a door in place of one of them."""
    (u, v), (wide, high) = place_m, width_m
    columns = (length_m / 2.9).round().clamp_min(1.0)
    pitch = length_m / columns
    column = (u / pitch).floor()
    doorway = torch.where(column == (wall.grain * 7.0).floor() % columns, 1.0, 0.0) * band(v, 0.0, 2.7, high)
    windows = storeys * (1.0 - doorway)
    glass, frame = (
        pulses(u - (pitch - w) / 2.0, pitch, w, wide) * pulses(v - 1.65 + h / 2.0, STOREY_M, h, high) * windows
        for w, h in ((1.15, 1.35), (1.45, 1.65))
    )
    curtain = noise(column * 3.7 + wall.grain, (v / STOREY_M).floor() * 5.3, 1.0, 0.4 * torch.maximum(wide, high))
    pane = mixed(torch.full_like(colour, 0.2), (0.42, 0.47, 0.52), 0.5 + 0.5 * curtain)
    door = doorway * pulses(u - (pitch - 1.15) / 2.0, pitch, 1.15, wide) * band(v, 0.0, 2.2, high)
    return mixed(mixed(mixed(colour, (0.86, 0.84, 0.80), frame), pane, glass), (0.32, 0.20, 0.13), door)


def _faces(box: Surface) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the face hit: the ray's component along its normal [n], that normal [3, n]; faces ±x and ±y as bool [n]."""
    nearness = box.point_m.abs() / box.half_m
    on_y = (nearness[1] >= nearness[0]) & (nearness[1] >= nearness[2])
    on_x = (nearness[0] > nearness[2]) & ~on_y
    on_z = ~(on_x | on_y)
    normal = torch.stack((on_x, on_y, on_z)) * -box.direction.sign()
    return (normal * box.direction).sum(dim=0), normal, on_x, on_y


def fitting_colour(
    solid: Surface,
    material: Tensor,  # int64 [n], no facades
) -> Tensor:  # [3, n]
    """Poles, trunks, cars and crowns."""
    across, normal, on_x, on_y = _faces(solid)
    is_crown = material == CROWN
    round_normal = solid.point_m / solid.half_m.square()
    round_normal = round_normal / round_normal.square().sum(dim=0).sqrt().clamp_min(1e-6)
    x, y, z = solid.point_m
    bark = noise(2.0 * (x + z) + solid.grain, 0.5 * y, 0.12, solid.spread_m)
    colour = solid.colour * (1.0 + torch.where(material == TRUNK, 0.3, 0.0) * bark)
    colour = torch.where(material == CAR, _car_body(solid, colour, across, on_x), colour)
    colour = torch.where(material == CABIN, _car_cabin(solid, colour, across, on_x, on_y), colour)
    colour = torch.where(is_crown, _leaves(solid, round_normal), colour)
    return colour * solid.lit(torch.where(is_crown, round_normal, normal))


def _leaves(crown: Surface, normal: Tensor) -> Tensor:  # [3, n] -> [3, n]
    """Leafy blotches, the same from every side; darker underneath, where y points down."""
    x, y, z = crown.point_m
    width, blotches = crown.spread_m * 1.5, torch.zeros_like(x)
    for first, second in ((x, y), (y + 7.3, z), (z + 3.1, x)):
        for cell_m, strength in ((0.6, 0.22), (0.17, 0.28)):
            blotches = blotches + strength * noise(first + crown.grain, second, cell_m, width)
    return crown.colour * (1.0 + blotches) * (1.0 - 0.4 * normal[1].clamp(-0.5, 1.0))


def _car_body(car: Surface, paint: Tensor, across: Tensor, on_x: Tensor) -> Tensor:  # [3, n]
    """Dark underneath, wheels on the long sides, lamps at both ends."""
    x, y, z = car.point_m
    v, high = car.half_m[1] - y, footprint(car.spread_m, car.direction[1], across)
    end = z.abs() - 0.62 * car.half_m[2]
    wheels = torch.where(on_x, ((0.34 - (end.square() + (v - 0.32).square()).sqrt()) / high + 0.5).clamp(0.0, 1.0), 0.0)
    lamps = band(v, 0.52, 0.68, high) * band(x.abs(), 0.55 * car.half_m[0], 0.9 * car.half_m[0], high)
    body = mixed(paint, (0.05, 0.05, 0.055), torch.maximum(band(v, -1.0, 0.2, high), wheels))
    tinted = torch.where(
        z > 0, body.new_tensor((0.92, 0.90, 0.82))[:, None], body.new_tensor((0.62, 0.06, 0.05))[:, None]
    )
    return mixed(body, tinted, torch.where(on_x, 0.0, lamps))


def _car_cabin(car: Surface, paint: Tensor, across: Tensor, on_x: Tensor, on_top: Tensor) -> Tensor:  # [3, n]
    """Windows all round, posts between them, a painted roof."""
    half_u = torch.where(on_x, car.half_m[2], car.half_m[0])
    u = torch.where(on_x, car.point_m[2], car.point_m[0]).abs()
    width = footprint(car.spread_m, car.direction[1], across)
    panes = band(car.point_m[1], 0.09 - car.half_m[1], car.half_m[1] - 0.03, width)
    panes = panes * band(u, torch.where(on_x, 0.05, -1.0), half_u - 0.1, width)
    return mixed(paint, (0.12, 0.14, 0.16), torch.where(on_top, 0.0, panes))


def sky_colour(
    direction: Tensor,  # [3, n]
    angle_rad: Tensor,  # [n] between neighbouring rays
    zenith: Tensor,  # [3, n]
    horizon: Tensor,  # [3, n]
    sun: Tensor,  # [3, n]
    clouds: Tensor,  # [n]
    grain: Tensor,  # [2, n]
) -> Tensor:  # [3, n]
    """A gradient, a bright patch about the sun, and clouds on a plane infinitely far up."""
    x, y, z = direction
    up = (-y).clamp_min(0.0)
    colour = mixed(horizon, zenith, up.sqrt() * (1.6 - 0.6 * up))
    glow = (direction * sun).sum(dim=0).clamp_min(0.0)
    far = 1.0 / (up + 0.06)
    u, v, width = x * far + grain[0], z * far + grain[1], angle_rad * far.square()
    wisps = noise(u, v, 0.9, width) + 0.5 * noise(u, v, 0.37, width) + 0.3 * noise(u, v, 0.15, width)
    cover = ((wisps * 0.9 + clouds * 1.1 - 0.35).clamp(0.0, 1.0) * (4.0 * up).clamp_max(1.0)) * 0.85
    colour = mixed(colour, (0.93, 0.94, 0.95), cover)
    return mixed(colour, (1.0, 0.97, 0.90), (0.35 * glow.pow(24) + 0.6 * glow.pow(400)) * (1.0 - cover))
