"""RoCE's way: cameras shift the phases of the block's own rotary embedding (ReDirector, Park et al. 2025)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from merope.adapters.conditioning import Carrier
from merope.adapters.rerope import rotated
from merope.adapters.told_processor import BlockSizes, ToldProcessor, applied, zero_linear
from merope.adapters.wan_attention import attended, by_head
from merope.encodings.additive import AdditiveFeatures
from merope.encodings.rotary import wan_bands


class RoCEAttention(ToldProcessor):
    """Wan's self-attention with phases φ = A·silu(c) and ψ = B·silu(c) of every token and head, A and B zero at first.

    Queries and keys are turned by φ besides their native phases, so that scores see φ_b − φ_a. Values are turned by −ψ,
    the block's output by +ψ. Both act on the row and column bands, never on time. All of it is orthogonal.

    So does ReDirector's released code, which turns the output behind the output layer. There c comes from the camera
    adapter of a pretrained model, which adds it to the tokens, too. Ours has an embedding c = E·features in every
    block, width / C wide, and adds it to nothing.
    """

    def __init__(self, sizes: BlockSizes, features: AdditiveFeatures) -> None:
        super().__init__(sizes, features)
        self.heads = sizes.heads
        time, row, column = wan_bands(sizes.width // sizes.heads)
        self.time_pairs = time // 2
        pairs = sizes.heads * (row + column) // 2
        self.cam_embed = nn.Linear(features.channels, sizes.narrow)
        self.cam_phase_qk = zero_linear(sizes.narrow, pairs, bias=False)
        self.cam_phase_vo = zero_linear(sizes.narrow, pairs, bias=False)

    def output(self, attn: Any, hidden: Tensor, cameras: Carrier, *args: Any, **kwargs: Any) -> Tensor:
        features = cameras.condition.features
        assert cameras.native is not None
        assert features is not None
        camera = silu(applied(self.cam_embed, features, features.dtype))
        of_scores, of_values = self._phases(self.cam_phase_qk, camera), self._phases(self.cam_phase_vo, camera)
        q, k, v = by_head(attn, hidden, hidden, hidden)
        q, k = (turned(rotated(x, *cameras.native), of_scores) for x in (q, k))
        out = attended(attn, q, k, turned(v, -of_values), args, self._attention_backend)
        return turned(out.unflatten(2, (self.heads, -1)), of_values).flatten(2)

    def _phases(self, layer: nn.Linear, camera: Tensor) -> Tensor:  # [B or 1, N, heads, head_dim / 2] radians
        """Phases of all pairs of every head, 0 for those of time."""
        spatial = applied(layer, camera, torch.promote_types(camera.dtype, torch.float32))
        return pad(spatial.unflatten(-1, (self.heads, -1)), (self.time_pairs, 0))


def turned(
    x: Tensor,  # [B, N, heads, head_dim]
    phases_rad: Tensor,  # [B or 1, N, heads, head_dim / 2]
) -> Tensor:  # [B, N, heads, head_dim]
    """Adjacent pairs turned by their phases."""
    twice = phases_rad.repeat_interleave(2, dim=-1)
    return rotated(x, twice.cos(), twice.sin())
