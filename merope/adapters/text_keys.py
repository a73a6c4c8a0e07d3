"""Keys and values of a text, which every block of a stream and every denoising step would make again."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor

from merope.adapters.stand_in import StandIn
from merope.adapters.wan_attention import out_layers

KEPT = "_merope_text_keys"
"""Where an embedded text on its way to the layers carries what they keep."""


class TextKeys:
    """What the layers of a causal model made of one text; of another one they make it anew."""

    def __init__(self) -> None:
        self._text: Tensor | None = None
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, text: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of this very tensor, by the number of the layer."""
        if text is not self._text:
            self._text, self._layers = text, {}
        return self._layers


class TextAttention(StandIn):
    """Wan's cross-attention to a text whose keys are kept; in all other cases that of `base`."""

    reason, way_back = "for a causal model", "call merope.detach_causal"

    def __init__(self, base: Any, number: int) -> None:
        self.base = base
        self.number = number

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,  # [B, N, width]
        encoder_hidden_states: Tensor | None = None,  # [B, L, width]
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # [B, N, width]
        """What diffusers calls."""
        kept = None if torch.compiler.is_compiling() else getattr(encoder_hidden_states, KEPT, None)
        is_plain = attn.add_k_proj is None and not getattr(attn, "fused_projections", False)
        if kept is None or not is_plain or torch.is_grad_enabled():
            return self.base(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        if self.number not in kept:
            k, v = attn.norm_k(attn.to_k(encoder_hidden_states)), attn.to_v(encoder_hidden_states)
            kept[self.number] = k.unflatten(2, (attn.heads, -1)), v.unflatten(2, (attn.heads, -1))
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        attended = dispatch_attention_fn(q, *kept[self.number], backend=self._attention_backend)
        return out_layers(attn, attended.flatten(2, 3).type_as(q))
