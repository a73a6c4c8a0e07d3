"""Attention under a plan through scaled_dot_product_attention, a few query cameras at a time.

Keys and values of a grouped encoding differ for every query camera. Blocks that do not depend on the query's camera are
applied once; the others are expanded for a chunk of cameras that fits the memory budget, attended to, and dropped. In
training a chunk is recomputed in the backward pass instead of being kept.

A pair with a token that has no camera takes the identity on camera blocks. For such keys the camera channels are
carried twice, transformed and plain, and each key fills only its own copy; such queries are attended to separately.

Query cameras that see the same keys are attended to together, over these keys alone: what is not seen costs nothing.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from merope.attention.operators import Operator
from merope.attention.plan import AttentionPlan, Block
from merope.attention.visible_cameras import Run
from merope.errors import invalid


def attend_sdpa(
    q: Tensor,  # [B, H, Nq, d]
    k: Tensor,  # [B, H, Nk, d]
    v: Tensor,  # [B, H, Nk, d]
    plan: AttentionPlan,
    memory_budget: int,  # bytes
) -> Tensor:  # [B, H, Nq, d]
    """Attention under `plan` with at most `memory_budget` bytes beyond inputs, plan and output.

    Where one query camera of all samples and heads is too much, samples, then heads, are worked through in parts;
    putting the parts together takes the size of the output once more.
    """
    samples, heads = _part_size(q, k, v, plan, memory_budget)
    if (samples, heads) == q.shape[:2]:
        return _attend_part(q, k, v, plan, heads, slice(None), memory_budget)
    # In training, what the parts keep for the backward pass would add up.
    attend: Callable[..., Tensor] = partial(_recomputed, _attend_part) if _in_training(q, k, v, plan) else _attend_part
    rows = []
    for row, some in enumerate(zip(*(x.split(samples) for x in (q, k, v)), strict=True)):
        row_plan = plan.at(slice(row * samples, (row + 1) * samples), slice(None))
        parts = [
            attend(*part, row_plan, q.shape[1], slice(i * heads, (i + 1) * heads), memory_budget)
            for i, part in enumerate(zip(*(x.split(heads, dim=1) for x in some), strict=True))
        ]
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


def _attend_part(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, all_heads: int, chosen: slice, memory_budget: int
) -> Tensor:  # [B, H, Nq, d]
    """Samples, and the chosen of all heads, of which at least one query camera fits the budget.

    Tables are laid out for these heads alone: those of all heads may not fit.
    """
    held, per_group, _ = _bytes_needed(q, k, v, plan, q.shape[0], q.shape[1], all_heads)
    plan = plan.for_heads(all_heads, chosen)
    chunk = min(plan.groups, (memory_budget - held) // per_group)
    out = _attend_cameras(q, k, v, plan, chunk)
    if plan.cameraless_queries.numel() == 0:
        return out
    plain = _attend_cameraless(q, k, v, plan)
    return torch.where(plan.query_has_camera[:, None, :, None], out, plain)


def _attend_cameras(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, chunk: int) -> Tensor:  # [B, H, Nq, d]
    """Every query as if it had a camera; rows of those that have none are not meaningful."""
    turned = by_block(q[:, :, None], plan.blocks, lambda block, x: block.of_query(x, transpose=True)).squeeze(2)
    if plan.has_cameraless_keys:
        turned = torch.cat((turned, _camera_channels(q, plan)), dim=-1)
    shared_k = by_block(k[:, :, None], plan.blocks, _shared_key)
    shared_v = by_block(v[:, :, None], plan.blocks, _shared_key) if plan.transform_values else v[:, :, None]
    outputs = [_attend_run(turned, k, v, shared_k, shared_v, plan, run, chunk) for run in plan.runs]
    out = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    return _turn_back(out, plan) if plan.transform_values else out[..., : plan.head_dim]


def _attend_run(
    turned: Tensor, k: Tensor, v: Tensor, shared_k: Tensor, shared_v: Tensor, plan: AttentionPlan, run: Run, chunk: int
) -> Tensor:  # [B, H, queries of the run, d']
    """A few cameras at a time where their keys differ; rows of tokens after the cameras are then zero."""
    copied = plan.groups > 1 or (len(plan.runs) > 1 and (len(run.keys) > 1 or plan.has_cameraless_keys))
    # In training, the keys and values that each run copies would add up.
    attend = partial(_recomputed, _attend_chunk) if copied and _in_training(turned, k, v, plan) else _attend_chunk
    if plan.groups == 1:
        return attend(turned[:, :, run.queries], k, v, shared_k, shared_v, plan, run, slice(0, 1))
    outputs = []
    for start in range(run.cameras.start, run.cameras.stop, chunk):
        groups = slice(start, min(start + chunk, run.cameras.stop))
        queries = turned[:, :, groups.start * plan.tokens_per_camera : groups.stop * plan.tokens_per_camera]
        outputs.append(attend(queries, k, v, shared_k, shared_v, plan, run, groups))
    without_camera = run.queries.stop - run.cameras.stop * plan.tokens_per_camera
    if without_camera:
        outputs.append(turned.new_zeros(*turned.shape[:2], without_camera, turned.shape[-1]))
    return torch.cat(outputs, dim=2)


def _attend_chunk(
    turned: Tensor,  # [B, H, g · tokens_per_camera, d'] queries of the chunk's cameras
    k: Tensor,
    v: Tensor,
    shared_k: Tensor,  # [B, H, 1, Nk, d] with the blocks that all cameras share applied
    shared_v: Tensor,
    plan: AttentionPlan,
    run: Run,
    groups: slice,
) -> Tensor:  # [B, H, g · tokens_per_camera, d']
    count = groups.stop - groups.start
    keys = _expand(shared_k, k, plan, run, groups)
    if plan.transform_values:
        values = _expand(shared_v, v, plan, run, groups)
    else:
        values = run.seen(shared_v, 3)
        if plan.has_cameraless_keys:  # as wide as the keys: fused kernels want one width
            values = pad(values, (0, keys.shape[-1] - plan.head_dim))
        values = values.expand(-1, -1, count, -1, -1)
    out = scaled_dot_product_attention(
        turned.unflatten(2, (count, -1)).flatten(1, 2),
        keys.flatten(1, 2),
        values.flatten(1, 2),
        scale=1 / math.sqrt(plan.head_dim),
    )
    return out.unflatten(1, (-1, count)).flatten(2, 3)


def _expand(
    shared: Tensor, plain: Tensor, plan: AttentionPlan, run: Run, groups: slice
) -> Tensor:  # [B, H, g, keys of the run, d']
    """Keys (or values) as the cameras of a chunk see them."""

    def key(block: Block, x: Tensor) -> Tensor:
        return block.key.at(slice(None), slice(None), groups).of_keys(run).apply(x[:, :, :1])  # all cameras' are alike

    seen = run.seen(shared, 3).expand(-1, -1, groups.stop - groups.start, -1, -1)
    expanded = by_block(seen, tuple(block for block in plan.blocks if block.key.groups > 1), key)
    if not plan.has_cameraless_keys:
        return expanded
    has_camera = run.seen(plan.key_has_camera, 1)[:, None, None, :, None]
    masked = by_block(expanded, plan.camera_blocks, lambda block, x: torch.where(has_camera, x, 0))
    second = torch.where(has_camera, 0, _camera_channels(run.seen(plain, 2), plan)[:, :, None])
    return torch.cat((masked, second.expand(*masked.shape[:-1], -1)), dim=-1)


def _turn_back(out: Tensor, plan: AttentionPlan) -> Tensor:  # [B, H, Nq, d'] -> [B, H, Nq, d]
    """O_a on the attended values; what came from keys without a camera is added as it is."""
    turned, second = out[:, :, None].split((plan.head_dim, out.shape[-1] - plan.head_dim), dim=-1)
    turned = by_block(turned, plan.blocks, lambda block, x: block.of_query(x))
    if plan.has_cameraless_keys:
        parts = iter(second.split([block.stop - block.start for block in plan.camera_blocks], dim=-1))
        turned = by_block(turned, plan.camera_blocks, lambda block, x: x + next(parts))
    return turned.squeeze(2)


def _attend_cameraless(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:  # [B, H, Nq, d]
    """Queries without a camera: only the blocks that are not about cameras act; other rows are zero."""
    blocks = tuple(block for block in plan.blocks if not block.camera)
    queries = by_block(q[:, :, None], blocks, lambda block, x: block.of_query(x, transpose=True)).squeeze(2)
    keys = by_block(k[:, :, None], blocks, _shared_key).squeeze(2)
    values = by_block(v[:, :, None], blocks, _shared_key).squeeze(2) if plan.transform_values else v
    chosen, scale = plan.cameraless_queries, 1 / math.sqrt(plan.head_dim)
    some = []
    for run in plan.runs:
        if run.cameraless.start < run.cameraless.stop:
            own = queries[:, :, chosen[run.cameraless]]
            some.append(scaled_dot_product_attention(own, run.seen(keys, 2), run.seen(values, 2), scale=scale))
    out = torch.zeros_like(q).index_copy(2, chosen, torch.cat(some, dim=2))
    if not plan.transform_values:
        return out
    return by_block(out[:, :, None], blocks, lambda block, x: block.of_query(x)).squeeze(2)


def by_block(
    x: Tensor,  # [..., d]
    blocks: tuple[Block, ...],
    change: Callable[[Block, Tensor], Tensor],
) -> Tensor:  # [..., d]
    """x with the channels of every block changed and the channels between blocks kept."""
    if not blocks:
        return x
    pieces, reached = [], 0
    for block in blocks:
        pieces += [x[..., reached : block.start], change(block, x[..., block.channels])]
        reached = block.stop
    return torch.cat((*pieces, x[..., reached:]), dim=-1)


def _shared_key(block: Block, x: Tensor) -> Tensor:
    return block.key.apply(x) if block.key.groups == 1 else x


def _camera_channels(x: Tensor, plan: AttentionPlan) -> Tensor:  # [..., channels of all camera blocks]
    return torch.cat([x[..., block.channels] for block in plan.camera_blocks], dim=-1)


def _part_size(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, memory_budget: int) -> tuple[int, int]:
    """Samples and heads that can be attended to at once: all, or halves of the samples, or halves of the heads."""
    samples, heads = q.shape[:2]
    while True:
        held, per_group, ending = _bytes_needed(q, k, v, plan, samples, heads, q.shape[1])
        needed = max(held + per_group, ending)
        if needed <= memory_budget:
            return samples, heads
        if samples == heads == 1:
            expected = f"at least {needed} bytes, what one head and one query camera need"
            raise invalid("memory_budget", expected, memory_budget, "raise it or shorten the clip")
        samples, heads = ((samples + 1) // 2, heads) if samples > 1 else (1, (heads + 1) // 2)


def _bytes_needed(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, batch: int, heads: int, all_heads: int
) -> tuple[int, int, int]:
    """Upper estimates of what is held throughout, what each query camera of a chunk adds, and what the end takes."""
    queries, keys, item = q.shape[2], k.shape[2], q.element_size()
    compute = max(item, 4)
    grouped = [block for block in plan.blocks if block.key.groups > 1]
    carried = (plan.head_dim + plan.has_cameraless_keys * sum(map(_width, plan.camera_blocks))) * item
    # A transform holds its running sum, a product and their sum, and the matrices with their entries.
    working = 3 * max([0, *map(_width, plan.blocks)]) * compute
    matrices = 3 * max([0, *(block.key.matrix_numbers for block in grouped)]) * compute
    pieces = sum(map(_width, grouped)) * item
    logits = 3 * plan.tokens_per_camera * item if q.is_cuda and q.dtype == torch.float64 else 0  # no fused kernel
    copies = 2 * plan.has_cameraless_keys * plan.head_dim * item
    expanded = max(2 * carried + max(pieces, logits) + copies, carried + pieces + working + matrices // heads)
    training = _in_training(q, k, v, plan)
    laid_out = sum(_laid_out_bytes(o, batch, heads, all_heads) for block in plan.blocks for o in block.operators)
    held = (2 + training) * batch * heads * (queries + keys) * carried + laid_out
    per_group = (1 + training) * batch * heads * keys * expanded
    ending = held + batch * heads * (2 * queries * carried + max(queries, keys) * working)
    return held, per_group, ending


def _laid_out_bytes(operator: Operator, batch: int, heads: int, all_heads: int) -> int:
    """Bytes of the copy that `Operator.for_heads` makes of a table for some samples and heads, and of its gradient."""
    table, groups = operator.table, operator.table.shape[1]
    if groups in (1, all_heads) or heads == 1:
        return 0
    return (1 + table.requires_grad) * table[:batch, :1].nbytes * heads


def _recomputed(attend: Callable[..., Tensor], *arguments: object) -> Tensor:
    """attend(*arguments), run again in the backward pass instead of keeping what it computes."""
    return checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False)


def _in_training(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *plan.tensors().values()))


def _width(block: Block) -> int:
    return block.stop - block.start
