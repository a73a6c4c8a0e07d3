"""Wan's self-attention over a part of the clip: raw keys, and rotary phases of whole offsets when they are read."""

from collections.abc import Callable
from typing import Any, Self

import torch
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor

from merope.adapters.key_cache import KeyReader
from merope.adapters.stand_in import StandIn
from merope.adapters.wan_attention import out_layers, projected
from merope.attention.dispatch import attend
from merope.attention.operators import Operator, phasors
from merope.attention.plan import AttentionPlan, Block
from merope.attention.visible_cameras import Visibility, key_ranges
from merope.encodings.rotary import rotary_phases

ROTARY_BASE = 10000.0
"""Of every Wan: diffusers' transformer has no setting for it."""


class CausalRotary(tuple[Tensor, Tensor]):
    """Wan's rotary embedding (cos, sin) with the plan that causal self-attention follows in its place.

    reader: of a cache, for a block of a stream; None for a whole clip.
    """

    plan: AttentionPlan
    reader: KeyReader | None

    def __new__(cls, native: tuple[Tensor, Tensor], plan: AttentionPlan, reader: KeyReader | None = None) -> Self:
        rotary = super().__new__(cls, native)
        rotary.plan, rotary.reader = plan, reader
        return rotary

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What copies and pickles are made of; a tuple's own are its items alone."""
        return (self[0], self[1]), self.plan, self.reader

    def to(self, device: torch.device | str | None, **_: object) -> Self:
        """The same on another device."""
        return type(self)((self[0].to(device), self[1].to(device)), self.plan.to(device), self.reader)


class CausalAttention(StandIn):
    """An attention processor in the place of Wan's own (`base`), which still runs where nothing causal is asked for."""

    reason, way_back = "for a causal model", "call merope.detach_causal"

    def __init__(self, base: Callable[..., Tensor], layer: str) -> None:
        self.base: Any = base
        self.layer = layer

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,  # [B, N, width]
        encoder_hidden_states: None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # [B, N, width]
        """What diffusers calls."""
        causal = getattr(rotary_emb, "native", rotary_emb)  # cameras may be around it, in blocks without a branch too
        if not isinstance(causal, CausalRotary):
            return self.base(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        q, k, v = projected(attn, hidden_states)
        if causal.reader is not None:
            attended = causal.reader.attended(self.layer, q, k, v, causal.plan)
        else:
            attended = attend(q, k, v, causal.plan)
        return out_layers(attn, attended.transpose(1, 2).flatten(2))


def rotary_plan(
    rope: Any,  # Wan's rotary embedding
    grid: tuple[int, int],  # token rows, columns of a latent frame
    times: Tensor,  # [B or 1, V] latent frames
    key_times: Tensor,  # [B or 1, K]
    sees: Visibility | None = None,
) -> AttentionPlan:
    """Wan's rotary embedding as a plan, at any times: phases are computed in float64, not read from its table."""
    frames, tokens = times.shape[-1], grid[0] * grid[1]

    def operator(of_frames: Tensor, sign: int) -> Operator:
        phases = rotary_phases(_positions(of_frames, grid), (rope.t_dim, rope.h_dim, rope.w_dim), ROTARY_BASE)
        return Operator(phasors(sign * phases)[:, None, None], "phasor")

    channels = rope.t_dim + rope.h_dim + rope.w_dim
    keys = key_times.shape[-1]
    return AttentionPlan(
        head_dim=channels,
        blocks=(Block("native", 0, channels, operator(times, -1), operator(key_times, 1), camera=False),),
        query_cameras=frames,
        tokens_per_camera=tokens,
        query_has_camera=torch.ones(1, frames * tokens, dtype=torch.bool, device=times.device),
        key_has_camera=torch.ones(1, keys * tokens, dtype=torch.bool, device=times.device),
        transform_values=False,
        visible_keys=None if sees is None else key_ranges(sees, frames, keys, tokens, 0, 0),
    )


def _positions(
    times: Tensor,  # [B or 1, V] float64
    grid: tuple[int, int],
) -> Tensor:  # [B or 1, V · rows · columns, 3] time, row, column
    axes = [torch.arange(size, dtype=times.dtype, device=times.device) for size in grid]
    shape = (*times.shape, *grid)
    time, row, column = times[..., None, None], axes[0][:, None], axes[1]
    return torch.stack([x.expand(shape) for x in (time, row, column)], dim=-1).flatten(1, 3)
