"""A camera attention block without avoidable copies: one projection for q, k and v, attention, output projection."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from merope.attention.dispatch import Backend, attend
from merope.attention.plan import AttentionPlan
from merope.errors import invalid


def attention_block(
    x: Tensor,  # [B, N, C]
    qkv_weight: Tensor,  # [3 · H · d, C], rows of q, then k, then v
    qkv_bias: Tensor | None,  # [3 · H · d]
    out_weight: Tensor,  # [C', H · d]
    out_bias: Tensor | None,  # [C']
    plan: AttentionPlan,
    backend: Backend = "auto",
    memory_budget: int = 2**30,  # bytes
) -> Tensor:  # [B, N, C']
    """Self-attention of tokens x under a plan, projections included.

    q, k and v are views of one product; the fused backend reads them where they lie and returns its result laid out for
    the output projection, so that no transposed copy is made.
    """
    rows = qkv_weight.shape[0]
    if rows % (3 * plan.head_dim):
        fix = "stack the weights of q, k and v: torch.cat((to_q.weight, to_k.weight, to_v.weight))"
        raise invalid("qkv_weight", f"of 3 · heads · {plan.head_dim} rows", list(qkv_weight.shape), fix)
    q, k, v = project_qkv(x, qkv_weight, qkv_bias, plan.head_dim)
    out = attend(q, k, v, plan, backend, memory_budget)
    del q, k, v
    return linear(out.transpose(1, 2).flatten(2), out_weight, out_bias)


def project_qkv(
    x: Tensor,  # [B, N, C]
    weight: Tensor,  # [3 · H · d, C]
    bias: Tensor | None,
    head_dim: int,
) -> tuple[Tensor, ...]:  # three views [B, H, N, d]
    """q, k and v of one matrix product."""
    heads = weight.shape[0] // (3 * head_dim)
    qkv = linear(x, weight, bias).unflatten(-1, (3, heads, head_dim))
    return torch.unbind(qkv.permute(2, 0, 3, 1, 4))
