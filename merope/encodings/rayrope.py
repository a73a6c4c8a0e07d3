"""RayRoPE: expected rotary phases of a patch's rays up to a predicted depth interval (Wu et al. 2026).

Equal to the authors' public code where head_dim is a multiple of 24 (tests/encodings/test_rayrope.py). U_ab = M_a M_bᵀ
with contractions M: not norm preserving, unless `point_depth`.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from merope.attention.operators import phasors
from merope.attention.plan import Block
from merope.encodings.expected_phasors import expected_operators, expected_phasors
from merope.encodings.intrinsics import normalised_intrinsics, pinhole
from merope.encodings.protocol import Encoding
from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.rays import patch_rays

RAY_OFFSETS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))  # x, y inside the patch, as fractions
COORDINATES = 12  # camera centre 3, directions 3 × 2, depths 3
FREQUENCY_RATIO = 3.0  # of neighbouring frequencies
CENTRE_PERIOD, DIRECTION_PERIOD = 4.0, 8.0
DEPTH_PERIODS = {"d": 80.0, "inv_d": 80.0, "asinh_d": 8 * math.asinh(10)}
MAX_DEPTH, MAX_DISPARITY = 10.0, 20.0  # clamps of the depth coordinate
MAX_LOG_DEPTH, DEPTH_RANGE = 3.0, (0.01, 100.0)  # clamps of the predicted depth


@dataclass(frozen=True)
class RayRoPE(Encoding):
    """Phases of a key's camera centre and of three points on its rays, in the frame of the query's camera.

    `content` is (log depth, raw sigma) per token, as of `DepthHead`: depth along the optical axis between
    exp(log depth ∓ sigma), the same for the three rays. With F = head_dim // 24 frequencies per coordinate, 24·F
    channels are used and the rest are left alone (head_dim 128: 120 and 8). Pinhole cameras only. There is no time
    axis: `times` have no effect.

    depth_coding: the depth coordinate: "inv_d" (what its training uses), "d" (what its class defaults to), "asinh_d".
    scene_scale: multiplies all translations. The method was made for scenes of about unit size with depths of at most
        20; predicted depths are in the scaled unit, 1 / scene_scale metres.
    collapse_tol: phases that differ by no more than this over the interval take the phasor at log depth − sigma. The
        public code has 0.01, to reproduce its numbers; 0 is the exact mean everywhere.
    point_depth: its variant without uncertainty: sigma is ignored, phasors have length 1.
    """

    depth_coding: Literal["d", "inv_d", "asinh_d"] = "inv_d"
    scene_scale: float = 1.0
    collapse_tol: float = 0.0
    point_depth: bool = False

    content_channels: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.head_dim < 2 * COORDINATES:
            raise invalid("head_dim", f"at least {2 * COORDINATES}", self.head_dim, f"the nearest is {2 * COORDINATES}")
        if self.depth_coding not in DEPTH_PERIODS:
            fix = 'training uses "inv_d"'
            raise invalid("depth_coding", f"one of {sorted(DEPTH_PERIODS)}", repr(self.depth_coding), fix)
        if not 0 < self.scene_scale < math.inf:
            raise invalid("scene_scale", "positive and finite", self.scene_scale, "1 keeps metres")
        if not 0 <= self.collapse_tol < math.inf:
            raise invalid("collapse_tol", "a phase ≥ 0 in radians", self.collapse_tol, "0.01 is the public code's")

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """One block over all whole sets of 24 channels; channel c is paired with c + half the block."""
        seen = partial(self._seen, *normalised_intrinsics(query, "RayRoPE"))
        sides = expected_operators(query, key, _corner_rays(query), _corner_rays(key), seen, split_halves=True)
        channels = self.head_dim // (2 * COORDINATES) * 2 * COORDINATES
        return (Block("rays", 0, channels, *sides, camera=True),)

    def _seen(
        self,
        focal: Tensor,  # [B or 1, V or 1, 2] of the viewing cameras
        centre: Tensor,  # [B or 1, V or 1, 2]
        viewer_from_camera: Tensor,  # [B, V, 4, 4]
        rays: Tensor,  # [B or 1, V or 1, P, 3 rays, 3] with z = 1
        content: Tensor,  # [B or 1, V or 1, P, 2]
    ) -> Tensor:  # [B, V, P, L, 2]
        """Phasors of the rays of a camera in the frame of the viewing camera."""
        disparity = 1 / self._depths(content)[..., None, None]  # [B, V or 1, P, ends, 1, 1]
        translation = self.scene_scale * viewer_from_camera[:, :, None, None, None, :3, 3]
        turned = rays @ viewer_from_camera[:, :, None, :3, :3].mT
        # Homogeneous points (m, 1 / depth): their scale cancels in the directions.
        points = turned[..., None, :, :] + translation * disparity  # [B, V, P, ends, rays, 3]
        directions = _directions(points, focal, centre).flatten(-2)
        depths = self._depth_coordinate(points[..., 2], disparity.squeeze(-1))
        centres = translation.squeeze(-2).expand(*depths.shape[:-1], 3)
        return self._phasors(torch.cat((centres, directions, depths), dim=-1))

    def _depths(
        self,
        content: Tensor,  # [..., 2] log depth, sigma
    ) -> Tensor:  # [..., 2] at log depth − sigma and at log depth + sigma
        log_depth, sigma = content.unbind(-1)
        ends = (log_depth, log_depth) if self.point_depth else (log_depth - sigma, log_depth + sigma)
        return torch.stack(ends, dim=-1).clamp_max(MAX_LOG_DEPTH).exp().clamp(*DEPTH_RANGE)

    def _depth_coordinate(
        self,
        z: Tensor,  # [..., 3] of the homogeneous point
        disparity: Tensor,  # [..., 1] its fourth coordinate
    ) -> Tensor:  # [..., 3]
        """|z|-depth seen by the viewing camera, in the chosen coding; a point behind counts as in front."""
        z = (z.square() + 1e-9).sqrt().clamp_min(1e-4)
        if self.depth_coding == "inv_d":
            return (disparity / z).clamp_max(MAX_DISPARITY)
        if self.depth_coding == "d":
            return (z / disparity).clamp_max(MAX_DEPTH)
        return (z / disparity).asinh().clamp_max(math.asinh(MAX_DEPTH))

    def _phasors(
        self,
        coordinates: Tensor,  # [..., ends, 12]
    ) -> Tensor:  # [..., L, 2]
        """Mean phasors between the two ends, frequency-major: 2π / period · 3^f."""
        periods = [CENTRE_PERIOD] * 3 + [DIRECTION_PERIOD] * 6 + [DEPTH_PERIODS[self.depth_coding]] * 3
        powers = FREQUENCY_RATIO ** torch.arange(self.head_dim // (2 * COORDINATES)).to(coordinates)
        frequencies = 2 * math.pi * powers[:, None] / coordinates.new_tensor(periods)  # [F, 12]
        ends_rad = (coordinates[..., None, :] * frequencies).flatten(-2)
        mean = expected_phasors(ends_rad)
        if self.collapse_tol == 0:
            return mean
        start_rad, end_rad = ends_rad.unbind(-2)
        return torch.where(((end_rad - start_rad).abs() <= self.collapse_tol)[..., None], phasors(start_rad), mean)


def _directions(
    points: Tensor,  # [B, V, P, ends, rays, 3]
    focal: Tensor,  # [B or 1, V or 1, 2]
    centre: Tensor,  # [B or 1, V or 1, 2]
) -> Tensor:  # [B, V, P, ends, rays, 2]
    """First two components of x / (‖x‖ + 1e-6), x the point through the normalised intrinsics."""
    focal, centre = focal[:, :, None, None, None], centre[:, :, None, None, None]
    z = points[..., 2:]
    xy = points[..., :2] * focal + z * centre
    return xy / (torch.linalg.vector_norm(torch.cat((xy, z), dim=-1), dim=-1, keepdim=True) + 1e-6)


def _corner_rays(tokens: Tokens) -> Tensor:  # [1 or B, V, P, 3 rays, 3] camera frame, z = 1
    """Rays through the top-left, top-right and bottom-left corners of every patch."""
    lens = pinhole(tokens.lens, "RayRoPE")
    corners = [patch_rays(lens, tokens.grid, tokens.rays.device, offset)[0] for offset in RAY_OFFSETS]
    rays = torch.stack(corners, dim=-2)
    rays = rays / rays[..., 2:]
    return rays.expand(*tokens.rays.shape[:-2], *rays.shape[-3:])
