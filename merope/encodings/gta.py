"""GTA: homogeneous relative poses tiled over half of the head (Miyato et al. 2024; paper, Eq. 2).

The camera block is not orthogonal: logits and values grow with the metres between two cameras (paper, Eq. 3 and 4).
Its 4×4 blocks and its layout are shared with CaPE, PRoPE and UCPE, which differ in the matrices alone.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from merope.attention.operators import Operator
from merope.attention.plan import Block
from merope.encodings.protocol import Encoding
from merope.encodings.rotary import axis_block, check_head_dim, check_positive, phase_block
from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.poses import inverse, rigid


@dataclass(frozen=True)
class HalfCameraEncoding(Encoding):
    """What GTA, PRoPE and UCPE share: 4×4 matrices on one half of the head, rotary phases on the other."""

    translation_scale: float = 1.0
    rope_base: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_dim(self.head_dim, 8)
        if not 0 <= self.translation_scale < math.inf:  # 0 is rotation alone
            fix = "fit it with merope.encodings.scale.translation_scale"
            raise invalid("translation_scale", "finite and at least 0", self.translation_scale, fix)
        check_positive("rope_base", self.rope_base)


@dataclass(frozen=True)
class GTA(HalfCameraEncoding):
    """U = T_i⁻¹ T_j on the first half of the head, phases of columns and rows on the second.

    translation_scale multiplies all translations, once for a whole data set (this method needs its numbers near 1);
        `merope.encodings.scale.translation_scale` fits it. It is the learned scalar of the original code.
    rope_base: base of the rotary frequencies. There is no time axis: `times` have no effect.
    image_plane: "rope" is the layout of PRoPE's code, the one that later work compares with; "so2" that of the original
        code (`so2_block`), for which `rope_base` has no effect.
    """

    image_plane: Literal["rope", "so2"] = "rope"

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """Camera, column and row blocks; camera and SO(2) blocks with image_plane "so2"."""
        query_matrices = inverse(scaled_poses(query.origin_from_camera, self.translation_scale))[:, :, None]
        key_matrices = scaled_poses(key.origin_from_camera, self.translation_scale)[:, :, None]
        if self.image_plane == "rope":
            return half_camera_blocks(self.head_dim, self.rope_base, query, query_matrices, key, key_matrices)
        half = self.head_dim // 2
        camera = homogeneous_block(half, query, query_matrices, key, key_matrices)
        return camera, so2_block(half, half, query, key)


def scaled_poses(
    poses: Tensor,  # [B, V, 4, 4]
    translation_scale: float,
) -> Tensor:  # [B, V, 4, 4]
    """Poses with their translations multiplied by the scale."""
    return rigid(poses[..., :3, :3], translation_scale * poses[..., :3, 3])


def homogeneous_block(
    channels: int,
    query: Tokens,
    query_matrices: Tensor,  # [B, Vq, P or 1, 4, 4]
    key: Tokens,
    key_matrices: Tensor,  # [B, Vk, P or 1, 4, 4]
) -> Block:
    """U = (query matrix) · (key matrix) on every group of 4 of the first channels."""

    def operator(tokens: Tokens, matrices: Tensor) -> Operator:
        per_patch = matrices.expand(-1, -1, tokens.patches, -1, -1)
        table = tokens.per_token(per_patch, torch.eye(4), entry_dims=2).to(tokens.dtype)
        return Operator(table[:, None, None, :, None], "matrix")

    return Block("camera", 0, channels, operator(query, query_matrices), operator(key, key_matrices), camera=True)


def half_camera_blocks(
    head_dim: int,
    rope_base: float,
    query: Tokens,
    query_matrices: Tensor,  # [B, Vq, P or 1, 4, 4]
    key: Tokens,
    key_matrices: Tensor,  # [B, Vk, P or 1, 4, 4]
) -> tuple[Block, Block, Block]:
    """PRoPE's layout of a head: half for 4×4 camera matrices, a quarter each for the token's column and row."""
    half, quarter = head_dim // 2, head_dim // 4
    return (
        homogeneous_block(half, query, query_matrices, key, key_matrices),
        axis_block("column", half, quarter, query, key, rope_base),
        axis_block("row", half + quarter, quarter, query, key, rope_base),
    )


def so2_block(start: int, channels: int, query: Tokens, key: Tokens) -> Block:
    """The image plane of the original GTA: Rot(2π f_m · (key − query)), f_m = 2^(m−n) for m = 1 … n = channels / 4.

    Coordinates are row / rows and column / columns, in [0, 1) on each side's own grid. Frequency-major, then row before
    column; adjacent pairs.
    """

    def phases_rad(tokens: Tokens) -> Tensor:  # [B, N, channels / 2]
        rows, columns = tokens.grid
        coordinates = torch.stack((tokens.positions[..., 2] / rows, tokens.positions[..., 1] / columns), dim=-1)
        exponent = torch.arange(1 - channels // 4, 1, dtype=coordinates.dtype, device=coordinates.device)
        return (2 * math.pi * coordinates[..., None, :] * torch.exp2(exponent)[:, None]).flatten(-2)

    return phase_block("so2", start, query, key, phases_rad)
