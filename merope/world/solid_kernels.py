# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-untyped-call, misc"
"""Houses, poles, trees and cars inside Triton kernels, as `merope.world.textures` defines them.

A surface is a tuple as `Surface` has it: point, direction, half sizes, spread, colour, grain, sun, sunlight.
"""

import triton
import triton.language as tl

from merope.world import street, textures
from merope.world.pattern_kernels import band, chosen, clamp, dot, footprint, mixed, noise, pulses, scaled

STOREY_M = tl.constexpr(textures.STOREY_M)
TRUNK, CAR, CABIN, CROWN = (tl.constexpr(n) for n in (street.TRUNK, street.CAR, street.CABIN, street.CROWN))


@triton.jit
def _outwards(x):
    return tl.where(x > 0.0, -1.0, tl.where(x < 0.0, 1.0, 0.0))


@triton.jit
def _faces(point, direction, half):
    x, y, z = tl.abs(point[0]) / half[0], tl.abs(point[1]) / half[1], tl.abs(point[2]) / half[2]
    on_y = (y >= x) & (y >= z)
    on_x = (x > z) & (on_y == 0)
    on_z = (on_x | on_y) == 0
    normal = (
        tl.where(on_x, _outwards(direction[0]), 0.0),
        tl.where(on_y, _outwards(direction[1]), 0.0),
        tl.where(on_z, _outwards(direction[2]), 0.0),
    )
    return dot(normal, direction), normal, on_x, on_y


@triton.jit
def _lit(colour, normal, sun, sunlight):
    return scaled(colour, 0.62 + 0.46 * sunlight * tl.maximum(dot(normal, sun), 0.0))


@triton.jit
def facade_seen(table, wall):
    point, direction, half, spread, own, grain, sun, sunlight = wall
    across, normal, on_x, on_top = _faces(point, direction, half)
    half_u = tl.where(on_x, half[2], half[0])
    u, v, top = tl.where(on_x, point[2], point[0]) + half_u, half[1] - point[1], 2.0 * half[1]
    wide = footprint(spread, tl.where(on_x, direction[2], direction[0]), across)
    high = footprint(spread, direction[1], across)
    storeys = band(v, 0.4, top - 0.7, high)
    speckle = noise(table, u + grain, v, 0.22, wide + high)
    stain = noise(table, u * 0.6 + grain, v * 0.3, 0.9, wide + high)
    ledge = pulses(v, STOREY_M, 0.16, high) * storeys
    colour = scaled(scaled(own, 1.0 + 0.06 * speckle + 0.07 * stain), 1.0 - 0.10 * ledge)
    colour = mixed(colour, scaled(own, 0.55), band(v, -1.0, 0.55, high))
    colour = mixed(colour, (0.86, 0.84, 0.80), band(v, top - 0.4, top + 1.0, high))
    colour = _with_openings(table, colour, grain, u, v, wide, high, 2.0 * half_u, storeys)
    roof = mixed(scaled(own, 0.5), (0.36, 0.34, 0.33), 0.6)
    return _lit(chosen(on_top, roof, colour), normal, sun, sunlight)


@triton.jit
def _opening(u, v, pitch, width_m: tl.constexpr, height_m: tl.constexpr, wide, high):
    return pulses(u - (pitch - width_m) / 2.0, pitch, width_m, wide) * pulses(
        v - 1.65 + height_m / 2.0, STOREY_M, height_m, high
    )


