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

    Costs Nk·d² numbers and a Python step per (sample, query token, head): for tests and small examples.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    plan = plan.for_heads(q.shape[1]).to(dtype=compute)
    dtype = q.dtype
    q, k, v = (x.to(compute) for x in (q, k, v))
    return torch.stack([_attend_sample(q[b], k[b], v[b], plan, b) for b in range(len(q))]).to(dtype)


def _attend_sample(
    q: Tensor,  # [H, Nq, d]
    k: Tensor,  # [H, Nk, d]
    v: Tensor,  # [H, Nk, d]
    plan: AttentionPlan,
    batch: int,
) -> Tensor:  # [H, Nq, d]
    outputs = []
    for token in range(plan.query_tokens):
        seen = plan.seen_by(token)
        for head in range(len(q)):
            if head == 0 or plan.head_groups > 1:
                u = plan.operators(token, batch, head)  # [Nk, d, d]
            logits = torch.einsum("i,bij,bj->b", q[head, token], u, k[head]) / math.sqrt(q.shape[-1])
            values = torch.einsum("bij,bj->bi", u, v[head]) if plan.transform_values else v[head]
            outputs.append(torch.softmax(logits[seen], dim=-1) @ values[seen])
    return torch.stack(outputs).unflatten(0, (-1, len(q))).transpose(0, 1)
