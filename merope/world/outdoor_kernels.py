# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-untyped-call, misc"
"""Ground and sky inside Triton kernels, as `ground_colour` and `sky_colour` of `merope.world.textures` define them.

`air` points to the numbers of each ray's world (`merope.world.shade_kernel.world_numbers`).
"""

import triton
import triton.language as tl

from merope.world import street
from merope.world.pattern_kernels import band, clamp, dot, footprint, loaded, mixed, noise, pulses, scaled

LANE_M = tl.constexpr(street.LANE_M)
SIDEWALK_M = tl.constexpr(street.SIDEWALK_M)
STREET_END_M = tl.constexpr(street.STREET_HALF_LENGTH_M)
AIR = tl.constexpr(16)  # numbers of a world before those of its streets
ON_STREET = tl.constexpr(6)  # numbers of a street


@triton.jit
def _atan2(y, x):
    """Correct to some 2e-7 of the angle."""
    low, high = tl.minimum(tl.abs(x), tl.abs(y)), tl.maximum(tl.abs(x), tl.abs(y))
    slope = low / tl.maximum(high, 1e-30)
    steep = slope > 0.41421356
    t = tl.where(steep, (slope - 1.0) / (slope + 1.0), slope)
    s = t * t
    series = ((8.05374449538e-2 * s - 1.38776856032e-1) * s + 1.99777106478e-1) * s - 3.33329491539e-1
    angle = series * s * t + t + tl.where(steep, 0.785398163397, 0.0)
    angle = tl.where(tl.abs(y) > tl.abs(x), 1.57079632679 - angle, angle)
    angle = tl.where(x < 0.0, 3.14159265359 - angle, angle)
    return tl.where(y < 0.0, -angle, angle)


@triton.jit
def _on_street(street, there, x, z, direction, spread):
    """Metres beside and along a street, footprints on both axes, lanes, half width, and how far within its ends."""
    heading, k = tl.load(street + 2, mask=there, other=0.0), tl.load(street + 3, mask=there, other=1.0)
    x = x - tl.load(street, mask=there, other=0.0)
    z = z - tl.load(street + 1, mask=there, other=0.0)
    cosine, sine = tl.cos(heading), tl.sin(heading)
    x, z = cosine * x - sine * z, sine * x + cosine * z
    square = x * x + z * z
    root = tl.sqrt(tl.maximum(1.0 - 2.0 * k * x + k * k * square, 0.0))
    lateral = (2.0 * x - k * square) / (1.0 + root)
    along = _atan2(k * z, 1.0 - k * x) / k
    heading = heading + k * along
    cosine, sine = tl.cos(heading), tl.sin(heading)
    wide = footprint(spread, cosine * direction[0] - sine * direction[2], direction[1])
    long = footprint(spread, sine * direction[0] + cosine * direction[2], direction[1])
    lanes, kerb = tl.load(street + 4, mask=there, other=1.0), tl.load(street + 5, mask=there, other=1.0)
    return lateral, along, wide, long, lanes, kerb, band(along, -STREET_END_M, STREET_END_M, long)


@triton.jit
def _crossed(place):
    """How near a street is, and whether its zebra crossing is here, as the streets across it see it."""
    lateral, _, wide, _, _, kerb, _ = place
    return (
        band(lateral, -kerb - 5.0, kerb + 5.0, wide),
        band(tl.abs(lateral), kerb + 1.0, kerb + 3.8, wide),
    )


@triton.jit
def _laid(place, other, below):
    """Asphalt, paving, edging, slabs and paint of a street, each no less than what is there already."""
    lateral, along, wide, long, lanes, kerb, within = place
    side, several = tl.abs(lateral), lanes > 1.5
    asphalt = band(lateral, -kerb, kerb, wide) * within
    paved = band(lateral, -kerb - SIDEWALK_M, kerb + SIDEWALK_M, wide) * within
    edging = band(side, kerb, kerb + 0.18, wide) * within
    slabs = tl.maximum(pulses(lateral, 0.65, 0.04, wide), pulses(along, 0.65, 0.04, long)) * (paved - asphalt)
    dashes = pulses(along, 9.0, 4.0, long)
    edges = band(side - lanes * LANE_M, -0.08, 0.08, wide)
    centre = band(lateral, -0.08, 0.08, wide) * tl.where(several, 1.0, dashes)
    between = band(side - LANE_M, -0.07, 0.07, wide) * tl.where(several, dashes, 0.0)
    lines = tl.maximum(edges, tl.maximum(centre, between)) * (1.0 - other[0])
    zebra = other[1] * pulses(lateral, 1.1, 0.55, wide) * band(lateral, 0.4 - kerb, kerb - 0.4, wide)
    paint = tl.maximum(lines, zebra) * asphalt
    return (
        tl.maximum(below[0], asphalt),
        tl.maximum(below[1], paved),
        tl.maximum(below[2], edging),
        tl.maximum(below[3], slabs),
        tl.maximum(below[4], paint),
    )


