"""UCPE: a rigid frame on the ray of every token, for any lens (Zhang et al. 2026)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from merope.attention.plan import Block
from merope.encodings.gta import HalfCameraEncoding, half_camera_blocks, scaled_poses
from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.poses import inverse, rigid
from merope.geometry.rays import patch_rays

VERTICAL_ZONE = 1e-6
"""Rays with a horizontal part shorter than this count as exactly vertical (±y): their frame is fixed."""

PATCH_CENTRE = (0.5, 0.5)


@dataclass(frozen=True)
class UCPE(HalfCameraEncoding):
    """U = D_a D_b⁻¹ on the first half of the head, rotary phases over columns and rows on the last two quarters.

    D_a takes the origin's frame to the frame of token a's ray: at the camera's centre, z along the ray, x level in the
    camera (`level_frames`). On the optical axis D is GTA's T⁻¹. The lens enters through the ray alone. Like GTA's, the
    block is not orthogonal and grows with the baseline.

    translation_scale multiplies all translations, as in GTA.
    rope_base: base of the rotary frequencies. There is no time axis: `times` have no effect.
    ray_offset: where in its patch a token's ray passes, (x, y) as fractions. (0, 0), the top-left corner, is what the
        released code does. Where the lens reaches the centre of a patch and not this point, the token takes the frame
        of its camera.
    """

    ray_offset: tuple[float, float] = PATCH_CENTRE

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not 0 <= fraction <= 1 for fraction in self.ray_offset):
            fix = "(0.5, 0.5) is the centre of the patch"
            raise invalid("ray_offset", "two fractions in [0, 1], x and y", self.ray_offset, fix)

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """Camera, column and row blocks: O = D, K = D⁻¹."""
        query_matrices, key_matrices = inverse(self._origin_from_ray(query)), self._origin_from_ray(key)
        return half_camera_blocks(self.head_dim, self.rope_base, query, query_matrices, key, key_matrices)

    def _origin_from_ray(self, tokens: Tokens) -> Tensor:  # [B, V, P, 4, 4]
        """D⁻¹ of every token, with the scaled translation of its camera."""
        poses = self._poses(tokens)[:, :, None]
        rotation = poses[..., :3, :3] @ level_frames(self._rays(tokens))
        return rigid(rotation, poses[..., :3, 3].expand(*rotation.shape[:-2], 3))

    def _poses(self, tokens: Tokens) -> Tensor:  # [B, V, 4, 4]
        return scaled_poses(tokens.origin_from_camera, self.translation_scale)

    def _rays(self, tokens: Tokens) -> Tensor:  # [B or 1, V or 1, P, 3]
        if self.ray_offset == PATCH_CENTRE:
            return tokens.rays
        rays, _ = patch_rays(tokens.lens, tokens.grid, tokens.rays.device, self.ray_offset)
        return rays.reshape((1,) * (4 - rays.ndim) + rays.shape)


def level_frames(
    rays: Tensor,  # [..., 3] unit, camera frame
) -> Tensor:  # [..., 3, 3] camera_from_ray
    """Rotations with columns x = unit(e_y × ray), y = ray × x, z = ray; e_y is the camera's down.

    The cross product vanishes for a vertical ray ±e_y, and near it the frame spins with the direction of the horizontal
    part: a singularity of the method. Within VERTICAL_ZONE the frame is fixed, x = e_x and z = ±e_y, so that it stays a
    rotation and neither rounding nor a gradient of 1/0 enters.
    """
    ray_x, ray_y, ray_z = rays.unbind(-1)
    is_vertical = torch.hypot(ray_x.detach(), ray_z.detach()) < VERTICAL_ZONE
    level_x, level_z = torch.where(is_vertical, 0.0, ray_x), torch.where(is_vertical, 1.0, ray_z)
    zero = torch.zeros_like(ray_x)
    x_axis = torch.stack((level_z, zero, -level_x), dim=-1) / torch.hypot(level_x, level_z)[..., None]
    vertical = torch.stack((zero, ray_y.detach().sign(), zero), dim=-1)
    z_axis = torch.where(is_vertical[..., None], vertical, rays)
    return torch.stack((x_axis, torch.linalg.cross(z_axis, x_axis), z_axis), dim=-1)
