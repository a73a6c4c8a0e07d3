"""RayPE's way: Plücker coordinates added to queries and keys, flipped so that their score is the reciprocal product."""

from typing import Any

import torch
from torch import Tensor, nn

from merope.adapters.camera_attention import NORM_EPS
from merope.adapters.conditioning import Carrier
from merope.adapters.rerope import rotated
from merope.adapters.told_processor import BlockSizes, ToldProcessor, applied, zero_linear
from merope.adapters.wan_attention import attended, by_head
from merope.encodings.additive import AdditiveFeatures

GATE_CHANNELS = 16


class RayPEAttention(ToldProcessor):
    """Wan's self-attention with q + g e and k + g e': e = norm(W (d, m̂)), e' = norm(W' (m̂, d)), g = gate(log ‖m‖).

    A reconstruction of Yin et al. 2026 (2606.27345) from its abstract: we found no code. From there: coordinates added
    to queries and keys, keys flipped, direction and length of the moment apart, a learned gate of the log-length, an
    RMS norm, a start at the pretrained weights. Ours: W and W' start as (d, m̂) and (m̂, d) tiled over every head, so
    that e·e' ∝ d_a·m̂_b + m̂_a·d_b; the gate has one hidden layer of 16, a number per head, is shared by queries and
    keys, and is zero at first; both are added after the norms and the rotary embedding of the block.
    """

    def __init__(self, sizes: BlockSizes, features: AdditiveFeatures) -> None:
        super().__init__(sizes, features)
        self.cam_query, self.cam_key = (_tiled(sizes) for _ in range(2))
        self.cam_norm_q, self.cam_norm_k = (nn.RMSNorm(sizes.width, eps=NORM_EPS) for _ in range(2))
        self.cam_gate = nn.Sequential(nn.Linear(1, GATE_CHANNELS), nn.SiLU(), zero_linear(GATE_CHANNELS, sizes.heads))

    def output(self, attn: Any, hidden: Tensor, cameras: Carrier, *args: Any, **kwargs: Any) -> Tensor:
        features = cameras.condition.features
        assert cameras.native is not None
        assert features is not None
        q, k, v = by_head(attn, hidden, hidden, hidden)
        of_query, of_key = self.added(features, q.dtype)
        q, k = rotated(q, *cameras.native) + of_query, rotated(k, *cameras.native) + of_key
        return attended(attn, q, k, v, args, self._attention_backend)

    def added(
        self,
        features: Tensor,  # [B or 1, N, 7]
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # [B or 1, N, heads, head_dim] each
        """What is added to queries and to keys."""
        direction, moment, log_length = features.split((3, 3, 1), dim=-1)
        gate = applied(self.cam_gate, log_length, dtype)[..., None]
        sides = (
            (self.cam_query, self.cam_norm_q, torch.cat((direction, moment), dim=-1)),
            (self.cam_key, self.cam_norm_k, torch.cat((moment, direction), dim=-1)),
        )
        of_query, of_key = (
            gate * applied(norm, applied(layer, ray, dtype), dtype).unflatten(-1, (gate.shape[-2], -1))
            for layer, norm, ray in sides
        )
        return of_query, of_key


def _tiled(sizes: BlockSizes) -> nn.Linear:
    """Six coordinates copied to all whole groups of six channels of every head."""
    layer = nn.Linear(6, sizes.width, bias=False)
    channel = torch.arange(sizes.width, device=layer.weight.device) % (sizes.width // sizes.heads)
    whole = channel < sizes.width // sizes.heads // 6 * 6
    tiles = nn.functional.one_hot(channel % 6, 6) * whole[:, None]
    with torch.no_grad():
        layer.weight.copy_(tiles)
    return layer
