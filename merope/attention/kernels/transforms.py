# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, no-untyped-call"
"""The three Triton kernels behind the fused backend: a channel map for each token, for many query cameras, and back.

`turn` applies a map that is the same for all query cameras. `expand` writes K x for every query camera of a chunk;
`reduce` reads a tensor, or several, per query camera and adds up Kᵀ x over them. All work in float32 and take all heads
of a token in one program, so that coefficients are loaded once for all heads.

`expand` and `reduce` never move numbers between channels inside their loop over cameras: K takes its sources, the same
for all cameras, before it; Kᵀ adds up every tap where it is read, and moves the sums after it.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from merope.attention.kernels.channel_maps import ChannelMap, SideTables

HEADS_PER_PROGRAM = 8
TOKENS_PER_PROGRAM = 4  # of `turn`: what it reads about the channels serves so many tokens
CAMERAS_AT_ONCE = 4  # coefficients in flight: the loops over cameras wait for memory, not for arithmetic
PROGRAMS_TO_FILL_A_GPU = 4096
COUNTS = ("all_tokens", "camera_stride", "first_sample", "tokens", "heads", "first_camera", "cameras", "cameras_each")
"""Kernel arguments that are not compiled in: there would be a kernel for every clip."""
LANE_BY_LANE = ("x_batch", "x_head", "x_token", "out_batch", "out_token", "out_head")
"""Strides that `turn` must not know to be multiples of 16: Triton would give every thread eight neighbouring channels,
but terms come from other channels. With one channel per lane reads are coalesced and nothing crosses threads."""
OF_TOKENS = ("rows", "has_camera")
"""Pointers that start at any token that is seen: there is one kernel for all of them."""


def turn(
    x: Tensor,  # [B, H, N, source width], last dimension dense
    channel_map: ChannelMap,
    tables: SideTables,
    first_sample: int = 0,
    out: Tensor | None = None,  # to write to
) -> Tensor:  # [B, N, H, W]
    """A map that does not depend on the query camera, of samples first_sample …"""
    batch, heads, tokens, _ = x.shape
    out = x.new_empty((batch, tokens, heads, channel_map.width)) if out is None else out
    heads_block = heads_per_program(heads, channel_map.per_head)
    each = TOKENS_PER_PROGRAM if batch * tokens > PROGRAMS_TO_FILL_A_GPU else 1
    _turn[(triton.cdiv(tokens, each), batch, triton.cdiv(heads, heads_block))](
        *(x, out),
        *_arguments(channel_map, tables, first_sample, tokens, heads),
        *(*x.stride()[:3], *out.stride()[:3]),
        **_constants(channel_map, heads_block),
        TOKENS=each,
    )
    return out


def expand(
    x: Tensor,  # [B, H, N, source width], last dimension dense
    channel_map: ChannelMap,
    tables: SideTables,
    first_sample: int,
    cameras: range,
    out: Tensor,  # [B, cameras, N, H, W] to write to, last dimension dense
) -> None:
    """The map of samples first_sample … for the given query cameras."""
    if not channel_map.grouped and len(cameras) == 1:
        turn(x, channel_map, tables, first_sample, out[:, 0])
        return
    batch, heads, tokens, _ = x.shape
    heads_block = heads_per_program(heads, channel_map.per_head)
    splits = max(1, min(len(cameras) // CAMERAS_AT_ONCE, PROGRAMS_TO_FILL_A_GPU // (batch * tokens)))
    each = triton.cdiv(len(cameras), splits)
    _expand[(tokens, batch, triton.cdiv(len(cameras), each) * triton.cdiv(heads, heads_block))](
        *(x, out),
        *_arguments(channel_map, tables, first_sample, tokens, heads),
        *(cameras.start, len(cameras), each),
        *(*x.stride()[:3], *out.stride()[:4]),
        **_constants(channel_map, heads_block),
        AT_ONCE=min(triton.next_power_of_2(each), CAMERAS_AT_ONCE),
    )


def reduce(
    parts: Sequence[Tensor],  # each [B, cameras, H, N, W], last dimension dense
    channel_map: ChannelMap,  # as for `expand`
    tables: SideTables,
    first_sample: int,
    cameras: range,
    out: Tensor,  # [B, N, H, source width] that the sum is written to, or added to
    add: bool,
) -> None:
    """Σ over the parts and the query cameras of the transposed map of each one's tensor."""
    batch, _, heads, tokens, _ = parts[0].shape
    heads_block = heads_per_program(heads, channel_map.per_head)
    padded = (*parts, *parts[:1] * (triton.next_power_of_2(len(parts)) - len(parts)))  # one kernel for many counts
    _reduce[(tokens, batch, triton.cdiv(heads, heads_block))](
        *(padded, len(parts), out),
        *_arguments(channel_map, tables, first_sample, tokens, heads),
        *(channel_map.inverse, cameras.start, len(cameras)),
        *(tuple(part.stride(dim) for part in padded) for dim in range(4)),
        *out.stride()[:3],
        **_constants(channel_map, heads_block),
        SOURCES=channel_map.source_width,
        SOURCES_PADDED=triton.next_power_of_2(channel_map.source_width),
        AT_ONCE=min(triton.next_power_of_2(len(cameras)), CAMERAS_AT_ONCE),
        ADD=add,
    )


