"""Expected phasors: rotary phases of a token whose depth is an interval, averaged over the path that it traces.

Used by RayRoPE (Wu et al. 2026: a straight segment) and CRePE (Jin et al. 2026: a curved path). The mean of unit
phasors is shorter than 1, so these encodings contract what they are unsure of; they are not orthogonal.
"""

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


class SeenPhasors(Protocol):
    """Phasors of the tokens of cameras c as viewing cameras v see them; c is v, or one camera for all of v."""

    def __call__(
        self,
        viewer_from_camera: Tensor,  # [B, V, 4, 4]
        rays: Tensor,  # [B or 1, V or 1, P, ..., 3] camera frame
        content: Tensor,  # [B or 1, V or 1, P, c]
    ) -> Tensor: ...  # [B, V, P, L, 2]


def expected_operators(
    query: Tokens,
    key: Tokens,
    query_rays: Tensor,  # [B or 1, Vq, P, ..., 3]
    key_rays: Tensor,  # [B or 1, Vk, P, ..., 3]
    seen: SeenPhasors,
    split_halves: bool,
) -> tuple[Operator, Operator]:
    """O = M_a and K = M_bᵀ of U_ab = M_a M_bᵀ: queries in their own camera's frame, keys in each query camera's."""
    own = torch.eye(4).to(query.origin_from_camera).expand_as(query.origin_from_camera)
    query_phasors = seen(own, query_rays, content_by_camera(query)).to(query.dtype)
    query_from_key = relative(query.origin_from_camera[:, :, None], key.origin_from_camera[:, None])
    key_phasors = _by_key_camera(seen, query_from_key, key_rays, content_by_camera(key), key.dtype)
    transposed = key_phasors * key_phasors.new_tensor([1.0, -1.0])
    unit = torch.tensor([1.0, 0.0]).expand(query_phasors.shape[-2:])
    return (
        Operator(query.per_token(query_phasors, unit, 2)[:, None, None], "phasor", split_halves=split_halves),
        Operator(key.per_token(transposed, unit, 2)[:, None], "phasor", split_halves=split_halves),
    )


def _by_key_camera(
    seen: SeenPhasors,
    query_from_key: Tensor,  # [B, Vq, Vk, 4, 4]
    rays: Tensor,  # [B or 1, Vk, P, ..., 3]
    content: Tensor,  # [B or 1, Vk, P, c]
    dtype: torch.dtype,
) -> Tensor:  # [B, Vq, Vk, P, L, 2]
    """Phasors of every key camera's tokens as every query camera sees them.

    One key camera at a time, and once more in the backward pass instead of being kept: the float64 paths take many
    times the memory of the table.
    """
    recompute = torch.is_grad_enabled() and content.requires_grad
    tables = []
    for camera in range(rays.shape[1]):
        arguments = (query_from_key[:, :, camera], rays[:, camera, None], content[:, camera, None])
        if recompute:
            table = checkpoint(seen, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            table = seen(*arguments)
        tables.append(table.to(dtype))
    return torch.stack(tables, dim=2)
