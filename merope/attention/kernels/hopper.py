"""MeRoPE's attention on Hopper GPUs: keys and values turn into each query camera's view inside the kernels.

Nothing is expanded in memory: keys and values are packed once (with the per-token blocks applied), and the channels
that depend on the query's camera are turned in shared memory, while the tensor cores work on the tile before.
"""

import math

import torch
from torch import Tensor

from merope.attention.kernels.hopper_module import (
    AttendParams,
    BoundParams,
    FinishParams,
    GradParams,
    PackParams,
    PackQueryParams,
    module,
    tokens,
)
from merope.attention.kernels.hopper_tables import HopperTables
from merope.attention.kernels.hopper_visible import TILE
from merope.attention.kernels.support import multiprocessors

SUFFIX = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SCALE = 1 / math.sqrt(128)
LARGEST = 2.0**14
"""Numbers saturate there (`packed`, hopper_channels.cuh)."""
STEP = 64
"""Queries of one step of the backward pass; each camera's are padded to a multiple."""
PARTS = 32
"""Parts of a head's tokens of which blocks of threads find the largest norms."""
FILLING_BLOCKS = 1024
"""Blocks of 256 threads that a GPU with 132 multiprocessors needs to hide the latency of its memory."""
MOST_PIECES = 8
"""Of a tile of keys in the backward pass."""
PIECE_COST = 0.02
"""What a piece costs beside its walk over query cameras, in walks over all of them."""
ROWS, WIDE_ROWS = TILE, 144
"""Queries of a tile of the forward pass: of `attend`, and of `attend_wide`."""
SHARED_BYTES = 1024 + 7 * 32768 + 256  # alignment; queries and three stages of keys and values; barriers
WIDE_SHARED_BYTES = 1024 + 4 * WIDE_ROWS * 128 + 4 * 32768 + 256 + 10 * WIDE_ROWS * 4
"""Alignment; queries and weights; two stages of keys and values; barriers; shift, factor and 8 parts of a query."""
GRAD_SHARED_BYTES = 1024 + 7 * 32768 + 1024 + 256  # alignment; keys, values (packed, too), stages, sums; rows; barriers


