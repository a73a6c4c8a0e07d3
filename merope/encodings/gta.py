"""GTA: homogeneous relative poses tiled over half of the head (Miyato et al. 2024; paper, Eq. 2).

The camera block is not orthogonal: logits and values grow with the metres between two cameras (paper, Eq. 3 and 4).
"""

from dataclasses import dataclass

import torch

from merope.attention.operators import Operator
from merope.attention.plan import Block
from merope.encodings.protocol import Encoding
from merope.encodings.rotary import axis_block
from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.poses import inverse, rigid


@dataclass(frozen=True)
class GTA(Encoding):
    """U = T_i⁻¹ T_j on the first half of the head, rotary phases over columns and rows on the last two quarters.

    translation_scale multiplies all translations, once for a whole data set (this method needs its numbers near 1).
    rope_base: base of the rotary frequencies. There is no time axis: `times` have no effect.
    """

    translation_scale: float = 1.0
    rope_base: float = 100.0

    def __post_init__(self) -> None:
        if self.head_dim <= 0 or self.head_dim % 8:
            fix = f"the nearest is {max(8, round(self.head_dim / 8) * 8)}"
            raise invalid("head_dim", "a multiple of 8", self.head_dim, fix)

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """Camera, column and row blocks."""
        half, quarter = self.head_dim // 2, self.head_dim // 4
        return (
            Block("camera", 0, half, self._poses(query, is_query=True), self._poses(key, is_query=False), camera=True),
            axis_block("column", half, quarter, query, key, self.rope_base),
            axis_block("row", half + quarter, quarter, query, key, self.rope_base),
        )

    def _poses(self, tokens: Tokens, is_query: bool) -> Operator:
        """T⁻¹ of every query token's camera, T of every key token's."""
        poses = tokens.origin_from_camera
        scaled = rigid(poses[..., :3, :3], self.translation_scale * poses[..., :3, 3])
        per_patch = (inverse(scaled) if is_query else scaled)[:, :, None].expand(-1, -1, tokens.patches, -1, -1)
        table = tokens.per_token(per_patch, torch.eye(4), entry_dims=2).to(tokens.dtype)
        return Operator(table[:, None, None, :, None], "matrix")
