"""Keys and values as the cameras of a block see them, kept for all its denoising steps.

Neither the frames of a cache nor the cameras of a block change between the steps of the block. So the keys of the cache
are turned once, in the first step, and each step turns those of the block alone. This takes memory, as much as the
turned keys of all layers, until the block is done. Fused kernels turn keys while they attend: there is nothing to keep.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from merope.attention.plan import AttentionPlan
from merope.attention.sdpa import by_block


def can_keep(q: Tensor, plan: AttentionPlan) -> bool:
    """Whether turned keys give the numbers of `attend`: on a CPU, without gradients, every token with a camera."""
    all_posed = plan.cameraless_queries.numel() == 0 and not plan.has_cameraless_keys
    is_plain = plan.visible_keys is None and not plan.clamps_lengths
    return not q.is_cuda and not torch.is_grad_enabled() and is_plain and all_posed


class TurnedKeys:
    """Those of every layer that has attended, by its name."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}  # [B, H, groups, past + n, d] each

    def has(self, layer: str) -> bool:
        return layer in self._layers

    def keep(self, layer: str, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:  # [B, H, past + n, d]
        """Turn all keys of a layer, those of the cache and behind them the block's."""
        every = slice(None)
        values = _turned(v, plan, every) if plan.transform_values else v[:, :, None].clone()
        self._layers[layer] = _turned(k, plan, every), values

    def replace_last(self, layer: str, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:  # [B, H, n, d]
        """Turn the keys of another step of the block."""
        keys, values = self._layers[layer]
        own = slice(keys.shape[3] - k.shape[2], None)
        keys[:, :, :, own] = _turned(k, plan, own)
        values[:, :, :, own] = _turned(v, plan, own) if plan.transform_values else v[:, :, None]

    def attend(self, layer: str, q: Tensor, plan: AttentionPlan) -> Tensor:  # [B, H, n, d] -> [B, H, n, d]
        """`merope.attend` with the kept keys."""
        keys, values = self._layers[layer]
        groups, blocks = keys.shape[2], plan.for_heads(q.shape[1]).blocks
        turned = by_block(q[:, :, None], blocks, lambda block, x: block.of_query(x, transpose=True)).squeeze(2)
        out = scaled_dot_product_attention(
            turned.unflatten(2, (groups, -1)).flatten(1, 2),
            keys.flatten(1, 2),
            values.expand_as(keys).flatten(1, 2),
            scale=1 / math.sqrt(plan.head_dim),
        )
        out = out.unflatten(1, (-1, groups)).flatten(2, 3)
        if not plan.transform_values:
            return out
        return by_block(out[:, :, None], blocks, lambda block, x: block.of_query(x)).squeeze(2)


def _turned(x: Tensor, plan: AttentionPlan, tokens: slice) -> Tensor:  # [B, H, n, d] -> [B, H, groups, n, d]
    """Keys or values of these tokens of the plan, for each query camera where they differ."""
    plan = plan.for_heads(x.shape[1])
    out = x[:, :, None].expand(-1, -1, plan.groups, -1, -1).clone()
    for block in plan.blocks:
        out[..., block.channels] = block.key.of_tokens(tokens).apply(out[..., block.channels])
    return out
