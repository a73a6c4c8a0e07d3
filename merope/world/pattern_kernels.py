# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-untyped-call, misc"
"""Parts of the textures inside Triton kernels: marks, footprints and noise, as `merope.world.textures` defines them.

Vectors and colours are tuples of three.
"""

import triton
import triton.language as tl

from merope.world import textures

GRAZING = tl.constexpr(textures.GRAZING)
CELLS = tl.constexpr(textures.NOISE_CELLS)


@triton.jit
def mixed(base, over, amount):
    return (
        base[0] + amount * (over[0] - base[0]),
        base[1] + amount * (over[1] - base[1]),
        base[2] + amount * (over[2] - base[2]),
    )


@triton.jit
def scaled(colour, by):
    return colour[0] * by, colour[1] * by, colour[2] * by


@triton.jit
def chosen(condition, yes, no):
    return tl.where(condition, yes[0], no[0]), tl.where(condition, yes[1], no[1]), tl.where(condition, yes[2], no[2])


@triton.jit
def dot(a, b):
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


@triton.jit
def turned_into(cosine, sine, vector):
    return cosine * vector[0] - sine * vector[2], vector[1], sine * vector[0] + cosine * vector[2]


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def loaded(place, stride, there):
    """Three numbers per lane."""
    return (
        tl.load(place, mask=there, other=0.5),
        tl.load(place + stride, mask=there, other=0.5),
        tl.load(place + 2 * stride, mask=there, other=0.5),
    )


@triton.jit
def band(x, low, high, width):
    return tl.maximum(tl.minimum(x + width / 2.0, high) - tl.maximum(x - width / 2.0, low), 0.0) / width


@triton.jit
def marked_up_to(end, period, mark):
    turns = tl.floor(tl.div_rn(end, period))
    return turns * mark + tl.minimum(end - turns * period, mark)


@triton.jit
def pulses(x, period, mark, width):
    period = tl.zeros_like(x) + period
    return (marked_up_to(x + width / 2.0, period, mark) - marked_up_to(x - width / 2.0, period, mark)) / width


@triton.jit
def footprint(spread, tangent, normal):
    slope = tangent / tl.maximum(tl.abs(normal), GRAZING)
    return spread * tl.sqrt(1.0 + slope * slope) + 1e-6


@triton.jit
def cell(x, cell_m):
    """Place in the table of noise along one axis: the cell, and how far into it."""
    turns = x * (1.0 / (cell_m * CELLS))
    place = (turns - tl.floor(turns)) * CELLS
    low = clamp(tl.floor(place), 0.0, CELLS - 1.0)  # also of what is not a number, where a lens has no ray
    return low.to(tl.int32), place - low


@triton.jit
def noise(table, x, y, cell_m, width):
    column, right = cell(x, cell_m)
    row, down = cell(y, cell_m)
    place = table + row * (CELLS + 1) + column
    top = tl.load(place) * (1.0 - right) + tl.load(place + 1) * right
    bottom = tl.load(place + CELLS + 1) * (1.0 - right) + tl.load(place + CELLS + 2) * right
    return (top * (1.0 - down) + bottom * down) * clamp(1.6 - width / cell_m, 0.0, 1.0)