@triton.jit
def ground_seen(table, air, there, centre, direction, distance, angle, STREETS: tl.constexpr):
    spread = distance * angle
    x, z = centre[0] + distance * direction[0], centre[2] + distance * direction[2]
    main = _on_street(air + AIR, there, x, z, direction, spread)
    near_main = _crossed(main)
    nothing = tl.zeros_like(x)
    near_other, laid = (nothing, nothing), (nothing, nothing, nothing, nothing, nothing)
    for number in range(1, STREETS):
        place = _on_street(air + AIR + ON_STREET * number, there, x, z, direction, spread)
        laid = _laid(place, near_main, laid)
        near = _crossed(place)
        near_other = (tl.maximum(near_other[0], near[0]), tl.maximum(near_other[1], near[1]))
    asphalt, paved, edging, slabs, paint = _laid(main, near_other, laid)
    level = tl.sqrt(direction[0] * direction[0] + direction[2] * direction[2])
    width = footprint(spread, level, direction[1])
    x, z = x + tl.load(air + 14, mask=there, other=0.0), z + tl.load(air + 15, mask=there, other=0.0)
    fine, patches = noise(table, x, z, 0.3, width), noise(table, x, z, 2.7, width)
    clumps = noise(table, x, z, 7.0, width)
    colour = scaled(loaded(air + 6, 1, there), 1.0 + 0.16 * fine + 0.14 * patches + 0.12 * clumps)
    colour = scaled(mixed(colour, (0.62, 0.60, 0.57), paved), 1.0 - 0.28 * slabs)
    colour = mixed(colour, (0.74, 0.73, 0.70), edging)
    colour = mixed(colour, (0.30, 0.30, 0.315), asphalt)
    colour = scaled(colour, 1.0 + asphalt * (0.07 * fine + 0.08 * patches))
    return mixed(colour, (0.90, 0.90, 0.87), paint * (0.92 + 0.08 * patches))


@triton.jit
def sky_seen(table, air, there, direction, angle):
    up = tl.maximum(-direction[1], 0.0)
    colour = mixed(loaded(air + 3, 1, there), loaded(air, 1, there), tl.sqrt(up) * (1.6 - 0.6 * up))
    glow = tl.maximum(dot(direction, loaded(air + 9, 1, there)), 0.0)
    far = 1.0 / (up + 0.06)
    u = direction[0] * far + tl.load(air + 14, mask=there, other=0.0)
    v = direction[2] * far + tl.load(air + 15, mask=there, other=0.0)
    width = angle * (far * far)
    wisps = noise(table, u, v, 0.9, width) + 0.5 * noise(table, u, v, 0.37, width)
    wisps = wisps + 0.3 * noise(table, u, v, 0.15, width)
    cover = clamp(wisps * 0.9 + tl.load(air + 13, mask=there, other=0.0) * 1.1 - 0.35, 0.0, 1.0)
    cover = cover * tl.minimum(4.0 * up, 1.0) * 0.85
    glow8 = glow * glow * glow * glow * glow * glow * glow * glow
    glow16 = glow8 * glow8
    glow64 = glow16 * glow16 * glow16 * glow16
    glow400 = glow64 * glow64 * glow64 * glow64 * glow64 * glow64 * glow16
    colour = mixed(colour, (0.93, 0.94, 0.95), cover)
    return mixed(colour, (1.0, 0.97, 0.90), (0.35 * (glow16 * glow8) + 0.6 * glow400) * (1.0 - cover))
