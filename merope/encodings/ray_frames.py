"""Relative ray rotation: the orthogonal block that MeRoPE and ViewRope share."""

import torch
from torch import Tensor

from merope.attention.operators import Operator
from merope.attention.plan import Block
from merope.encodings.tokens import Tokens
from merope.geometry.minrot import minrot


def origin_from_ray(tokens: Tokens) -> Tensor:  # [B, N, 3, 3]
    """R A(d) of every token: its camera's rotation times MinRot of its ray; the identity without a camera."""
    frames = tokens.origin_from_camera[:, :, None, :3, :3] @ minrot(tokens.rays)
    return tokens.per_token(frames, torch.eye(3), entry_dims=2)


def ray_rotation_block(start: int, channels: int, query: Tokens, key: Tokens) -> Block:
    """A_aᵀ R_iᵀ · R_j A_b on every triplet: it factors per token (paper, Eq. 6)."""

    def operator(frames: Tensor) -> Operator:
        return Operator(frames.to(query.dtype)[:, None, None, :, None], "matrix")

    query_side, key_side = operator(origin_from_ray(query).mT), operator(origin_from_ray(key))
    return Block("rotation", start, start + channels, query_side, key_side, camera=True)