@triton.jit
def _with_openings(table, colour, grain, u, v, wide, high, length, storeys):
    columns = tl.maximum(tl.floor(length / 2.9 + 0.5), 1.0)
    pitch = tl.div_rn(length, columns)
    column, door_at = tl.floor(tl.div_rn(u, pitch)), tl.floor(grain * 7.0)
    door_at = door_at - tl.floor(tl.div_rn(door_at, columns)) * columns
    doorway = tl.where(column == door_at, 1.0, 0.0) * band(v, 0.0, 2.7, high)
    windows = storeys * (1.0 - doorway)
    glass = _opening(u, v, pitch, 1.15, 1.35, wide, high) * windows
    frame = _opening(u, v, pitch, 1.45, 1.65, wide, high) * windows
    storey = tl.floor(tl.div_rn(v, tl.zeros_like(v) + STOREY_M))
    curtain = noise(table, column * 3.7 + grain, storey * 5.3, 1.0, 0.4 * tl.maximum(wide, high))
    shade = 0.5 + 0.5 * curtain
    pane = mixed((0.2, 0.2, 0.2), (0.42, 0.47, 0.52), shade)
    door = doorway * pulses(u - (pitch - 1.15) / 2.0, pitch, 1.15, wide) * band(v, 0.0, 2.2, high)
    colour = mixed(mixed(colour, (0.86, 0.84, 0.80), frame), pane, glass)
    return mixed(colour, (0.32, 0.20, 0.13), door)


@triton.jit
def fitting_seen(table, solid, material):
    point, direction, half, spread, own, grain, sun, sunlight = solid
    across, normal, on_x, on_y = _faces(point, direction, half)
    is_crown = material == CROWN
    x, y, z = point[0] / (half[0] * half[0]), point[1] / (half[1] * half[1]), point[2] / (half[2] * half[2])
    length = tl.maximum(tl.sqrt(x * x + y * y + z * z), 1e-6)
    round_normal = (x / length, y / length, z / length)
    bark = noise(table, 2.0 * (point[0] + point[2]) + grain, 0.5 * point[1], 0.12, spread)
    colour = scaled(own, 1.0 + tl.where(material == TRUNK, 0.3, 0.0) * bark)
    colour = chosen(material == CAR, _car_body(solid, colour, across, on_x), colour)
    colour = chosen(material == CABIN, _car_cabin(solid, colour, across, on_x, on_y), colour)
    colour = chosen(is_crown, _leaves(table, solid, round_normal), colour)
    return _lit(colour, chosen(is_crown, round_normal, normal), sun, sunlight)


@triton.jit
def _blotches(table, first, second, width):
    return 0.22 * noise(table, first, second, 0.6, width) + 0.28 * noise(table, first, second, 0.17, width)


@triton.jit
def _leaves(table, crown, normal):
    point, _, _, spread, own, grain, _, _ = crown
    x, y, z = point
    width = spread * 1.5
    blotches = _blotches(table, x + grain, y, width) + _blotches(table, y + 7.3 + grain, z, width)
    blotches = blotches + _blotches(table, z + 3.1 + grain, x, width)
    return scaled(scaled(own, 1.0 + blotches), 1.0 - 0.4 * clamp(normal[1], -0.5, 1.0))


@triton.jit
def _car_body(car, paint, across, on_x):
    point, direction, half, spread, _, _, _, _ = car
    x, y, z = point
    v, high = half[1] - y, footprint(spread, direction[1], across)
    end, up = tl.abs(z) - 0.62 * half[2], v - 0.32
    wheels = clamp((0.34 - tl.sqrt(end * end + up * up)) / high + 0.5, 0.0, 1.0)
    wheels = tl.where(on_x, wheels, 0.0)
    lamps = band(v, 0.52, 0.68, high) * band(tl.abs(x), 0.55 * half[0], 0.9 * half[0], high)
    body = mixed(paint, (0.05, 0.05, 0.055), tl.maximum(band(v, -1.0, 0.2, high), wheels))
    tinted = chosen(z > 0.0, (0.92, 0.90, 0.82), (0.62, 0.06, 0.05))
    return mixed(body, tinted, tl.where(on_x, 0.0, lamps))


@triton.jit
def _car_cabin(car, paint, across, on_x, on_top):
    point, direction, half, spread, _, _, _, _ = car
    x, y, z = point
    half_u = tl.where(on_x, half[2], half[0])
    u, width = tl.abs(tl.where(on_x, z, x)), footprint(spread, direction[1], across)
    panes = band(y, 0.09 - half[1], half[1] - 0.03, width)
    panes = panes * band(u, tl.where(on_x, 0.05, -1.0), half_u - 0.1, width)
    return mixed(paint, (0.12, 0.14, 0.16), tl.where(on_top, 0.0, panes))
