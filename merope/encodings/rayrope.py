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

from merope.attention.plan import Block
from merope.encodings.expected_phasors import Ladder, expected_operators, kernels_run_on
from merope.encodings.intrinsics import normalised_intrinsics, pinhole
from merope.encodings.protocol import Encoding
from merope.encodings.rotary import check_positive
from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.rays import patch_rays

RAY_OFFSETS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))  # x, y inside the patch, as fractions
COORDINATES = 12  # camera centre 3, directions 3 × 2, depths 3
FREQUENCY_RATIO = 3.0  # of neighbouring frequencies
CENTRE_PERIOD, DIRECTION_PERIOD = 4.0, 8.0
DEPTH_PERIODS = {"d": 80.0, "inv_d": 80.0, "asinh_d": 8 * math.asinh(10)}
MOST = {"d": 10.0, "inv_d": 20.0, "asinh_d": math.asinh(10.0)}  # clamps of the depth coordinate
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
        super().__post_init__()
        if self.head_dim < 2 * COORDINATES:
            raise invalid("head_dim", f"at least {2 * COORDINATES}", self.head_dim, f"the nearest is {2 * COORDINATES}")
        check_positive("scene_scale", self.scene_scale, "1 keeps metres")
        if not 0 <= self.collapse_tol < math.inf:
            raise invalid("collapse_tol", "a phase ≥ 0 in radians", self.collapse_tol, "0.01 is the public code's")

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """One block over all whole sets of 24 channels; channel c is paired with c + half the block."""
        intrinsics = normalised_intrinsics(query, pinhole(query.lens, "RayRoPE"))
        own_rays = _corner_rays(query)
        rays = (own_rays, own_rays if key is query else _corner_rays(key))
        cameras = (query.origin_from_camera, key.origin_from_camera, *intrinsics, *rays)
        in_kernel = kernels_run_on(cameras[0].device) and not any(x.requires_grad for x in cameras)
        seen = partial(self._seen_in_kernel if in_kernel else self._seen, *intrinsics)
        ladder = self._ladder(query.origin_from_camera)
        sides = expected_operators(query, key, *rays, seen, ladder, split_halves=True, all_at_once=in_kernel)
        channels = self.head_dim // (2 * COORDINATES) * 2 * COORDINATES
        return (Block("rays", 0, channels, *sides, camera=True),)

    def _seen(
        self,
        focal: Tensor,  # [B or 1, G or 1, 2] of the viewing cameras
        centre: Tensor,  # [B or 1, G or 1, 2]
        viewer_from_camera: Tensor,  # [B, G, S, 4, 4]
        rays: Tensor,  # [B or 1, G or 1, S, P, 3 rays, 3] with z = 1
        content: Tensor,  # [B or 1, G or 1, S, P, 2]
    ) -> Tensor:  # [B, G, S, P, ends, 12]
        """Camera centre, directions and depths at both ends of the interval, in the frame of the viewing camera."""
        disparity = 1 / self._depths(content)[..., None, None]  # [B, G or 1, S, P, ends, 1, 1]
        translation = self.scene_scale * viewer_from_camera[:, :, :, None, None, None, :3, 3]
        turned = rays @ viewer_from_camera[:, :, :, None, :3, :3].mT
        # Homogeneous points (m, 1 / depth): their scale cancels in the directions.
        points = turned[..., None, :, :] + translation * disparity  # [B, G, S, P, ends, rays, 3]
        directions = _directions(points, focal, centre).flatten(-2)
        depths = self._depth_coordinate(points[..., 2], disparity.squeeze(-1))
        centres = translation.squeeze(-2).expand(*depths.shape[:-1], 3)
        return torch.cat((centres, directions, depths), dim=-1)

    def _seen_in_kernel(
        self, focal: Tensor, centre: Tensor, viewer_from_camera: Tensor, rays: Tensor, content: Tensor
    ) -> Tensor:  # [B, G, S, P, ends, 12]
        """`_seen` of cameras that need no gradients, on a GPU: cameras that all viewers see, or each its own."""
        from merope.encodings.kernels.ray_coordinates import ray_coordinates

        scale = viewer_from_camera.new_tensor([1.0, 1.0, 1.0, self.scene_scale])  # of columns: the last translates
        poses, disparity = (viewer_from_camera[..., :3, :] * scale).contiguous(), 1 / self._depths(content)
        batch = max(x.shape[0] for x in (poses, rays, disparity))
        poses, disparity = (x.expand(batch, *x.shape[1:]) for x in (poses, disparity))
        intrinsics = torch.cat((focal, centre), dim=-1)[:, :, None].expand(*poses.shape[:3], 4)
        own = disparity.shape[1] > 1
        if own:  # as one viewer's, whose pose and lens differ from camera to camera
            poses, intrinsics, rays, disparity = (x.transpose(1, 2) for x in (poses, intrinsics, rays, disparity))
        most = MOST[self.depth_coding]
        seen = ray_coordinates(poses, intrinsics, rays[:, 0], disparity[:, 0], self.depth_coding, most)
        return seen.transpose(1, 2) if own else seen

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
            depth = disparity / z
        elif self.depth_coding == "d":
            depth = z / disparity
        else:
            depth = (z / disparity).asinh()
        return depth.clamp_max(MOST[self.depth_coding])

    def _ladder(self, like: Tensor) -> Ladder:
        """Frequency-major: 2π / period · 3^f."""
        periods = [CENTRE_PERIOD] * 3 + [DIRECTION_PERIOD] * 6 + [DEPTH_PERIODS[self.depth_coding]] * 3
        powers = FREQUENCY_RATIO ** torch.arange(self.head_dim // (2 * COORDINATES)).to(like)
        frequencies = 2 * math.pi * powers / like.new_tensor(periods)[:, None]  # [12, F]
        return Ladder(frequencies, coordinate_major=False, collapse_tol=self.collapse_tol)


def _directions(
    points: Tensor,  # [B, G, S, P, ends, rays, 3]
    focal: Tensor,  # [B or 1, G or 1, 2]
    centre: Tensor,  # [B or 1, G or 1, 2]
) -> Tensor:  # [B, G, S, P, ends, rays, 2]
    """First two components of x / (‖x‖ + 1e-6), x the point through the normalised intrinsics."""
    focal, centre = (x[:, :, None, None, None, None] for x in (focal, centre))
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