def heads_per_program(heads: int, per_head: bool) -> int:
    """Heads that share coefficients go together; coefficients of their own would fill the registers."""
    return min(triton.next_power_of_2(heads), 2 if per_head else HEADS_PER_PROGRAM)


def _arguments(
    channel_map: ChannelMap, tables: SideTables, first_sample: int, tokens: int, heads: int
) -> tuple[Tensor | int, ...]:
    camera_stride = tables.has_camera.stride(0) if tables.has_camera.shape[0] > 1 else 0
    flat = (tables.shared, tables.grouped, tables.rows, tables.has_camera)
    of_channels = (channel_map.index, channel_map.weight, channel_map.strides)
    return (*flat, *of_channels, tables.rows.stride(0), camera_stride, first_sample, tokens, heads)


def _constants(channel_map: ChannelMap, heads_block: int) -> dict[str, int | bool]:
    padded = triton.next_power_of_2(channel_map.width)
    return {
        "WIDTH": channel_map.width,
        "PADDED": padded,
        "TAPS": channel_map.index.shape[0],
        "HEADS": heads_block,
        "GATED": channel_map.gated,
        "PER_HEAD": channel_map.per_head,
        "num_warps": min(max(padded // 32, 1), 16),  # a lane per channel
    }


@triton.jit
def load_tap(index, weight, channel, keep, tap, WIDTH: tl.constexpr, GATED: tl.constexpr):
    """One term of every channel: source, offsets into the two tables, weight without a camera, and what one adds."""
    at = tap * 3 * WIDTH + channel
    source = tl.load(index + at, mask=keep, other=-1)
    fixed = tl.load(index + at + WIDTH, mask=keep, other=-1)
    moving = tl.load(index + at + 2 * WIDTH, mask=keep, other=-1)
    sign = tl.load(weight + at, mask=keep, other=0.0)
    if GATED:
        without = sign * tl.load(weight + at + WIDTH, mask=keep, other=0.0)
        change = sign * tl.load(weight + at + 2 * WIDTH, mask=keep, other=0.0)
    else:
        without, change = sign, sign * 0.0
    return source, fixed, moving, without, change


@triton.jit
def table_row(
    rows, sample, token, inside, all_tokens, head, heads, line, row_stride, sample_stride, head_stride, head_groups,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Offset of the table row behind every channel, without query camera and entry; by head if it matters."""
    row = tl.load(rows + line * all_tokens + token, mask=inside & (row_stride > 0), other=0)
    offset = row.to(row_stride.dtype) * row_stride + sample.to(row_stride.dtype) * sample_stride
    if PER_HEAD:
        there = tl.minimum(head, heads - 1)  # programs take more heads than there may be, and tables end with the last
        offset = offset + (there * head_groups // heads) * head_stride
    return offset


@triton.jit
def channel_strides(strides, channel, keep, WIDTH: tl.constexpr):
    """Of the operator behind every channel: line of rows, row, sample, head, head groups, query camera."""
    line = tl.load(strides + 5 * WIDTH + channel, mask=keep, other=0)
    row = tl.load(strides + 3 * WIDTH + channel, mask=keep, other=0)
    sample = tl.load(strides + channel, mask=keep, other=0)
    head = tl.load(strides + WIDTH + channel, mask=keep, other=0)
    head_groups = tl.load(strides + 2 * WIDTH + channel, mask=keep, other=0)
    camera = tl.load(strides + 4 * WIDTH + channel, mask=keep, other=0)
    return line, row, sample, head, head_groups, camera


@triton.jit
def _fixed_coefficient(shared, offset, inside, fixed, moving, source, weight):
    """The part of a coefficient that no query camera changes: a shared table's number, or 1, or 0."""
    from_table = tl.load(shared + offset + fixed, mask=inside & (fixed + offset * 0 >= 0), other=0.0)
    constant = tl.where((fixed < 0) & (moving < 0) & (source >= 0), 1.0, 0.0)
    return (from_table + constant) * weight


@triton.jit(do_not_specialize=(*COUNTS, *LANE_BY_LANE), do_not_specialize_on_alignment=("x", "out", *OF_TOKENS))
def _turn(
    x, out,
    shared, grouped, rows, has_camera, index, weight, strides, all_tokens, camera_stride, first_sample, tokens, heads,
    x_batch, x_head, x_token, out_batch, out_token, out_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TAPS: tl.constexpr, HEADS: tl.constexpr,
    GATED: tl.constexpr, PER_HEAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some tokens of all heads, one after the other: tensors are [HEADS, PADDED]."""
    batch = tl.program_id(1).to(tl.int64)
    sample = first_sample + batch
    head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None]
    channel = tl.arange(0, PADDED)[None, :]
    keep = channel < WIDTH
    line, row, by_sample, by_head, head_groups, _ = channel_strides(strides, channel, keep, WIDTH)
    taps = ()
    for tap in tl.static_range(TAPS):
        taps += (load_tap(index, weight, channel, keep, tap, WIDTH, GATED),)
    for step in range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + step
        inside = keep & (token < tokens)
        live = inside & (head < heads)
        read = x + batch * x_batch + token * x_token
        posed = tl.load(has_camera + sample * camera_stride + token, mask=token < tokens, other=0).to(tl.float32)
        offset = table_row(
            rows, sample, token, inside, all_tokens, head, heads, line, row, by_sample, by_head, head_groups, PER_HEAD
        )
        total = tl.zeros((HEADS, PADDED), tl.float32)
        for tap in tl.static_range(TAPS):
            source, fixed, moving, without, change = taps[tap]
            factor = without + change * posed if GATED else without
            value = tl.load(read + (head * x_head + source), mask=live & (source >= 0), other=0.0).to(tl.float32)
            total += value * _fixed_coefficient(shared, offset, inside, fixed, moving, source, factor)
        write = out + batch * out_batch + token * out_token
        tl.store(write + (head * out_head + channel), total.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=OF_TOKENS)
def _expand(
    x, out,
    shared, grouped, rows, has_camera, index, weight, strides, all_tokens, camera_stride, first_sample, tokens, heads,
    first_camera, cameras, cameras_each,
    x_batch, x_head, x_token, out_batch, out_camera, out_token, out_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TAPS: tl.constexpr, HEADS: tl.constexpr,
    GATED: tl.constexpr, PER_HEAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One token of all heads for some query cameras: tensors are [HEADS, PADDED]."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sample = first_sample + batch
    splits = tl.cdiv(cameras, cameras_each)
    start = tl.program_id(2) % splits * cameras_each
    stop = tl.minimum(start + cameras_each, cameras)
    head = (tl.program_id(2) // splits * HEADS + tl.arange(0, HEADS))[:, None]
    channel = tl.arange(0, PADDED)[None, :]
    keep = channel < WIDTH
    live = keep & (head < heads)
    line, row, by_sample, by_head, head_groups, by_camera = channel_strides(strides, channel, keep, WIDTH)
    posed = tl.load(has_camera + sample * camera_stride + token).to(tl.float32)
    offset = table_row(
        rows, sample, token, keep, all_tokens, head, heads, line, row, by_sample, by_head, head_groups, PER_HEAD
    )
    read = x + batch * x_batch + token * x_token
    values, coefficients, factors, moves = (), (), (), ()
    for tap in tl.static_range(TAPS):
        source, fixed, moving, without, change = load_tap(index, weight, channel, keep, tap, WIDTH, GATED)
        factor = without + change * posed if GATED else without
        values += (tl.load(read + (head * x_head + source), mask=live & (source >= 0), other=0.0).to(tl.float32),)
        coefficients += (_fixed_coefficient(shared, offset, keep, fixed, moving, source, factor),)
        factors += (factor,)
        moves += (moving,)
    write = out + batch * out_batch + token * out_token + start.to(tl.int64) * out_camera
    place = head * out_head + channel
    for camera in range(start, stop, AT_ONCE):
        entries = ()
        for ahead in tl.static_range(AT_ONCE):
            at = offset + (first_camera + camera + ahead) * by_camera
            for tap in tl.static_range(TAPS):
                held = (camera + ahead < stop) & (moves[tap] >= 0)
                entries += (tl.load(grouped + at + moves[tap], mask=held, other=0.0),)
        for ahead in tl.static_range(AT_ONCE):
            total = tl.zeros((HEADS, PADDED), tl.float32)
            for tap in tl.static_range(TAPS):
                entry = entries[ahead * TAPS + tap].to(tl.float32)
                total += (coefficients[tap] + entry * factors[tap]) * values[tap]
            tl.store(write + place, total.to(out.dtype.element_ty), mask=live & (camera + ahead < stop))
            write += out_camera


@triton.jit(do_not_specialize=(*COUNTS, "count"), do_not_specialize_on_alignment=OF_TOKENS)
def _reduce(
    parts, count, out,
    shared, grouped, rows, has_camera, index, weight, strides, all_tokens, camera_stride, first_sample, tokens, heads,
    inverse, first_camera, cameras,
    part_batch, part_camera, part_head, part_token, out_batch, out_token, out_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TAPS: tl.constexpr, HEADS: tl.constexpr,
    GATED: tl.constexpr, PER_HEAD: tl.constexpr,
    SOURCES: tl.constexpr, SOURCES_PADDED: tl.constexpr, AT_ONCE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One token of all heads: tensors are [HEADS, PADDED], sums over cameras one of these for every tap."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sample = first_sample + batch
    head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None]
    channel = tl.arange(0, PADDED)[None, :]
    keep = channel < WIDTH
    live = keep & (head < heads)
    line, row, by_sample, by_head, head_groups, by_camera = channel_strides(strides, channel, keep, WIDTH)
    posed = tl.load(has_camera + sample * camera_stride + token).to(tl.float32)
    offset = table_row(
        rows, sample, token, keep, all_tokens, head, heads, line, row, by_sample, by_head, head_groups, PER_HEAD
    )
    coefficients, factors, moves, totals = (), (), (), ()
    for tap in tl.static_range(TAPS):
        source, fixed, moving, without, change = load_tap(index, weight, channel, keep, tap, WIDTH, GATED)
        factor = without + change * posed if GATED else without
        coefficients += (_fixed_coefficient(shared, offset, keep, fixed, moving, source, factor),)
        factors += (factor,)
        moves += (moving,)
        totals += (tl.zeros((HEADS, PADDED), tl.float32),)
    for part in tl.static_range(len(parts)):
        read = parts[part] + batch * part_batch[part] + token * part_token[part]
        place = head * part_head[part] + channel
        for camera in range(0, cameras, AT_ONCE):
            values, entries = (), ()
            for ahead in tl.static_range(AT_ONCE):
                values += (tl.load(read + place, mask=live & (camera + ahead < cameras) & (part < count), other=0.0),)
                read += part_camera[part]
                at = offset + (first_camera + camera + ahead) * by_camera
                for tap in tl.static_range(TAPS):
                    held = (camera + ahead < cameras) & (part < count) & (moves[tap] >= 0)
                    entries += (tl.load(grouped + at + moves[tap], mask=held, other=0.0),)
            for ahead in tl.static_range(AT_ONCE):
                sums = ()
                for tap in tl.static_range(TAPS):
                    entry = entries[ahead * TAPS + tap].to(tl.float32)
                    sums += (totals[tap] + (coefficients[tap] + entry * factors[tap]) * values[ahead].to(tl.float32),)
                totals = sums
    target = tl.arange(0, SOURCES_PADDED)[None, :]
    there = (target < SOURCES) & (head < heads)
    result = tl.zeros((HEADS, SOURCES_PADDED), tl.float32)
    for tap in tl.static_range(TAPS):
        origin = tl.load(inverse + tap * SOURCES + target, mask=target < SOURCES, other=-1)
        chosen = tl.broadcast_to(tl.maximum(origin, 0), (HEADS, SOURCES_PADDED))
        moved = tl.gather(totals[tap], chosen, axis=1)
        result += tl.where(origin >= 0, moved, 0.0)
    write = out + batch * out_batch + token * out_token + (head * out_head + target)
    if ADD:
        result += tl.load(write, mask=there, other=0.0).to(tl.float32)
    tl.store(write, result.to(out.dtype.element_ty), mask=there)