def _forward(
    q: Tensor,  # [B, H, Nq, 128]
    k: Tensor,  # [B, H, Nk, 128]
    v: Tensor,  # [B, H, Nk, 128]
    tables: list[Tensor],  # of a HopperTables
    cameras: int,  # query cameras
) -> tuple[Tensor, Tensor]:  # [B, Nq, H, 128], float32 [B, H, Nq]
    """Attention under a plan that `why_not_plan` accepts, token-major, and the logarithm of the softmax sums.

    Numbers beyond ±16384 in q, k and v saturate. The output has gradients with respect to q, k and v: those of the
    saturated numbers, for output gradients of any magnitude. The logarithms have none.
    """
    q, k, v = (_aligned(x) for x in (q, k, v))
    t = HopperTables(*tables)
    batch, heads, queries, _ = q.shape
    keys, padded = k.shape[2], t.key_camera.shape[0]
    own_tables = int(t.query_rotation.shape[0] > 1)
    out = q.new_empty((batch, queries, heads, 128))
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    packed = torch.empty((2, batch * heads, 2, padded, 64), dtype=torch.float16, device=q.device)
    attend = AttendParams(
        *(tokens(q), tokens(out.transpose(1, 2)), packed[0].data_ptr(), packed[1].data_ptr(), lse.data_ptr()),
        *(x.data_ptr() for x in (t.query_disparity, t.query_rotation, t.query_native)),
        *(t.key_views.data_ptr(), t.phasors.data_ptr(), own_tables),
        *(batch, heads, cameras, queries // cameras, queries, keys, padded, t.phasors.shape[2], SCALE),
        *(t.seen_keys.data_ptr(), t.camera_order.data_ptr()),
    )
    wide = takes_wide_tiles(queries // cameras, t.visible)
    name, rows, shared = ("attend_wide", WIDE_ROWS, WIDE_SHARED_BYTES) if wide else ("attend", ROWS, SHARED_BYTES)
    tiles = batch * heads * cameras * math.ceil(queries // cameras / rows)
    with torch.cuda.device(q.device):
        kernels = module(q.device.index, t.phases, t.visible)
        grid = _token_grid(padded, batch, heads)
        kernels.launch(f"pack_keys_{SUFFIX[q.dtype]}", grid, 256, 0, _key_packing(k, v, packed, t))
        kernels.launch(f"{name}_{SUFFIX[q.dtype]}", (tiles, 1, 1), 512, shared, attend, early=True)
    return out, lse


def takes_wide_tiles(queries_per_camera: int, visible: bool) -> bool:
    """Whether tiles of 144 queries take less time than tiles of 128, of which a camera's last may have 64 or fewer.

    Plans in which cameras see a part of the keys have tiles of 128 alone.
    """
    # Times in eighths of a tile of 128. One of 64 or fewer takes little less, as it turns every key, too: 144 queries
    # as 128 + 16 take 1.9 times the time of 128. A tile of 144 takes 0.68 to 0.83 of that with 64 cameras or more, and
    # with 8 clips of 13; 0.87 to 0.98 with one clip of 13 (benchmarks/results/kernel-choices-wide-h200.json).
    full, rest = divmod(queries_per_camera, ROWS)
    narrow = 8 * full + (8 if rest > ROWS // 2 else 7 if rest else 0)
    wide = 12 * math.ceil(queries_per_camera / WIDE_ROWS)
    return not visible and wide < narrow


def _key_packing(k: Tensor, v: Tensor, packed: Tensor, t: HopperTables) -> PackParams:
    _, heads, keys, _ = k.shape
    padded, own_tables = packed.shape[3], int(t.key_rotation.shape[0] > 1)
    return PackParams(
        *(tokens(k), tokens(v), packed[0].data_ptr(), packed[1].data_ptr()),
        *(t.key_rotation.data_ptr(), t.key_native.data_ptr(), own_tables, heads, keys, padded),
    )


def _token_grid(tokens_per_sample: int, batch: int, heads: int) -> tuple[int, int, int]:
    """Blocks of 256 threads, 16 a token: of tokens, of samples, of groups of heads.

    One group where that fills the GPU: a token's operators are then loaded once for all heads.
    """
    blocks = math.ceil(tokens_per_sample / 16)
    return blocks, batch, min(heads, math.ceil(FILLING_BLOCKS / (blocks * batch)))


def _bound_and_pack(grad: Tensor, k: Tensor, v: Tensor, part_bounds: Tensor, packed: Tensor, t: HopperTables) -> None:
    batch, heads, queries, _ = grad.shape
    blocks, _, groups = _token_grid(packed.shape[3], batch, heads)
    grid = (PARTS * (2 * heads + math.ceil(blocks / PARTS) * groups), batch, 1)
    params = BoundParams(_key_packing(k, v, packed, t), tokens(grad), part_bounds.data_ptr(), queries, groups)
    module(k.device.index, t.phases, t.visible).launch(f"bound_and_pack_{SUFFIX[k.dtype]}", grid, 256, 0, params)


def cut_tiles(tiles: int, cameras: int, at_once: int) -> tuple[int, int]:
    """How many tiles of keys of the backward pass are walked over as a whole, and in how many pieces each other one is.

    tiles: of all samples' heads; the GPU works on `at_once` of them.
    Those of the last, incomplete wave are cut: a piece walks over a part of the query cameras.
    """
    rest = tiles % at_once

    def time(pieces: int) -> float:  # of the last wave, in walks over all cameras
        return math.ceil(rest * pieces / at_once) * (1 / pieces + PIECE_COST)

    pieces = min(range(1, min(MOST_PIECES, cameras) + 1), key=time)
    return (tiles - rest, pieces) if pieces > 1 else (tiles, 1)


_attend = torch.library.custom_op("merope::attend_hopper", _forward, mutates_args=(), device_types="cuda")


@_attend.register_fake
def _(q, k, v, tables, cameras):  # type: ignore[no-untyped-def]
    batch, heads, queries, _ = q.shape
    return q.new_empty((batch, queries, heads, 128)), q.new_empty((batch, heads, queries), dtype=torch.float32)


def _backward(
    grad: Tensor,  # [B, Nq, H, 128]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # [B, Nq, H, 128]
    lse: Tensor,
    tables: list[Tensor],
    cameras: int,
    other_norms: Tensor | None = None,  # float32 [B, H], the largest of values that only `out` and `lse` know of
) -> tuple[Tensor, Tensor, Tensor]:  # [B, Nq, H, 128], [B, Nk, H, 128] twice
    grad, q, k, v = (_aligned(x) for x in (grad, q, k, v))
    t = HopperTables(*tables)
    batch, heads, queries, _ = q.shape
    per_camera, keys, padded = queries // cameras, k.shape[2], t.key_camera.shape[0]
    padded_rows = math.ceil(per_camera / STEP) * STEP
    rows, own_tables = cameras * padded_rows, int(t.query_rotation.shape[0] > 1)
    grad_q, grad_k, grad_v = (x.new_empty((batch, x.shape[2], heads, 128)) for x in (q, k, v))
    packed = torch.empty((2, batch * heads, 2, padded, 64), dtype=torch.float16, device=q.device)
    packed_queries = packed.new_empty((2, batch * heads, 2, rows, 64))
    part_bounds, bounds = lse.new_empty((batch * heads, PARTS, 2)), lse.new_empty((batch * heads, 2))
    row_numbers = lse.new_empty((batch * heads, rows, 2))
    sums = lse.new_empty((batch * heads, rows // STEP, 2, 8, 128, 4))
    tiles = batch * heads * padded // TILE
    whole, pieces = (tiles, 1) if t.visible else cut_tiles(tiles, cameras, multiprocessors(q.device))
    key_sums = lse.new_zeros((tiles - whole, 2, 2, 2, 8, 128, 4))
    by_query = [x.data_ptr() for x in (t.query_disparity, t.query_rotation, t.query_native)]
    by_camera = [x.data_ptr() for x in (t.key_views, t.phasors, t.key_camera)]
    pack = PackQueryParams(
        *(tokens(q), tokens(out.transpose(1, 2)), tokens(grad.transpose(1, 2)), lse.data_ptr(), *by_query),
        *(x.data_ptr() for x in (packed_queries[0], packed_queries[1], row_numbers, part_bounds, bounds, sums)),
        *(own_tables, heads, cameras, per_camera, padded_rows, queries),
    )
    gradients = GradParams(
        *(tokens(grad_k.transpose(1, 2)), tokens(grad_v.transpose(1, 2)), packed[0].data_ptr(), packed[1].data_ptr()),
        *(packed_queries[0].data_ptr(), packed_queries[1].data_ptr(), row_numbers.data_ptr(), bounds.data_ptr()),
        *(sums.data_ptr(), t.key_rotation.data_ptr(), t.key_native.data_ptr(), *by_camera, own_tables),
        *(heads, cameras, padded_rows, keys, padded, t.phasors.shape[2], SCALE),
        *(t.seen_keys.data_ptr(), t.walks.data_ptr(), key_sums.data_ptr(), whole, pieces),
    )
    finish = FinishParams(
        *(tokens(grad_q.transpose(1, 2)), sums.data_ptr(), bounds.data_ptr(), *by_query, own_tables),
        *(heads, cameras, per_camera, padded_rows, queries, SCALE),
    )
    suffix = SUFFIX[q.dtype]
    with torch.cuda.device(q.device):
        kernels = module(q.device.index, t.phases, t.visible)
        _bound_and_pack(grad.transpose(1, 2), k, v, part_bounds, packed, t)
        if other_norms is not None:  # a head's bound is the largest of its parts
            part_bounds[:, 0, 1] = torch.maximum(part_bounds[:, 0, 1], other_norms.flatten())
        kernels.launch(f"pack_queries_{suffix}", _token_grid(rows, batch, heads), 256, 0, pack)
        grid = (whole + (tiles - whole) * pieces, 1, 1)
        kernels.launch(f"gradients_{suffix}", grid, 384, GRAD_SHARED_BYTES, gradients)
        if tiles > whole:
            kernels.launch(f"finish_keys_{suffix}", ((tiles - whole) * TILE // 16, 1, 1), 256, 0, gradients)
        kernels.launch(f"finish_queries_{suffix}", _token_grid(queries, batch, heads), 256, 0, finish)
    return grad_q, grad_k, grad_v


_attend_backward = torch.library.custom_op(
    "merope::attend_hopper_backward", _backward, mutates_args=(), device_types="cuda"
)


@_attend_backward.register_fake
def _(grad, q, k, v, out, lse, tables, cameras, other_norms=None):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty((x.shape[0], x.shape[2], x.shape[1], 128)) for x in (q, k, v))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, tables, ctx.cameras = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *tables)


def _gradients(ctx, grad, _lse):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, *tables = ctx.saved_tensors
    gradients = _attend_backward(grad.contiguous(), q, k, v, out, lse, tables, ctx.cameras)
    return *(x.transpose(1, 2) for x in gradients), [None] * len(tables), None


_attend.register_autograd(_gradients, setup_context=_save)


def _aligned(x: Tensor) -> Tensor:
    """x with every token's channels side by side from a multiple of 16 bytes on; a copy where they are not."""
    aligned = x.stride(-1) == 1 and all(n % 8 == 0 for n in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)
