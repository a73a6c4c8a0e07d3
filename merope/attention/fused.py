"""Attention under a plan for NVIDIA GPUs: one kernel per transform, and one place where query cameras are grouped.

On Hopper GPUs MeRoPE's keys and values turn inside the attention loop (`merope.attention.kernels.hopper`), and tokens
without a camera are attended to apart (`merope.attention.kernels.hopper_parts`). Elsewhere:

Transforms of queries, keys, values and output are single Triton kernels over all blocks of a plan
(`merope.attention.kernels.transforms`). Keys and values of grouped encodings are expanded for a chunk of query cameras
that fits the memory budget, attended to with PyTorch's fused attention, and dropped; the backward pass expands them
again and reads the saved log-sum-exp, so that no attention is computed twice.
"""

import logging
import math
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from merope.attention.kernels import hopper_module
from merope.attention.kernels.grouped import grouped_attention_backward, grouped_attention_forward
from merope.attention.kernels.hopper import SUFFIX
from merope.attention.kernels.hopper_parts import attend_hopper_parts
from merope.attention.kernels.hopper_tables import HopperTables, has_phases, make_tables, why_not_plan
from merope.attention.kernels.prepared import PreparedPlan, cameraless, capability, kept, prepared
from merope.attention.kernels.support import bytes_per_camera_of, learns_tables
from merope.attention.kernels.table_gradients import TableGradients, add_uses, learned_tables
from merope.attention.kernels.tokens_apart import KeysApart, has_tokens_apart, keys_apart
from merope.attention.kernels.transforms import turn
from merope.attention.plan import AttentionPlan
from merope.attention.sdpa import attend_sdpa
from merope.errors import invalid

_logger = logging.getLogger("merope")


def attend_fused(
    q: Tensor,  # [B, H, Nq, d]
    k: Tensor,  # [B, H, Nk, d]
    v: Tensor,  # [B, H, Nk, d]
    plan: AttentionPlan,
    memory_budget: int,  # bytes
) -> Tensor:  # [B, H, Nq, d], token-major in memory
    """Attention under `plan`, with at most `memory_budget` bytes of expanded keys and values at a time.

    q, k and v may be views of one projection [B, N, 3, H, d]: they are read as they lie, and `out.transpose(1, 2)` is
    dense, ready for the output projection. Without a block there is nothing to turn: that is plain attention, and it
    costs and rounds as such.
    """
    if not plan.blocks:
        return attend_sdpa(q, k, v, plan, memory_budget) if plan.visible_keys else scaled_dot_product_attention(q, k, v)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    needed = bytes_needed(q, k, plan, training or learns_tables(plan))
    if needed > memory_budget:
        expected = f"at least {needed} bytes, what one query camera needs"
        raise invalid("memory_budget", expected, memory_budget, 'raise it or use backend="sdpa", which splits heads')
    tables = hopper_for(q, plan)
    if tables is None:
        out = _attend(q, k, v, plan, memory_budget)
    else:
        out = _attend_hopper(q, k, v, plan, tables, memory_budget)
    chosen = plan.cameraless_queries
    if chosen.numel() == 0:
        return out
    alone = _attend(q[:, :, chosen], k, v, cameraless(plan), memory_budget)
    if tables is not None:  # the same queries in every sample
        return out.transpose(1, 2).index_copy(1, chosen, alone.transpose(1, 2)).transpose(1, 2)
    plain = torch.zeros_like(out).index_copy(2, chosen, alone)
    return torch.where(plan.query_has_camera[:, None, :, None], out, plain)


def bytes_needed(q: Tensor, k: Tensor, plan: AttentionPlan, backward: bool) -> int:
    """Bytes of keys and values that are expanded for one query camera, and of their gradients."""
    if hopper_for(q, plan) is None:
        return bytes_per_camera_of(plan, k, backward)
    alone = bytes_per_camera_of(cameraless(plan), k, backward) if plan.cameraless_queries.numel() else 0
    rest = _keys_apart(plan).rest if plan.has_cameraless_keys else None
    return max(alone, 0 if rest is None else bytes_per_camera_of(rest, k[:, :, : rest.key_tokens], backward))


