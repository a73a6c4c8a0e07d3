"""The Hopper kernels over keys with a camera, merged with attention to keys without one.

Weights over some keys are softmax weights over all, times a factor: see `merope.attention.kernels.merged_parts`.
Backward, each part is given the merged output and log-sum-exp, and returns its share of the gradients. Rows of queries
without a camera are not meaningful, and are to be written over. Then gradients of these rows come in as zeros, and add
nothing to those of keys and values: the merged log-sum-exp is that of the same scores, so that weights are at most 1.
"""

import torch
from torch import Tensor

from merope.attention.kernels.grouped import grouped_attention_backward, grouped_attention_forward
from merope.attention.kernels.hopper import LARGEST, SCALE
from merope.attention.kernels.merged_parts import merge
from merope.attention.kernels.prepared import PreparedPlan
from merope.attention.kernels.transforms import turn


@torch.library.custom_op("merope::attend_hopper_parts", mutates_args=())
def attend_hopper_parts(
    q: Tensor,  # [B, H, Nq, 128]
    k: Tensor,  # [B, H, Nk, 128]
    v: Tensor,  # [B, H, Nk, 128]
    tables: list[Tensor],  # of a HopperTables, for the cameras' queries and keys with a camera
    order: Tensor,  # of a KeysApart
    tensors: list[Tensor],  # of a PreparedPlan, for the cameras' queries and all other keys
    numbers: list[int],
    cameras: int,  # query cameras
    queries: int,  # of the cameras
    with_camera: int,  # keys
    memory_budget: int,
) -> tuple[Tensor, Tensor]:  # [B, Nq, H, 128], float32 [B, H, queries]
    """Attention of the cameras' queries, token-major, and its log-sum-exp; rows of queries after them are zero."""
    with torch.cuda.device_of(q):
        own, (keys, rest), (values, rest_values) = q[:, :, :queries], *_apart((k, v), order, with_camera)
        part, lse = torch.ops.merope.attend_hopper(own, keys, values, tables, cameras)
        out = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], q.shape[3]))
        if rest.shape[2] == 0:
            out[:, :queries] = part
            return out, lse
        maps = PreparedPlan.unpack(tensors, numbers)
        turned = turn(own, maps.turn, maps.query_tables)
        given = (turned, rest, _saturated(rest_values), maps, SCALE, memory_budget)
        attended, rest_lse = grouped_attention_forward(*given)
        other = turn(attended.transpose(1, 2), maps.back, maps.query_tables)
        merged = torch.empty_like(lse)
        merge([x.transpose(1, 2) for x in (part, other)], [lse, rest_lse], out[:, :queries], merged)
        return out, merged


@attend_hopper_parts.register_fake
def _(q, k, v, tables, order, tensors, numbers, cameras, queries, with_camera, memory_budget):  # type: ignore[no-untyped-def]
    batch, heads, tokens, channels = q.shape
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    return q.new_empty((batch, tokens, heads, channels)), lse


@torch.library.custom_op("merope::attend_hopper_parts_backward", mutates_args=())
def _backward(
    grad: Tensor,  # [B, Nq, H, 128]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # [B, Nq, H, 128]
    lse: Tensor,  # [B, H, queries]
    tables: list[Tensor],
    order: Tensor,
    tensors: list[Tensor],
    numbers: list[int],
    cameras: int,
    with_camera: int,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, Nq, H, 128], [B, Nk, H, 128] twice
    with torch.cuda.device_of(q):
        queries = lse.shape[2]
        own, some_grad, some_out = q[:, :, :queries], grad[:, :queries], out[:, :queries]
        (keys, rest), (values, rest_values) = _apart((k, v), order, with_camera)
        rest_values = _saturated(rest_values)
        norms = None
        if rest.shape[2]:  # values that the output may hold: errors are scaled by the largest
            norms = torch.linalg.vector_norm(rest_values, dim=-1, dtype=torch.float32).amax(-1)
        shares = torch.ops.merope.attend_hopper_backward(
            some_grad, own, keys, values, some_out, lse, tables, cameras, norms
        )
        grad_q = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], q.shape[3]))
        if rest.shape[2] == 0:
            grad_q[:, :queries] = shares[0]
            return grad_q, shares[1], shares[2]
        maps = PreparedPlan.unpack(tensors, numbers)
        by_query = maps.query_tables
        turned, attended = (turn(x, maps.turn, by_query) for x in (own, some_out.transpose(1, 2)))
        grad_attended = turn(some_grad.transpose(1, 2), maps.back_t, by_query)
        given = (grad_attended, turned, rest, rest_values, attended, lse)
        grad_turned, of_rest = grouped_attention_backward(*given, maps, SCALE, memory_budget, None)
        torch.add(shares[0], turn(grad_turned.transpose(1, 2), maps.turn_t, by_query), out=grad_q[:, :queries])
        grad_k, grad_v = (_joined(pair, order) for pair in zip(shares[1:], of_rest, strict=True))
        return grad_q, grad_k, grad_v


@_backward.register_fake
def _(grad, q, k, v, out, lse, *_rest):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])) for x in (q, k, v))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, tables, order, tensors, ctx.numbers, ctx.cameras, _, ctx.with_camera, ctx.memory_budget = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.tables = len(tables)
    ctx.save_for_backward(q, k, v, *output, order, *tables, *tensors)


def _gradients(ctx, grad, _lse):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, order, *both = ctx.saved_tensors
    tables, tensors = both[: ctx.tables], both[ctx.tables :]
    given = (grad.contiguous(), q, k, v, out, lse, tables, order, tensors, ctx.numbers)
    gradients = _backward(*given, ctx.cameras, ctx.with_camera, ctx.memory_budget)
    of_numbers: list[None] | None = None if ctx.numbers else []  # PyTorch takes an empty list for one of tensors
    unlearned = ([None] * len(tables), None, [None] * len(tensors), of_numbers, *[None] * 4)
    return *(x.transpose(1, 2) for x in gradients), *unlearned


attend_hopper_parts.register_autograd(_gradients, setup_context=_save)


def _apart(
    both: tuple[Tensor, Tensor],  # [B, H, Nk, 128]
    order: Tensor,
    with_camera: int,
) -> list[tuple[Tensor, Tensor]]:
    """Keys, and values: those with a camera, and the rest; views where they lie in order."""
    ordered = [x.index_select(2, order) if order.numel() else x for x in both]
    return [(x[:, :, :with_camera], x[:, :, with_camera:]) for x in ordered]


def _joined(
    parts: tuple[Tensor, Tensor],  # each [B, n, H, 128]
    order: Tensor,
) -> Tensor:  # [B, Nk, H, 128]
    """The reverse of `_apart`, of one gradient."""
    joined = torch.cat(parts, dim=1)
    return torch.empty_like(joined).index_copy_(1, order, joined) if order.numel() else joined


def _saturated(values: Tensor) -> Tensor:
    """As the kernels' own values: the scale of their errors reaches no farther."""
    return values.clamp(-LARGEST, LARGEST)
