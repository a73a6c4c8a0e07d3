"""Rotary position embedding over time and the image plane: the native band that camera encodings keep."""

from typing import Literal

import torch
from torch import Tensor

from merope.attention.operators import Operator, phasors
from merope.attention.plan import Block
from merope.encodings.tokens import Tokens


def rotary_frequencies(
    channels: int,
    base: float,
    device: torch.device | None = None,
) -> Tensor:  # [channels / 2] float64, radians per position
    """ω_m = base^(−2m / channels)."""
    exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=device) / max(channels, 1)
    return base**-exponent


def rotary_phases(
    positions: Tensor,  # [B, N, 3] time, column, row
    split: tuple[int, int, int],  # channels for time, column, row
    base: float,
) -> Tensor:  # [B, N, sum(split) / 2] float64
    """Phases of the three axes side by side, each axis with its own frequency ladder."""
    per_axis = [
        position[..., None] * rotary_frequencies(channels, base, positions.device)
        for position, channels in zip(positions.unbind(-1), split, strict=True)
    ]
    return torch.cat(per_axis, dim=-1)


def native_block(
    start: int,
    query: Tokens,
    key: Tokens,
    split: tuple[int, int, int],  # channels for time, column, row
    base: float,
) -> Block:
    """U_native = Rot(ω·(key position − query position)) on adjacent pairs (paper, Eq. 11)."""

    def operator(tokens: Tokens, sign: int) -> Operator:
        table = phasors(sign * rotary_phases(tokens.positions, split, base)).to(tokens.dtype)
        return Operator(table[:, None, None], "phasor")

    return Block("native", start, start + sum(split), operator(query, -1), operator(key, 1), camera=False)


def axis_block(
    name: Literal["column", "row"],
    start: int,
    channels: int,
    query: Tokens,
    key: Tokens,
    base: float,
) -> Block:
    """Rotary phases of one image axis, laid out as in PRoPE: channel f with f + channels/2, Rot(ω·(query − key))."""
    frequencies = rotary_frequencies(channels, base, query.positions.device)
    axis = 1 if name == "column" else 2

    def operator(tokens: Tokens, sign: int) -> Operator:
        table = phasors(sign * tokens.positions[..., axis, None] * frequencies).to(tokens.dtype)
        return Operator(table[:, None, None], "phasor", split_halves=True)

    return Block(name, start, start + channels, operator(query, 1), operator(key, -1), camera=False)
