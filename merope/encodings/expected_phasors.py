"""Expected phasors: rotary phases of a token whose depth is an interval, averaged over the path that it traces.

Used by RayRoPE (Wu et al. 2026: a straight segment) and CRePE (Jin et al. 2026: a curved path). The mean of unit
phasors is shorter than 1, so these encodings contract what they are unsure of; they are not orthogonal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from merope.attention.kernels.support import INTERPRETED, TRITON_INSTALLED
from merope.attention.operators import Operator, phasors
from merope.encodings.depth_head import content_by_camera
from merope.encodings.tokens import Tokens
from merope.geometry.poses import relative


def expected_phasors(
    path_rad: Tensor,  # [..., K, L] phases at K ≥ 2 knots
) -> Tensor:  # [..., L, 2] cosine, sine
    """Mean of e^{iφ} along a polyline of phases, every segment of equal weight and uniform in phase.

    A segment from t₁ to t₂ has the exact mean e^{i(t₁+t₂)/2} · sin(δ)/δ with δ = (t₂ − t₁)/2, at δ = 0 included.
    """
    start, end = path_rad[..., :-1, :], path_rad[..., 1:, :]
    length = torch.sinc((end - start) / (2 * math.pi))
    return (length[..., None] * phasors((start + end) / 2)).mean(dim=-3)


@dataclass(frozen=True, eq=False)
class Ladder:
    """How coordinates become phases: F frequencies for each of C coordinates, L = C·F phases.

    collapse_tol: phases that differ by no more than this between the first and the last knot take the first phasor.
    """

    rad_per_unit: Tensor  # float64 [C, F]
    coordinate_major: bool  # the order of the phases: all frequencies of the first coordinate first, or the other way
    collapse_tol: float = 0.0

    def mean_phasors(
        self,
        path: Tensor,  # [..., K, C]
    ) -> Tensor:  # [..., L, 2]
        """Mean phasors along paths of coordinates."""
        if self.coordinate_major:
            path_rad = (path[..., :, None] * self.rad_per_unit).flatten(-2)
        else:
            path_rad = (path[..., None, :] * self.rad_per_unit.mT).flatten(-2)
        mean = expected_phasors(path_rad)
        if self.collapse_tol == 0:
            return mean
        first, last = path_rad[..., 0, :], path_rad[..., -1, :]
        return torch.where(((last - first).abs() <= self.collapse_tol)[..., None], phasors(first), mean)


class SeenPaths(Protocol):
    """Paths of the tokens of S cameras as each of G viewing cameras sees them, in the coordinates of a `Ladder`."""

    def __call__(
        self,
        viewer_from_camera: Tensor,  # [B, G, S, 4, 4]
        rays: Tensor,  # [B or 1, G or 1, S, P, ..., 3] camera frame
        content: Tensor,  # [B or 1, G or 1, S, P, c]
    ) -> Tensor: ...  # [B, G, S, P, K, C]


def expected_operators(
    query: Tokens,
    key: Tokens,
    query_rays: Tensor,  # [B or 1, Vq, P, ..., 3]
    key_rays: Tensor,  # [B or 1, Vk, P, ..., 3]
    seen: SeenPaths,
    ladder: Ladder,
    split_halves: bool,
    all_at_once: bool = False,  # `seen` takes little memory beside its result
) -> tuple[Operator, Operator]:
    """O = M_a and K = M_bᵀ of U_ab = M_a M_bᵀ: queries in their own camera's frame, keys in each query camera's."""
    own = torch.eye(4).to(query.origin_from_camera).expand_as(query.origin_from_camera)[:, :, None]
    query_from_key = relative(query.origin_from_camera[:, :, None], key.origin_from_camera[:, None])
    of_query = (own, query_rays[:, :, None], content_by_camera(query)[:, :, None])
    of_key = (query_from_key, key_rays[:, None], content_by_camera(key)[:, None])
    if ladder.collapse_tol == 0 and kernels_run_on(own.device):
        from merope.encodings.kernels.mean_phasors import mean_phasor_table

        frequencies = (ladder.rad_per_unit, ladder.coordinate_major)
        own_path = seen(*of_query).transpose(1, 2).flatten(2, 3)
        path = seen(*of_key) if all_at_once else _by_key_camera(seen, *of_key)
        query_table = mean_phasor_table(own_path, *frequencies, query.has_camera, False, query.dtype)
        key_table = mean_phasor_table(path.flatten(2, 3), *frequencies, key.has_camera, True, key.dtype)
    else:
        query_phasors = ladder.mean_phasors(seen(*of_query)).to(query.dtype)
        key_phasors = _by_key_camera(lambda *pair: ladder.mean_phasors(seen(*pair)).to(key.dtype), *of_key)
        unit = torch.tensor([1.0, 0.0]).expand(query_phasors.shape[-2:])
        query_table = query.per_token(query_phasors.transpose(1, 2), unit, 2)
        key_table = key.per_token(key_phasors * key_phasors.new_tensor([1.0, -1.0]), unit, 2)
    return (
        Operator(query_table[:, None], "phasor", split_halves=split_halves),
        Operator(key_table[:, None], "phasor", split_halves=split_halves),
    )


def kernels_run_on(device: torch.device) -> bool:
    """Whether tables are made by Triton kernels there; elsewhere PyTorch makes them, op by op."""
    if not TRITON_INSTALLED or torch.version.hip is not None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return INTERPRETED and device.type == "cpu"


def _by_key_camera(
    seen: Callable[..., Tensor],
    query_from_key: Tensor,  # [B, Vq, Vk, 4, 4]
    rays: Tensor,  # [B or 1, 1, Vk, P, ..., 3]
    content: Tensor,  # [B or 1, 1, Vk, P, c]
) -> Tensor:  # [B, Vq, Vk, P, ...]
    """What every query camera sees of the tokens of every key camera.

    It is made for one key camera at a time, and made again in the backward pass: to keep what lies between would take
    many times the memory of the result.
    """
    recompute = torch.is_grad_enabled() and content.requires_grad
    parts = []
    for camera in range(rays.shape[2]):
        pairs = (x[:, :, camera, None] for x in (query_from_key, rays, content))
        if recompute:
            parts.append(checkpoint(seen, *pairs, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(seen(*pairs))
    return torch.cat(parts, dim=2)
