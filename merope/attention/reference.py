"""The definition of correct: Eq. 1 of the paper, one query token at a time, with every U_ab written out."""

import math

import torch
from torch import Tensor

from merope.attention.plan import AttentionPlan


def attend_reference(
    q: Tensor,  # [B, H, Nq, d]
    k: Tensor,  # [B, H, Nk, d]
    v: Tensor,  # [B, H, Nk, d]
    plan: AttentionPlan,
) -> Tensor:  # [B, H, Nq, d]
    """s_ab = q_aᵀ U_ab k_b / √d, α = softmax_b(s), y_a = Σ_b α_ab U_ab v_b, over the keys b that a sees.

    Computed in float32, or in float64 for float64 input; the result has the dtype of q.

    Costs Nk·d² numbers and a Python step per (sample, head, query token): for tests and small examples.
    """
    batch, heads, _, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    plan = plan.for_heads(heads).to(dtype=compute)
    dtype = q.dtype
    q, k, v = (x.to(compute) for x in (q, k, v))
    samples = [
        torch.stack([_attend_head(q[b, h], k[b, h], v[b, h], plan, b, h) for h in range(heads)]) for b in range(batch)
    ]
    return torch.stack(samples).to(dtype)


def _attend_head(
    q: Tensor,  # [Nq, d]
    k: Tensor,  # [Nk, d]
    v: Tensor,  # [Nk, d]
    plan: AttentionPlan,
    batch: int,
    head: int,
) -> Tensor:  # [Nq, d]
    outputs = []
    for token, query in enumerate(q):
        u = plan.operators(token, batch, head)  # [Nk, d, d]
        logits = torch.einsum("i,bij,bj->b", query, u, k) / math.sqrt(q.shape[-1])
        values = torch.einsum("bij,bj->bi", u, v) if plan.transform_values else v
        seen = plan.seen_by(token)
        outputs.append(torch.softmax(logits[seen], dim=-1) @ values[seen])
    return torch.stack(outputs)
