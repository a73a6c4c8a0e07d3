"""Lengths that operators may not exceed: what O and K make longer is scaled back to the length it had before.

SANA-WM (2605.15178) tames UCPE so: q̃ = Oᵀq, k̃ = K k and ṽ = K v, each as a whole head of a token, are divided by how
much their root mean square grew. A number per token and head commutes with O and K, so it can be taken off before:
Oᵀ(c q) = c Oᵀq. Then every backend attends as if nothing had happened. O on the output is not clamped.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from merope.attention.plan import AttentionPlan, Block

MEAN_SQUARE_FLOOR = 1e-6
"""Added to mean squares, as in the released code."""


def with_clamped_lengths(
    q: Tensor,  # [B, H, Nq, d]
    k: Tensor,  # [B, H, Nk, d]
    v: Tensor,  # [B, H, Nk, d]
    plan: AttentionPlan,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values that the plan's camera blocks make no longer than q, k and v are."""
    plan = plan.for_heads(q.shape[1])

    def of_key(block: Block, x: Tensor) -> Tensor:
        return block.key.apply(x)

    values = _clamped(v, plan, of_key) if plan.transform_values else v
    queries = _clamped(q, plan, lambda block, x: block.of_query(x, transpose=True))
    return queries, _clamped(k, plan, of_key), values


def _clamped(x: Tensor, plan: AttentionPlan, turned: Callable[[Block, Tensor], Tensor]) -> Tensor:  # [B, H, N, d]
    """x · min(1, rms before / rms after); blocks that are not about cameras turn pairs and keep lengths."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))[:, :, None]  # as operators want it: one group
    before = after = exact.square().sum(-1, keepdim=True)
    for block in plan.camera_blocks:
        part = exact[..., block.channels]
        change = turned(block, part).square().sum(-1, keepdim=True) - part.square().sum(-1, keepdim=True)
        after = after + change
    width = x.shape[-1]
    ratio = (before / width + MEAN_SQUARE_FLOOR) / (after.clamp_min(0) / width + MEAN_SQUARE_FLOOR)
    return (exact * ratio.clamp(max=1).sqrt()).squeeze(2).to(x.dtype)
