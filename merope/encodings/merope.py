"""MeRoPE: relative ray rotation, metric translation and disparity anchors as orthogonal blocks (paper, Section 3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from merope.attention.operators import Operator, phasors
from merope.attention.plan import Block
from merope.encodings.protocol import Encoding
from merope.encodings.ray_frames import ray_rotation_block
from merope.encodings.rotary import check_positive, native_block, rotary_frequencies
from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.epipolar import EpipolarArc, anchor_directions, arc_turns, epipolar_arc
from merope.geometry.minrot import POLE_ZONE, minrot, minrot_quaternion
from merope.geometry.poses import relative
from merope.geometry.quaternions import multiply, quaternion_from_matrix

PARTITIONS = {128: (36, 36, 24, 32), 192: (54, 54, 36, 48)}
"""Channels for disparity, rotation, translation, native: the paper's head of 128, and 1.5 × it for PanShot's 192."""
DIRECTION_BASE = 100.0
"""Base of the frequencies of direction phases, as in RayNova."""
ENTRIES_AT_ONCE = 1 << 22
"""Anchors, or direction phases, that are computed together; float64, an anchor takes about 300 bytes."""


@dataclass(frozen=True)
class MeRoPE(Encoding):
    """The encoding of the paper. Translations are raw metres: there is no scale to fit.

    head_dim: channels of a head.
    partition: channels for (disparity, rotation, translation, native); None takes the paper's for 128 and 192.
    native_split: channels of the native band for (time, column, row); None is one half, one quarter, one quarter.
    disparity, rotation, translation: False replaces the block by the identity on the same channels (ablations).
    fractions: angular fractions ρ of the epipolar arc at which disparity anchors stand.
    wavelengths_m: shortest and longest wavelength of the translation phases.
    frequencies: distinct wavelengths per axis, log-spaced, repeated to fill the channels; None is one per channel pair,
        1 is the paper's single-frequency ablation (at the geometric mean of `wavelengths_m`).
    native_base: base of the native band's frequencies.
    anchor_frame: "minrot" (the paper: MinRot of each anchor direction) or "transport" (the key ray's frame carried
        along the epipolar arc by the arc's own rotation: the same directions, without MinRot's pole).
    direction_scale: None is the paper. A number replaces the rotation block by phases of ray directions in the query's
        camera, so many radians per unit of direction at the highest frequency (RayNova has 50). They tell neighbouring
        rays apart, where a rotation block turns by their angle itself; orthogonal and free of a world frame like it.
    anchor_scale: None is the paper. A number replaces the frames of disparity anchors by phases of their directions,
        as `direction_scale` does for the rays; they have no pole.
    """

    partition: tuple[int, int, int, int] | None = None
    native_split: tuple[int, int, int] | None = None
    disparity: bool = True
    rotation: bool = True
    translation: bool = True
    fractions: tuple[float, ...] = (0.0, 0.05, 0.15, 0.4, 0.7, 1.0)
    wavelengths_m: tuple[float, float] = (0.5, 200.0)
    frequencies: int | None = None
    native_base: float = 10000.0
    anchor_frame: Literal["minrot", "transport"] = "minrot"
    direction_scale: float | None = None
    anchor_scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    @property
    def channels(self) -> tuple[int, int, int, int]:
        """Channels for (disparity, rotation, translation, native)."""
        return self.partition if self.partition is not None else PARTITIONS[self.head_dim]

    @property
    def native_channels(self) -> tuple[int, int, int]:
        """Channels of the native band for (time, column, row)."""
        native = self.channels[3]
        return self.native_split if self.native_split is not None else (native // 2, native // 4, native // 4)

    @property
    def disparity_unit(self) -> int:
        """Channels of the disparity block come in triplets for every anchor, phases in pairs for three axes."""
        return len(self.fractions) * (3 if self.anchor_scale is None else 6)

    @property
    def rotation_unit(self) -> int:
        """The rotation block's channels come in triplets, phases of directions in pairs for three axes."""
        return 3 if self.direction_scale is None else 6

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """Disparity, rotation, translation and native blocks (paper, Eq. 11); blocks that are off are left out."""
        disparity, rotation, translation, native = self.channels
        blocks = []
        if self.disparity and disparity:
            make = self._disparity_block if self.anchor_scale is None else self._anchor_phases
            blocks.append(make(0, query, key))
        if self.rotation and rotation:
            if self.direction_scale is None:
                blocks.append(ray_rotation_block(disparity, rotation, query, key))
            else:
                blocks.append(_direction_block(disparity, rotation, query, key, self.direction_scale))
        if self.translation and translation:
            blocks.append(self._translation_block(disparity + rotation, query, key))
        if native:
            start = disparity + rotation + translation
            blocks.append(native_block(start, query, key, self.native_channels, self.native_base))
        return tuple(blocks)

    def _translation_block(self, start: int, query: Tokens, key: Tokens) -> Block:
        """Rot(ω_k [Δo]_c), axis-major, then wavelength, one table row per pair of cameras (paper, Eq. 8)."""
        query_from_key = relative(query.origin_from_camera[:, :, None], key.origin_from_camera[:, None])
        displacement_m = query_from_key[..., :3, 3]  # [B, Vq, Vk, 3] Δo, Eq. 2
        phase = displacement_m[..., None] * self._angular_frequencies(displacement_m)
        table = phasors(pad(phase.flatten(-2), (0, 0, 0, 1))).to(query.dtype)
        side = Operator(table[:, None], "phasor", rows=key.camera_of)
        return Block("translation", start, start + self.channels[2], None, side, camera=True)

    def _angular_frequencies(self, like: Tensor) -> Tensor:  # [pairs per axis] float64, rad/m
        """ω_k = 2π / λ_k, λ log-spaced between the two wavelengths (paper, Eq. 7)."""
        pairs = self.channels[2] // 6
        distinct = pairs if self.frequencies is None else self.frequencies
        shortest, longest = self.wavelengths_m
        exponent = torch.linspace(0, 1, distinct, dtype=like.dtype, device=like.device)
        if distinct == 1:
            exponent = torch.full_like(exponent, 0.5)
        wavelengths_m = shortest * (longest / shortest) ** exponent
        return (2 * math.pi / wavelengths_m).repeat_interleave(pairs // distinct)

    def _disparity_block(self, start: int, query: Tokens, key: Tokens) -> Block:
        """A_aᵀ · A_{i,β}, anchor-major, then triplet: keys as seen from the query's camera (paper, Eq. 9–10)."""
        query_frames = query.per_token(minrot(query.rays).mT, torch.eye(3), entry_dims=2)
        unit = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(len(self.fractions), 4)
        fractions = key.rays.new_tensor(self.fractions)

        def anchors(origin_from_query: Tensor, rounding_m: Tensor) -> Tensor:
            return self._anchor_frames(origin_from_query, rounding_m, key, fractions)

        table = _by_query_camera(query, key, unit, anchors)
        key_side = Operator(table[:, None], "quaternion")
        query_side = Operator(query_frames.to(query.dtype)[:, None, None, :, None], "matrix")
        return Block("disparity", start, start + self.channels[0], query_side, key_side, camera=True)

    def _anchor_phases(self, start: int, query: Tokens, key: Tokens) -> Block:
        """Rot(ω_m ([a_ρ]_c − [d_a]_c)), anchor-major, then axis and frequency: where a surface would be seen."""
        assert self.anchor_scale is not None
        fractions = key.rays.new_tensor(self.fractions)

        def anchors(origin_from_query: Tensor, rounding_m: Tensor) -> Tensor:  # -> [B, n, Vk, P, L, 3]
            arc = _arc(relative(origin_from_query[:, :, None], key.origin_from_camera[:, None]), rounding_m, key)
            return anchor_directions(arc, fractions)

        channels = self.channels[0], len(fractions)
        return _phase_block("disparity", start, channels, query, key, self.anchor_scale, anchors)

    def _anchor_frames(
        self,
        origin_from_query: Tensor,  # [B, n, 4, 4] some query cameras
        rounding_m: Tensor,  # [B, n] of their centres
        key: Tokens,
        fractions: Tensor,  # [L]
    ) -> Tensor:  # [B, n, Vk, P, L, 4]
        """Frames of the anchor directions in the query cameras, as quaternions."""
        query_from_key = relative(origin_from_query[:, :, None], key.origin_from_camera[:, None])
        arc = _arc(query_from_key, rounding_m, key)
        if self.anchor_frame == "minrot":
            zone = torch.where(arc.defined, arc.zone, POLE_ZONE)  # a ray's own direction is not rounded
            return minrot_quaternion(anchor_directions(arc, fractions), zone[..., None])
        rotation = quaternion_from_matrix(query_from_key[..., None, :3, :3])  # [B, n, Vk, 1, 4]
        key_frames = multiply(rotation, minrot_quaternion(key.rays)[:, None])
        return multiply(arc_turns(arc, fractions), key_frames[..., None, :])


@dataclass(frozen=True)
class MeRoPEPhases(MeRoPE):
    """MeRoPE with phases of directions in place of its rotation block, "merope_phases": ours, not the paper's."""

    direction_scale: float = 50.0


def _direction_block(start: int, channels: int, query: Tokens, key: Tokens, scale_rad: float) -> Block:
    """Rot(ω_m ([R_iᵀ R_j d_b]_c − [d_a]_c)), axis-major, then frequency: rays as the query's camera sees them."""

    def far(origin_from_query: Tensor, _: Tensor) -> Tensor:  # -> [B, n, Vk, P, 1, 3]
        query_from_key = relative(origin_from_query[:, :, None], key.origin_from_camera[:, None])
        return _far_directions(query_from_key, key)[..., None, :]

    return _phase_block("directions", start, (channels, 1), query, key, scale_rad, far)


def _phase_block(
    name: str,
    start: int,
    channels_and_count: tuple[int, int],  # how many directions L a key has
    query: Tokens,
    key: Tokens,
    scale_rad: float,
    seen: Callable[[Tensor, Tensor], Tensor],  # poses [B, n, 4, 4], rounding_m [B, n] -> [B, n, Vk, P, L, 3]
) -> Block:
    """Phases of directions in the query's camera less those of the query's own ray."""
    channels, count = channels_and_count
    frequencies = scale_rad * rotary_frequencies(channels // (3 * count), DIRECTION_BASE, key.rays.device)
    unit = torch.tensor([1.0, 0.0]).expand(channels // 2, 2)

    def turned(directions: Tensor) -> Tensor:  # [..., L, 3] -> [..., channels / 2, 2]
        return phasors((directions[..., None] * frequencies).flatten(-3))

    own = -query.rays[..., None, :].expand(*query.rays.shape[:-1], count, 3)
    query_side = Operator(query.per_token(turned(own), unit, entry_dims=2).to(query.dtype)[:, None, None], "phasor")
    table = _by_query_camera(query, key, unit, lambda *cameras: turned(seen(*cameras)))
    return Block(name, start, start + channels, query_side, Operator(table[:, None], "phasor"), camera=True)


def _arc(
    query_from_key: Tensor,  # [B, n, Vk, 4, 4]
    rounding_m: Tensor,  # [B, n] of the query cameras' centres
    key: Tokens,
) -> EpipolarArc:  # [B, n, Vk, P]
    """Where the query cameras see what may lie on the keys' rays."""
    far_directions = _far_directions(query_from_key, key)
    displacement_m = query_from_key[..., None, :3, 3].expand_as(far_directions)
    rounding_m = rounding_m[:, :, None] + key.rounding_m[:, None]
    return epipolar_arc(far_directions, displacement_m, rounding_m[..., None])


def _far_directions(
    query_from_key: Tensor,  # [B, n, Vk, 4, 4]
    key: Tokens,
) -> Tensor:  # [B, n, Vk, P, 3]
    """R_iᵀ R_j d_b: where the query cameras see what the keys' rays meet far away."""
    return (query_from_key[..., None, :3, :3] @ key.rays[:, None, ..., None]).squeeze(-1)


def _by_query_camera(
    query: Tokens,
    key: Tokens,
    unit: Tensor,  # [L, s] of tokens without a camera
    entries: Callable[[Tensor, Tensor], Tensor],  # poses [B, n, 4, 4], rounding_m [B, n] -> [B, n, Vk, P, L, s]
) -> Tensor:  # [B, Vq, Nk, L, s]
    """Key tables of all query cameras, made for some at a time: in float64 they may take many times their memory."""
    clips = max(len(query.origin_from_camera), len(key.origin_from_camera))
    at_once = max(1, ENTRIES_AT_ONCE // (clips * key.count * len(unit)))
    cameras = zip(query.origin_from_camera.split(at_once, 1), query.rounding_m.split(at_once, 1), strict=True)
    tables = [key.per_token(entries(*some), unit, entry_dims=2).to(key.dtype) for some in cameras]
    return torch.cat(tables, dim=1)


def _fitting_partitions(encoding: MeRoPE) -> list[tuple[int, int, int, int]]:
    """Partitions that fill the head with some channels for every block, those nearest to the paper's shares first."""
    head_dim, unit = int(encoding.head_dim), max(1, encoding.disparity_unit)
    shares = [head_dim * channels / 128 for channels in PARTITIONS[128]]

    def near(share: float, step: int) -> range:  # a head may be as wide as a model, by mistake: not all that there are
        middle = round(share / step)
        return range(step * max(1, middle - 4), step * (middle + 5), step)

    fitting = [
        (disparity, rotation, translation, native)
        for disparity in near(shares[0], unit)
        for translation in near(shares[2], 6)
        for native in near(shares[3], 8)
        if (rotation := head_dim - disparity - translation - native) > 0 and rotation % encoding.rotation_unit == 0
    ]
    return sorted(fitting, key=lambda channels: math.dist(channels, shares))


def _check(encoding: MeRoPE) -> None:
    """Refuse configurations that do not fill a head."""
    if encoding.partition is None and encoding.head_dim not in PARTITIONS:
        fix = "pass partition=(disparity, rotation, translation, native) channels"
        fix += "".join(f", such as {fitting}" for fitting in _fitting_partitions(encoding)[:1])
        raise invalid("head_dim", f"one of {sorted(PARTITIONS)} without a partition", encoding.head_dim, fix)
    channels = encoding.channels
    if min(channels) < 0 or sum(channels) != encoding.head_dim:
        expected = f"four counts ≥ 0 that sum to head_dim {encoding.head_dim}"
        raise invalid("partition", expected, channels, "adjust the partition or head_dim")
    if not encoding.fractions or any(not 0 <= rho <= 1 for rho in encoding.fractions):
        raise invalid("fractions", "numbers in [0, 1]", encoding.fractions, "the paper has (0, .05, .15, .4, .7, 1)")
    units = (("disparity", encoding.disparity_unit), ("rotation", encoding.rotation_unit), ("translation", 6))
    for (name, unit), count in zip(units, channels[:3], strict=True):
        if count % unit:
            fix = f"the nearest multiple is {round(count / unit) * unit}"
            raise invalid("partition", f"a multiple of {unit} for {name}", count, fix)
    split = encoding.native_channels
    if min(split) < 0 or any(n % 2 for n in split) or sum(split) != channels[3]:
        fix = "pass (time, column, row) channels"
        raise invalid("native_split", f"three even counts that sum to {channels[3]}", split, fix)
    shortest, longest = encoding.wavelengths_m
    if not 0 < shortest <= longest < math.inf:
        raise invalid("wavelengths_m", "(shortest, longest) in metres", encoding.wavelengths_m, "put the shorter first")
    pairs = channels[2] // 6
    if encoding.frequencies is not None and (encoding.frequencies < 1 or pairs % encoding.frequencies):
        expected = f"a divisor of {pairs}, the channel pairs per axis"
        raise invalid("frequencies", expected, encoding.frequencies, "1 is the single-frequency ablation")
    check_positive("native_base", encoding.native_base)
    if encoding.direction_scale is not None:
        check_positive("direction_scale", encoding.direction_scale, "RayNova has 50")
    if encoding.anchor_scale is not None:
        check_positive("anchor_scale", encoding.anchor_scale, "12.5 was tried")
        if encoding.anchor_frame != "minrot":
            fix = "leave one of them out: phases have no frames"
            raise invalid("anchor_frame", "left out with anchor_scale", repr(encoding.anchor_frame), fix)
