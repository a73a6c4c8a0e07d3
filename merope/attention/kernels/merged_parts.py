# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, no-untyped-call"
"""Attention of the queries of one group that see different keys: every interval by itself, no copy of keys.

Weights over one interval are softmax weights over all that is seen, times a factor: out = Σ exp(lse_i − lse) out_i. So
the parts are merged by their log-sum-exp. Backward, a call that is given the merged out and lse has the weights of all
that is seen, and returns its share of every gradient: those of queries are added up, those of keys belong to its own
interval.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from merope.attention.kernels.interval_calls import Call, held_together, interval_calls
from merope.attention.kernels.softmax_attention import attention_backward, attention_forward
from merope.attention.visible_cameras import Run

QUERIES_PER_PROGRAM = 32

Collect = Callable[[Sequence[Call], Sequence[tuple[Tensor, Tensor]]], None]
"""Takes some calls, and the gradients of keys and of values [pairs, H, the call's keys, W] of each."""


def attend_in_parts(
    q: Tensor,  # [pairs, H, P, W]
    keys: Tensor,  # [pairs, H, Nk, W]
    values: Tensor,
    runs: Sequence[Run],
    scale: float,
    out: Tensor,  # [pairs, P, H, W] to write to
    lse: Tensor,  # float32 [pairs, H, P] to write to
) -> None:
    """Attended values and log-sum-exp of queries that see the keys of their run."""
    calls = interval_calls(runs)
    parts = [
        attention_forward(q[:, :, call.queries], keys[:, :, call.keys], values[:, :, call.keys], scale)
        for call in calls
    ]
    for run in runs:
        own = [(call.of(run), part) for call, part in zip(calls, parts, strict=True) if call.serves(run)]
        merge(
            [part[0][:, :, place] for place, part in own],
            [part[1][:, :, place] for place, part in own],
            out[:, run.queries],
            lse[:, :, run.queries],
        )


def gradients_in_parts(
    grad: Tensor,  # [pairs, H, P, W]
    q: Tensor,
    keys: Tensor,  # [pairs, H, Nk, W]
    values: Tensor,
    out: Tensor,  # [pairs, H, P, W]
    lse: Tensor,  # [pairs, H, P]
    runs: Sequence[Run],
    scale: float,
    grad_q: Tensor,  # [pairs, H, P, W] to write to
    collect: Collect,
) -> None:
    """Gradients of queries are written, those of keys and values go to `collect` as soon as they are there."""
    calls = interval_calls(runs)
    of_queries: list[Tensor] = []
    for batch in held_together(calls, keys.shape[2]):
        of_keys = []
        for call in batch:
            own_grad, own_q, own_out, own_lse = (x[:, :, call.queries] for x in (grad, q, out, lse))
            seen_keys, seen_values = (x[:, :, call.keys] for x in (keys, values))
            own_lse = own_lse.contiguous()  # cuDNN does not heed its strides
            some = attention_backward(own_grad, own_q, seen_keys, seen_values, own_out, own_lse, scale)
            of_queries.append(some[0])
            of_keys.append(some[1:])
        collect(batch, of_keys)
        del of_keys, some  # before those of the next calls
    for run in runs:
        parts = [x[:, :, call.of(run)] for call, x in zip(calls, of_queries, strict=True) if call.serves(run)]
        _write_sum(parts, grad_q[:, :, run.queries])


def _write_sum(parts: Sequence[Tensor], out: Tensor) -> None:
    """Rounded once."""
    total = parts[0]
    for part in parts[1:-1]:
        total = total.float() + part
    if len(parts) == 1:
        out.copy_(total)
    else:
        torch.add(total, parts[-1], out=out)


def merge(
    parts: Sequence[Tensor],  # each [B, H, N, W], last dimension dense
    part_lse: Sequence[Tensor],  # each float32 [B, H, N]
    out: Tensor,  # [B, N, H, W] to write to
    lse: Tensor,  # float32 [B, H, N] to write to
) -> None:
    """Attention over all keys from attention over intervals of them."""
    batch, queries, heads, width = out.shape
    _merge[(triton.cdiv(queries, QUERIES_PER_PROGRAM), heads, batch)](
        *(tuple(parts), tuple(part_lse), out, lse, queries),
        *(tuple(x.stride(dim) for x in parts) for dim in range(3)),
        *(tuple(x.stride(dim) for x in part_lse) for dim in range(3)),
        *(*out.stride()[:3], *lse.stride()),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        QUERIES=QUERIES_PER_PROGRAM,
    )


@triton.jit(do_not_specialize=("queries",), do_not_specialize_on_alignment=("lse",))
def _merge(
    parts, part_lse, out, lse, queries,
    part_batch, part_head, part_token, part_lse_batch, part_lse_head, part_lse_token,
    out_batch, out_token, out_head, lse_batch, lse_head, lse_token,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Some queries of one head: tensors are [QUERIES, PADDED]."""
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    query = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    inside = query < queries
    channel = tl.arange(0, PADDED)[None, :]
    keep = inside[:, None] & (channel < WIDTH)
    held, largest = (), tl.full((QUERIES,), float("-inf"), tl.float32)
    for part in tl.static_range(len(parts)):
        at = batch * part_lse_batch[part] + head * part_lse_head[part] + query * part_lse_token[part]
        held += (tl.load(part_lse[part] + at, mask=inside, other=0.0),)
        largest = tl.maximum(largest, held[part])
    sums = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, PADDED), tl.float32)
    for part in tl.static_range(len(parts)):
        weight = tl.exp(held[part] - largest)
        at = (batch * part_batch[part] + head * part_head[part] + query * part_token[part])[:, None] + channel
        total += weight[:, None] * tl.load(parts[part] + at, mask=keep, other=0.0).to(tl.float32)
        sums += weight
    total = total / sums[:, None]
    write = out + (batch * out_batch + head * out_head + query * out_token)[:, None] + channel
    tl.store(write, total.to(out.dtype.element_ty), mask=keep)
    at = batch * lse_batch + head * lse_head + query * lse_token
    tl.store(lse + at, largest + tl.log(sums), mask=inside)
