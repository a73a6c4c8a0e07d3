"""PRoPE: relative projection matrices, so that attention sees intrinsics as well as poses (Li et al. 2025)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from merope.attention.plan import Block
from merope.encodings.gta import HalfCameraEncoding, half_camera_blocks, scaled_poses
from merope.encodings.intrinsics import normalised_intrinsics, paraxial, pinhole
from merope.encodings.tokens import Tokens
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import inverse


@dataclass(frozen=True)
class PRoPE(HalfCameraEncoding):
    """U = P_i P_j⁻¹ on the first half of the head, rotary phases over columns and rows on the last two quarters.

    P = lift(K) T⁻¹ takes the origin's frame to the normalised image: K has focal lengths and principal point in units
    of the image's width and height, the principal point counted from the image centre, and lift(K) is K with a row and
    column of the 4×4 identity. Like GTA's, the block is not orthogonal and grows with the baseline.

    translation_scale multiplies all translations, as in GTA.
    rope_base: base of the rotary frequencies. There is no time axis: `times` have no effect.
    intrinsics: with True the lens must be a `Pinhole`; "paraxial" is for any lens, with the K of the pinhole that sees
        as the lens does around its axis; False leaves K out, which is GTA's camera block, for any lens.
    """

    intrinsics: bool | Literal["paraxial"] = True

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """Camera, column and row blocks: O = lift(K) T⁻¹, K-side = T lift(K⁻¹), both in closed form."""
        query_matrices = inverse(scaled_poses(query.origin_from_camera, self.translation_scale))
        key_matrices = scaled_poses(key.origin_from_camera, self.translation_scale)
        if self.intrinsics:
            focal, centre = normalised_intrinsics(query, self._pinhole(query))
            query_matrices = _lifted(focal, centre) @ query_matrices
            focal, centre = normalised_intrinsics(key, self._pinhole(key))
            key_matrices = key_matrices @ _lifted(1 / focal, -centre / focal)  # lift(K⁻¹)
        return half_camera_blocks(
            self.head_dim, self.rope_base, query, query_matrices[:, :, None], key, key_matrices[:, :, None]
        )

    def _pinhole(self, tokens: Tokens) -> Pinhole:
        if self.intrinsics == "paraxial":
            return paraxial(tokens.lens, tokens.origin_from_camera.device)
        return pinhole(tokens.lens, 'PRoPE without intrinsics="paraxial"')


def _lifted(
    focal: Tensor,  # [..., 2]
    centre: Tensor,  # [..., 2]
) -> Tensor:  # [..., 4, 4]
    """[[diag(focal), centre], [0, 1]] in the upper left 3×3 of the identity."""
    (fx, fy), (cx, cy) = focal.unbind(-1), centre.unbind(-1)
    zero, one = torch.zeros_like(fx), torch.ones_like(fx)
    entries = (
        fx, zero, cx, zero,
        zero, fy, cy, zero,
        zero, zero, one, zero,
        zero, zero, zero, one,
    )  # fmt: skip
    return torch.stack(entries, dim=-1).unflatten(-1, (4, 4))
