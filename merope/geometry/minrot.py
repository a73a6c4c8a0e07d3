"""MinRot: the smallest rotation that carries the optical axis e_z onto a direction (paper, Eq. 5)."""

import torch
from torch import Tensor

from merope.geometry.quaternions import matrix_from_quaternion

POLE_ZONE = 1e-6
"""Within ‖e_z + u‖ < POLE_ZONE of the pole u = −e_z the frame is a fixed half turn about y."""


def minrot_quaternion(
    direction: Tensor,  # [..., 3] unit
    pole_zone: float | Tensor = POLE_ZONE,  # [...]
) -> Tensor:  # [..., 4]
    """Quaternion (w, x, y, z) of MinRot: (1 + c, e_z × u) normalised, with c = e_z·u.

    This is Eq. 5 without its division by 1 + c: the quaternion is normalised, so the rotation is orthogonal to rounding
    for every direction. At the pole u = −e_z the formula has no limit. There, and so close to it that rounding would
    pick the frame (`pole_zone`), the turn is by π about y: straight driving puts the epipole of every past frame
    exactly there.
    """
    x, y, z = direction.unbind(-1)
    sine_squared = x * x + y * y
    # 1 + z cancels near the pole, where x² + y² = (1 − z)(1 + z) does not.
    front = z >= 0
    one_plus_c = torch.where(front, 1 + z, sine_squared / (1 - torch.where(front, torch.zeros_like(z), z)))
    at_pole = one_plus_c.square() + sine_squared < pole_zone**2
    unnormalised = torch.stack((one_plus_c, -y, x, torch.zeros_like(x)), dim=-1)
    half_turn = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=direction.dtype, device=direction.device)
    unnormalised = torch.where(at_pole[..., None], half_turn, unnormalised)
    return unnormalised / torch.linalg.vector_norm(unnormalised, dim=-1, keepdim=True)


def minrot(direction: Tensor) -> Tensor:  # [..., 3] unit -> [..., 3, 3]
    """Rotation matrix A with A e_z = u (paper, Eq. 5)."""
    return matrix_from_quaternion(minrot_quaternion(direction))