def make_ready(q: Tensor, plan: AttentionPlan) -> None:
    """Make now what a plan keeps for inputs like q (of any shape); a graph of torch.compile cannot make it."""
    if not plan.blocks:
        return
    if hopper_for(q, plan) is None:
        prepared(plan, q.dtype)
    elif has_tokens_apart(plan):
        rest = _keys_apart(plan).rest
        if rest is not None:
            prepared(rest, q.dtype)
    if plan.cameraless_queries.numel():
        prepared(cameraless(plan), q.dtype)


def hopper_for(q: Tensor, plan: AttentionPlan) -> HopperTables | None:
    """Tables for the kernel that turns keys inside the attention loop, where the GPU and the plan allow it."""
    if not _is_hopper(q) or q.dtype not in SUFFIX or learns_tables(plan):
        return None

    def tables() -> HopperTables | None:
        visible = plan.visible_keys is not None
        return make_tables(plan) if why_not_plan(plan) is None and _can_build(has_phases(plan), visible) else None

    return kept(plan, "hopper", tables)


def _attend_hopper(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, tables: HopperTables, memory_budget: int
) -> Tensor:  # [B, H, Nq, d]
    """Rows of queries without a camera are not meaningful."""
    q, k, v = (_dense_channels(x) for x in (q, k, v))
    if not has_tokens_apart(plan):
        return torch.ops.merope.attend_hopper(q, k, v, tables.tensors(), plan.query_cameras)[0].transpose(1, 2)
    keys, queries = _keys_apart(plan), plan.query_cameras * plan.tokens_per_camera
    maps = ([], []) if keys.rest is None else prepared(keys.rest, q.dtype).pack()
    sizes = (plan.query_cameras, queries, keys.with_camera, memory_budget)
    return attend_hopper_parts(q, k, v, tables.tensors(), keys.order, *maps, *sizes)[0].transpose(1, 2)


def _keys_apart(plan: AttentionPlan) -> KeysApart:
    return kept(plan, "keys apart", lambda: keys_apart(plan))


def _is_hopper(q: Tensor) -> bool:
    return q.is_cuda and capability(q.device.index) == 90


@cache
def _can_build(phases: bool, visible: bool) -> bool:
    """Whether the Hopper kernels can be built here; says why not, once."""
    try:
        hopper_module.cubin(phases, visible)
    except (OSError, RuntimeError, ValueError) as error:
        _logger.warning("keys and values are expanded in memory, not turned in the attention loop: %s", error)
        return False
    return True


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, memory_budget: int) -> Tensor:  # [B, H, Nq, d]
    """Every query as if it had a camera; rows after the cameras' tokens are zero."""
    q, k, v = (_dense_channels(x) for x in (q, k, v))
    if learns_tables(plan):
        return _attend_learning(q, k, v, plan, memory_budget)
    tensors, numbers = prepared(plan, q.dtype).pack()
    return _forward(q, k, v, tensors, numbers, memory_budget)[0].transpose(1, 2)


@torch.library.custom_op("merope::attend_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],  # of a PreparedPlan
    numbers: list[int],
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, Nq, H, d], [B, queries, H, W], [B · groups, H, P]
    """The result token-major; for the backward pass the result before O, and log-sum-exp."""
    with torch.cuda.device_of(q):  # Triton launches on the current device, wherever the tensors are
        return _forward_here(q, k, v, PreparedPlan.unpack(tensors, numbers), memory_budget)


