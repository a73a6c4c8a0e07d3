# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-untyped-call, misc"
"""Tables of mean phasors in one kernel, and their gradients in one: `Ladder.mean_phasors` as GPUs run it.

48 clips of 13 × 144 tokens have a million pairs of a key token and a query camera, with 60 phasors each. Op by op,
every step of the formula goes through memory in float64. Here only the coordinates come in and the table goes out.
Phases are made, subtracted and wrapped in float64, sines and cosines taken in the precision of the table.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TOKENS_PER_PROGRAM = 16
SERIES_BELOW = {torch.float32: 0.5, torch.float64: 0.05}
"""Half-lengths of a segment in radians below which sin(δ)/δ is a series: the quotients of its derivative cancel."""
TURN_RAD = tl.constexpr(2 * math.pi)
COUNTS = ("tokens", "seen_tokens", "camera_stride", "knots")
"""Kernel arguments that are not compiled in: there would be a kernel for every clip."""


def mean_phasor_table(
    coordinates: Tensor,  # float64 [B, G, n, K, C] of the tokens of cameras, at K ≥ 2 knots of their paths
    rad_per_unit: Tensor,  # float64 [C, F]
    coordinate_major: bool,  # phasors lie [C, F], else [F, C]
    has_camera: Tensor,  # bool [B or 1, N], N ≥ n
    transposed: bool,
    dtype: torch.dtype,  # float32 or float64
) -> Tensor:  # [B, G, N, C · F, 2] cosine, sine
    """The table of one side: mean phasors, conjugate if `transposed`, and 1 for tokens without a camera."""
    return _MeanPhasors.apply(coordinates, rad_per_unit, coordinate_major, has_camera, transposed, dtype)


class _MeanPhasors(torch.autograd.Function):
    """Keeps the coordinates, a fifth of the table's size and less, and computes phasors again in the backward pass."""

    @staticmethod
    def forward(ctx, coordinates, rad_per_unit, coordinate_major, has_camera, transposed, dtype):
        coordinates = coordinates.contiguous()
        has_camera = has_camera.to(torch.int8)
        ctx.save_for_backward(coordinates, rad_per_unit, has_camera)
        ctx.order = coordinate_major, transposed
        batch, groups = coordinates.shape[:2]
        table = coordinates.new_empty((batch, groups, has_camera.shape[1], rad_per_unit.numel(), 2), dtype=dtype)
        _launch(_mean_phasors, (table,), coordinates, rad_per_unit, has_camera, coordinate_major, transposed)
        return table

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        coordinates, rad_per_unit, has_camera = ctx.saved_tensors
        out = torch.empty_like(coordinates)
        _launch(_gradients, (grad.contiguous(), out), coordinates, rad_per_unit, has_camera, *ctx.order)
        return out, None, None, None, None, None


def _launch(
    kernel,
    ends: tuple[Tensor, ...],  # a table or the gradient of one, and what else the kernel writes
    coordinates: Tensor,
    rad_per_unit: Tensor,
    has_camera: Tensor,
    coordinate_major: bool,
    transposed: bool,
) -> None:
    batch, groups, seen_tokens, knots, count = coordinates.shape
    tokens = has_camera.shape[1]
    with torch.cuda.device_of(coordinates):  # Triton launches on the current device, wherever the tensors are
        kernel[(triton.cdiv(tokens, TOKENS_PER_PROGRAM), groups, batch)](
            *(coordinates, rad_per_unit.contiguous(), has_camera, *ends),
            *(tokens, seen_tokens, tokens if has_camera.shape[0] > 1 else 0, knots),
            C=count,
            F=rad_per_unit.shape[1],
            PADDED=triton.next_power_of_2(count),
            COORDINATE_MAJOR=coordinate_major,
            SIGN=-1.0 if transposed else 1.0,
            SERIES_BELOW=SERIES_BELOW[ends[0].dtype],
            TOKENS=TOKENS_PER_PROGRAM,
        )


@triton.jit
def _places(
    has_camera, tokens, seen_tokens, camera_stride, C: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr
):
    """Token and coordinate of every lane, the (sample, query camera) pair of the program, and which lanes see."""
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    coordinate = tl.arange(0, PADDED)[None, :]
    pair = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    flag = tl.load(has_camera + tl.program_id(2) * camera_stride + token, mask=token < tokens, other=0)
    return token, coordinate, pair, (flag != 0) & (token < seen_tokens) & (coordinate < C)


