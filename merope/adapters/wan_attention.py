"""Wan's self-attention, step by step, for ways of telling it its cameras that stand inside."""

from typing import Any

from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor


def by_head(
    attn: Any,
    query_input: Tensor,  # [B, N, width]
    key_input: Tensor,
    value_input: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, N, heads, head_dim] each
    """Queries, keys and values of a block as its layers and norms make them, not rotated yet."""
    query, key = attn.norm_q(attn.to_q(query_input)), attn.norm_k(attn.to_k(key_input))
    q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(value_input)))
    return q, k, v


def projected(
    attn: Any,
    hidden: Tensor,  # [B, N, width]
) -> tuple[Tensor, Tensor, Tensor]:  # [B, heads, N, head_dim] each
    """Queries, keys and values of a self-attention of Wan, not rotated."""
    if getattr(attn, "fused_projections", False):
        q, k, v = attn.to_qkv(hidden).chunk(3, dim=-1)
    else:
        q, k, v = attn.to_q(hidden), attn.to_k(hidden), attn.to_v(hidden)
    q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)  # under autocast norms answer in float32
    q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (q, k, v))
    return q, k, v


def attended(
    attn: Any,
    q: Tensor,  # [B, N, heads, head_dim]
    k: Tensor,
    v: Tensor,
    args: tuple[Any, ...],  # of Wan's processor behind the input: text, mask, rotary embedding
    backend: Any,
) -> Tensor:  # [B, N, width]
    """Attention and its output layers."""
    _, mask, _ = args
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)
    return out_layers(attn, out.flatten(2).type_as(q))


def out_layers(attn: Any, x: Tensor) -> Tensor:  # [B, N, width]
    """What comes behind the attention: a linear layer, and dropout."""
    for layer in attn.to_out:
        x = layer(x)
    return x