def _forward_here(
    q: Tensor, k: Tensor, v: Tensor, maps: PreparedPlan, memory_budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    turned = turn(q[:, :, : maps.queries], maps.turn, maps.query_tables)
    attended, lse = grouped_attention_forward(turned, k, v, maps, _scale(q), memory_budget)
    del turned
    # A result of an operator is no view of another one.
    plain = maps.plain_values
    out = attended.clone() if plain else turn(attended.transpose(1, 2), maps.back, maps.query_tables)
    return _with_rest(out, q), attended, lse


@_forward.register_fake
def _(q, k, v, tensors, numbers, memory_budget):  # type: ignore[no-untyped-def]
    maps = PreparedPlan.unpack(tensors, numbers)
    batch, heads, queries, head_dim = q.shape
    return (
        q.new_empty((batch, queries, heads, head_dim)),
        q.new_empty((batch, maps.queries, heads, maps.width)),
        q.new_empty((batch * maps.groups, heads, maps.tokens_per_group), dtype=torch.float32),
    )


@torch.library.custom_op("merope::attend_backward", mutates_args=())
def _backward(
    grad: Tensor,  # [B, Nq, H, d]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Tensor,  # [B, queries, H, W]
    lse: Tensor,
    tensors: list[Tensor],
    numbers: list[int],
    memory_budget: int,
) -> tuple[Tensor, Tensor]:  # [B, Nq, H, d], keys and values [2, B, Nk, H, d]
    with torch.cuda.device_of(q):
        maps = PreparedPlan.unpack(tensors, numbers)
        return _backward_here(grad, q, k, v, attended, lse, maps, memory_budget, None)


def _backward_here(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Tensor,
    lse: Tensor,
    maps: PreparedPlan,
    memory_budget: int,
    of_tables: TableGradients | None,
) -> tuple[Tensor, Tensor]:
    grad, queries = grad[:, : maps.queries].transpose(1, 2), q[:, :, : maps.queries]
    grad_attended = grad.transpose(1, 2) if maps.plain_values else turn(grad, maps.back_t, maps.query_tables)
    turned = turn(queries, maps.turn, maps.query_tables)
    grad_turned, grad_keys_values = grouped_attention_backward(
        grad_attended, turned, k, v, attended, lse, maps, _scale(q), memory_budget, of_tables
    )
    grad_turned = grad_turned.transpose(1, 2)
    if of_tables is not None:
        learned, where = of_tables.learned, (maps.query_tables, 0, range(1))
        add_uses(grad_turned[:, None], queries, learned.turn, *where, out=of_tables.query)
        add_uses(grad[:, None], attended.transpose(1, 2), learned.back, *where, out=of_tables.query)
    return _with_rest(turn(grad_turned, maps.turn_t, maps.query_tables), q), grad_keys_values


@_backward.register_fake
def _(grad, q, k, v, attended, lse, tensors, numbers, memory_budget):  # type: ignore[no-untyped-def]
    return torch.empty_like(grad), k.new_empty((2, k.shape[0], k.shape[2], k.shape[1], k.shape[3]))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, tensors, ctx.numbers, ctx.memory_budget = inputs
    ctx.save_for_backward(q, k, v, *output[1:], *tensors)


def _gradients(ctx, grad, _attended, _lse):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    tensors = list(saved[5:])
    grad_q, keys_values = _backward(grad.contiguous(), *saved[:5], tensors, ctx.numbers, ctx.memory_budget)
    gradients = (x.transpose(1, 2) for x in (grad_q, *keys_values.unbind(0)))
    return *gradients, [None] * len(tensors), None, None


_forward.register_autograd(_gradients, setup_context=_save)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_learning(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, memory_budget: int) -> Tensor:
    """`_attend` with gradients of the plan's tables; outside of compiled graphs, where such plans are made."""
    learned, tables = learned_tables(plan)
    return _Learning.apply(q, k, v, prepared(plan, q.dtype), learned, memory_budget, *tables).transpose(1, 2)


class _Learning(torch.autograd.Function):
    """The two operators with gradients of tables. These go to the plan's own tables: flat ones may be float16."""

    @staticmethod
    def forward(ctx, q, k, v, maps, learned, memory_budget, *_tables):  # type: ignore[no-untyped-def]
        with torch.cuda.device_of(q):
            out, attended, lse = _forward_here(q, k, v, maps, memory_budget)
        # All through save_for_backward: activation checkpointing drops nothing else.
        tensors, ctx.numbers = maps.pack()
        ctx.save_for_backward(q, k, v, attended, lse, *tensors)
        ctx.learned, ctx.memory_budget = learned, memory_budget
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, attended, lse, *tensors = ctx.saved_tensors
        maps = PreparedPlan.unpack(tensors, ctx.numbers)
        with torch.cuda.device_of(q):
            of_tables = TableGradients.zeros(ctx.learned, q.device)
            grad_q, keys_values = _backward_here(
                grad.contiguous(), q, k, v, attended, lse, maps, ctx.memory_budget, of_tables
            )
        gradients = (x.transpose(1, 2) for x in (grad_q, *keys_values.unbind(0)))
        return *gradients, None, None, None, *of_tables.by_table()


def _with_rest(
    x: Tensor,  # [B, n, H, d]
    like: Tensor,  # [B, H, N, d]
) -> Tensor:  # [B, N, H, d]
    """x with rows of zeros for the tokens after those of the cameras."""
    rest = like.shape[2] - x.shape[1]
    return pad(x, (0, 0, 0, 0, 0, rest)) if rest else x


def _dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])