@triton.jit
def _segment(start_rad, end_rad, dtype: tl.constexpr, SERIES_BELOW: tl.constexpr):
    """Cosine and sine of a segment's midpoint, its mean length sin(δ)/δ, and the derivative of that by δ."""
    middle_rad = (start_rad + end_rad) * 0.5
    middle = (middle_rad - tl.floor(middle_rad * (1 / TURN_RAD) + 0.5) * TURN_RAD).to(dtype)
    half = ((end_rad - start_rad) * 0.5).to(dtype)
    short = tl.abs(half) < SERIES_BELOW
    x = half * half
    inverse = 1 / tl.where(short, 1.0, half)
    quotient = tl.sin(half) * inverse
    series = 1 - x * (1 / 6) * (1 - x * (1 / 20) * (1 - x * (1 / 42) * (1 - x * (1 / 72))))
    slope = -half * (1 / 3) * (1 - x * (1 / 10) * (1 - x * (1 / 28) * (1 - x * (1 / 54))))
    length = tl.where(short, series, quotient)
    return tl.cos(middle), tl.sin(middle), length, tl.where(short, slope, (tl.cos(half) - quotient) * inverse)


@triton.jit(do_not_specialize=COUNTS)
def _mean_phasors(
    coordinates, rad_per_unit, has_camera, table, tokens, seen_tokens, camera_stride, knots,
    C: tl.constexpr, F: tl.constexpr, PADDED: tl.constexpr, COORDINATE_MAJOR: tl.constexpr,
    SIGN: tl.constexpr, SERIES_BELOW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some tokens as one query camera of one sample sees them, frequency by frequency: tensors are [TOKENS, PADDED]."""
    dtype: tl.constexpr = table.dtype.element_ty
    token, coordinate, pair, seen = _places(has_camera, tokens, seen_tokens, camera_stride, C, PADDED, TOKENS)
    read = coordinates + (pair * seen_tokens + token) * knots * C + coordinate
    there = (coordinate < C) & (token < tokens)
    segments = (knots - 1).to(dtype)
    for frequency in range(F):
        rad = tl.load(rad_per_unit + coordinate * F + frequency, mask=coordinate < C, other=0.0)
        start_rad = tl.load(read, mask=seen, other=0.0) * rad
        cosines, sines = tl.zeros((TOKENS, PADDED), dtype), tl.zeros((TOKENS, PADDED), dtype)
        for knot in range(1, knots):
            end_rad = tl.load(read + knot * C, mask=seen, other=0.0) * rad
            cosine, sine, length, _ = _segment(start_rad, end_rad, dtype, SERIES_BELOW)
            cosines += cosine * length
            sines += sine * length
            start_rad = end_rad
        phasor = coordinate * F + frequency if COORDINATE_MAJOR else frequency * C + coordinate
        write = table + ((pair * tokens + token) * (C * F) + phasor) * 2
        tl.store(write, tl.where(seen, cosines / segments, 1.0), mask=there)
        tl.store(write + 1, tl.where(seen, sines * SIGN / segments, 0.0), mask=there)


@triton.jit(do_not_specialize=COUNTS)
def _gradients(
    coordinates, rad_per_unit, has_camera, grad, out, tokens, seen_tokens, camera_stride, knots,
    C: tl.constexpr, F: tl.constexpr, PADDED: tl.constexpr, COORDINATE_MAJOR: tl.constexpr,
    SIGN: tl.constexpr, SERIES_BELOW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """From the gradient of the table to that of the coordinates: sums over frequencies, segment by segment."""
    dtype: tl.constexpr = grad.dtype.element_ty
    token, coordinate, pair, seen = _places(has_camera, tokens, seen_tokens, camera_stride, C, PADDED, TOKENS)
    place = (pair * seen_tokens + token) * knots * C + coordinate
    written = (coordinate < C) & (token < seen_tokens)
    half_weight = 0.5 / (knots - 1).to(dtype)
    start = tl.load(coordinates + place, mask=seen, other=0.0)
    of_start = tl.zeros((TOKENS, PADDED), tl.float64)  # of the knot where a segment starts, from the one before it
    for knot in range(1, knots):
        end = tl.load(coordinates + place + knot * C, mask=seen, other=0.0)
        of_end = tl.zeros((TOKENS, PADDED), tl.float64)
        for frequency in range(F):
            rad = tl.load(rad_per_unit + coordinate * F + frequency, mask=coordinate < C, other=0.0)
            cosine, sine, length, slope = _segment(start * rad, end * rad, dtype, SERIES_BELOW)
            phasor = coordinate * F + frequency if COORDINATE_MAJOR else frequency * C + coordinate
            source = grad + ((pair * tokens + token) * (C * F) + phasor) * 2
            of_cosine = tl.load(source, mask=seen, other=0.0) * half_weight
            of_sine = tl.load(source + 1, mask=seen, other=0.0) * half_weight * SIGN
            of_middle = (of_sine * cosine - of_cosine * sine) * length
            of_half = (of_cosine * cosine + of_sine * sine) * slope
            of_start += (of_middle - of_half) * rad
            of_end += (of_middle + of_half) * rad
        tl.store(out + place + (knot - 1) * C, of_start, mask=written)
        start, of_start = end, of_end
    tl.store(out + place + (knots - 1) * C, of_start, mask=written)
