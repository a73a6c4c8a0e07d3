"""Rotary position embedding over time and the image plane: the native band that camera encodings keep."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from merope.attention.operators import Operator, phasors
from merope.attention.plan import Block
from merope.encodings.tokens import Tokens
from merope.errors import invalid


def check_head_dim(head_dim: int, unit: int) -> None:
    """Refuse heads that a method's channels do not fill: they come in multiples of `unit`."""
    if head_dim <= 0 or head_dim % unit:
        fix = f"the nearest is {max(unit, round(head_dim / unit) * unit)}"
        raise invalid("head_dim", f"a multiple of {unit}", head_dim, fix)


def check_positive(name: str, value: float, fix: str = "10000 is the base of most models") -> None:
    """Refuse bases and scales of phases that make none: every table would be NaN."""
    if not 0 < value < math.inf:
        raise invalid(name, "positive and finite", value, fix)


def wan_bands(head_dim: int) -> tuple[int, int, int]:
    """Channels of Wan's rotary bands in a head: row and column 2·⌊d/6⌋ each, time the rest (128: 44, 42, 42)."""
    axis = 2 * (head_dim // 6)
    return head_dim - 2 * axis, axis, axis


def rotary_frequencies(
    channels: int, base: float, device: torch.device | None = None
) -> Tensor:  # [channels / 2] float64, radians per position
    """ω_m = base^(−2m / channels)."""
    exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=device) / max(channels, 1)
    return base**-exponent


def rotary_phases(
    positions: Tensor,  # [B, N, axes]
    split: tuple[int, ...],  # channels of each axis
    base: float,
) -> Tensor:  # [B, N, sum(split) / 2] float64
    """Phases of all axes side by side, each axis with its own frequency ladder."""
    per_axis = [
        position[..., None] * rotary_frequencies(channels, base, positions.device)
        for position, channels in zip(positions.unbind(-1), split, strict=True)
    ]
    return torch.cat(per_axis, dim=-1)


def phase_block(
    name: str,
    start: int,
    query: Tokens,
    key: Tokens,
    phases_rad: Callable[[Tokens], Tensor],  # -> [B, N, L]
    camera: bool = False,
) -> Block:
    """Rot(key phase − query phase) on 2·L channels from `start`, one phase per adjacent pair."""

    def operator(phases: Tensor) -> Operator:
        return Operator(phasors(phases).to(query.dtype)[:, None, None], "phasor")

    key_phases = phases_rad(key)
    stop = start + 2 * key_phases.shape[-1]
    return Block(name, start, stop, operator(-phases_rad(query)), operator(key_phases), camera)


def native_block(
    start: int,
    query: Tokens,
    key: Tokens,
    split: tuple[int, int, int],  # channels for time, column, row
    base: float,
) -> Block:
    """U_native = Rot(ω·(key position − query position)) on adjacent pairs (paper, Eq. 11)."""
    return phase_block("native", start, query, key, lambda tokens: rotary_phases(tokens.positions, split, base))


def axis_block(
    name: Literal["column", "row"], start: int, channels: int, query: Tokens, key: Tokens, base: float
) -> Block:
    """Rotary phases of one image axis, laid out as in PRoPE: channel f with f + channels/2, Rot(ω·(query − key))."""
    frequencies = rotary_frequencies(channels, base, query.positions.device)
    axis = 1 if name == "column" else 2

    def operator(tokens: Tokens, sign: int) -> Operator:
        table = phasors(sign * tokens.positions[..., axis, None] * frequencies).to(tokens.dtype)
        return Operator(table[:, None, None], "phasor", split_halves=True)

    return Block(name, start, start + channels, operator(query, 1), operator(key, -1), camera=False)
