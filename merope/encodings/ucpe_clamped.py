"""UCPE as SANA-WM has it: lengths clamped to what they were, rotary phases of time, row and column (2605.15178)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from merope.attention.plan import Block
from merope.encodings.gta import homogeneous_block, scaled_poses
from merope.encodings.rotary import phase_block, rotary_frequencies, wan_bands
from merope.encodings.tokens import Tokens
from merope.encodings.ucpe import UCPE
from merope.geometry.poses import inverse


@dataclass(frozen=True)
class UCPEClamped(UCPE):
    """UCPE's U on the first half of the head, whose growth `attend` takes off again; Wan's phases on the second half.

    q̃ = Oᵀq, k̃ = K k and ṽ = K v are scaled back to the root mean square of q, k and v wherever they exceed it. So no
    logit exceeds ‖q‖ ‖k‖ / √d, at any baseline. The output O Σ α ṽ is not clamped: it still grows with the metres
    between the query's camera and the origin.

    How much is taken off depends on the world frame, although U does not: pass poses in the frame the model was trained
    with. A camera branch takes that of the clip's first camera. A token's factor is its own, so that tokens without a
    camera see it too.

    rope_base: base of the phases. Each axis has the fastest frequencies of its band in a head of Wan, as in the
        released code: of 128 channels 64 are left, with 12, 10 and 10 pairs for time, row and column.
    ray_offset: (0, 0) is what the released code does; the default, the centre of the patch, is ours.
    """

    in_world: ClassVar[bool] = True
    clamps_lengths: ClassVar[bool] = True

    rope_base: float = 10000.0

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """Camera and position blocks: O = D, K = D⁻¹ as in UCPE."""
        query_matrices, key_matrices = inverse(self._origin_from_ray(query)), self._origin_from_ray(key)
        half = self.head_dim // 2
        return (
            homogeneous_block(half, query, query_matrices, key, key_matrices),
            phase_block("position", half, query, key, self._phases),
        )

    def _poses(self, tokens: Tokens) -> Tensor:  # [B, V, 4, 4]
        return scaled_poses(tokens.world_from_camera, self.translation_scale)

    def _phases(self, tokens: Tokens) -> Tensor:  # [B, N, head_dim / 4]
        """Phases of time, row and column, with the first frequencies of Wan's bands of the whole head."""
        time, column, row = tokens.positions.unbind(-1)
        bands, kept = wan_bands(self.head_dim), wan_bands(self.head_dim // 2)
        per_axis = [
            position[..., None] * rotary_frequencies(band, self.rope_base, position.device)[: count // 2]
            for position, band, count in zip((time, row, column), bands, kept, strict=True)
        ]
        return torch.cat(per_axis, dim=-1)
