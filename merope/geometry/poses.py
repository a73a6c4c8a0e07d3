"""Rigid camera poses: `world_from_camera` [..., 4, 4] (camera-to-world), OpenCV axes, metres."""

import torch
from torch import Tensor

from merope.errors import invalid

RIGID_TOLERANCE = 1e-4
"""Largest entry of RᵀR − I that is taken for rounding (text files carry 6 digits) and repaired."""
VEHICLE_FROM_CAMERA = torch.tensor([[0.0, 0, 1, 0], [-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 0, 1]], dtype=torch.float64)
"""A camera that looks ahead (x right, y down, z forward) on a vehicle with x forward, y left, z up."""


def check_rigid(
    world_from_camera: Tensor,  # [..., 4, 4]
    name: str = "world_from_camera",
) -> Tensor:  # [..., 4, 4] float64
    """Validate camera-to-world matrices and return them in float64 with exactly orthonormal rotations.

    Raises ValueError, saying what was expected, what came and how to fix it, for anything that is not a rigid motion.
    """
    check_shape(world_from_camera, name)
    if not bool(torch.isfinite(world_from_camera).all()):
        bad = (~torch.isfinite(world_from_camera)).flatten(-2).any(-1).nonzero()[0].tolist()
        where = f" at index {bad}" if bad else ""  # one pose alone has no index
        fix = "drop these cameras or mark them in has_pose" if bad else "drop this pose"
        raise invalid(name, "finite", f"NaN or inf{where}", fix)
    pose = world_from_camera.to(torch.float64)
    _check_bottom_row(pose, name)
    _check_rotation(pose[..., :3, :3], name)
    return rigid(orthonormalise(pose[..., :3, :3]), pose[..., :3, 3])


def check_shape(world_from_camera: Tensor, name: str) -> None:
    """Refuse what is not a tensor of 4×4 matrices in float32 or float64."""
    if not isinstance(world_from_camera, Tensor):
        raise invalid(name, "a torch.Tensor [..., 4, 4]", type(world_from_camera).__name__, "use torch.as_tensor")
    if world_from_camera.dtype not in (torch.float32, torch.float64):
        fix = "pass the original poses; half precision steps by 0.5 m at 100 m and integers cannot hold a rotation"
        raise invalid(name, "float32 or float64", world_from_camera.dtype, fix)
    if world_from_camera.shape[-2:] != (4, 4):
        raise invalid(name, "[..., 4, 4]", list(world_from_camera.shape), "append the row [0, 0, 0, 1] to 3×4 matrices")


def _check_bottom_row(pose: Tensor, name: str) -> None:
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=pose.dtype, device=pose.device)
    worst = (pose[..., 3, :] - expected).abs().amax(-1)
    if bool((worst > 1e-6).any()):
        index = (worst > 1e-6).nonzero()[0].tolist()
        got = f"{pose[tuple(index)][3].tolist()}" + (f" at index {index}" if index else "")
        raise invalid(f"{name}[..., 3, :]", "[0, 0, 0, 1]", got, "transpose matrices that are written for row vectors")


def _check_rotation(rotation: Tensor, name: str) -> None:
    identity = torch.eye(3, dtype=rotation.dtype, device=rotation.device)
    defect = (rotation.mT @ rotation - identity).abs().amax((-2, -1))
    if bool((defect > RIGID_TOLERANCE).any()):
        index = (defect > RIGID_TOLERANCE).nonzero()[0].tolist()
        got = f"a defect of {float(defect.max()):.3g}, first at index {index}"
        fix = "remove scale and shear, for example by the polar factor of R"
        raise invalid(f"{name}[..., :3, :3]", f"rotations (RᵀR = I within {RIGID_TOLERANCE})", got, fix)
    reflected = torch.linalg.det(rotation) < 0
    if bool(reflected.any()):
        got = f"a reflection at index {reflected.nonzero()[0].tolist()}"
        fix = "flip axes in pairs, from the original poses: OpenGL to OpenCV is R @ diag(1, -1, -1)"
        raise invalid(f"{name}[..., :3, :3]", "proper rotations (det R = +1)", got, fix)


def orthonormalise(rotation: Tensor) -> Tensor:  # [..., 3, 3] nearly orthonormal -> [..., 3, 3]
    """Nearest rotation of a nearly orthonormal matrix.

    Newton's iteration for the polar factor: each step squares the defect, three steps take 1e-3 to rounding. Unlike an
    SVD it has finite gradients at a rotation.
    """
    identity = torch.eye(3, dtype=rotation.dtype, device=rotation.device)
    for _ in range(3):
        rotation = rotation @ (1.5 * identity - 0.5 * rotation.mT @ rotation)
    return rotation


def rigid(
    rotation: Tensor,  # [..., 3, 3]
    translation: Tensor,  # [..., 3]
) -> Tensor:  # [..., 4, 4]
    """Homogeneous matrix [[R, t], [0, 1]]."""
    top = torch.cat((rotation, translation[..., None]), dim=-1)
    bottom = torch.zeros_like(top[..., :1, :])
    bottom[..., 3] = 1
    return torch.cat((top, bottom), dim=-2)


def inverse(world_from_camera: Tensor) -> Tensor:  # [..., 4, 4] -> [..., 4, 4]
    """camera_from_world, in closed form."""
    rotation_t = world_from_camera[..., :3, :3].mT
    return rigid(rotation_t, -(rotation_t @ world_from_camera[..., :3, 3:]).squeeze(-1))


def transform(
    a_from_b: Tensor,  # [..., 4, 4]
    points: Tensor,  # [..., n, 3] in frame b
) -> Tensor:  # [..., n, 3] in frame a
    """Points in another frame."""
    return points @ a_from_b[..., :3, :3].mT + a_from_b[..., None, :3, 3]


def relative(
    world_from_a: Tensor,  # [..., 4, 4]
    world_from_b: Tensor,  # [..., 4, 4]
) -> Tensor:  # [..., 4, 4]
    """a_from_b = (R_aᵀ R_b, R_aᵀ (o_b − o_a)), Eq. 2 of the paper.

    The centres are subtracted before anything else, so coordinates of millions of metres lose nothing.
    """
    rotation_t = world_from_a[..., :3, :3].mT
    displacement = world_from_b[..., :3, 3] - world_from_a[..., :3, 3]
    return rigid(rotation_t @ world_from_b[..., :3, :3], (rotation_t @ displacement[..., None]).squeeze(-1))


def rotation_angle(a: Tensor, b: Tensor) -> Tensor:  # [..., 3, 3] rotations twice -> [...] rad, 0 to π
    """Geodesic distance on SO(3), as the atan2 of sine and cosine.

    The paper's arccos of the trace is the same number, but loses half of all digits at small angles.
    """
    turn = a.mT @ b
    axis = turn[..., [2, 0, 1], [1, 2, 0]] - turn[..., [1, 2, 0], [2, 0, 1]]
    return torch.atan2(axis.norm(dim=-1), turn.diagonal(dim1=-2, dim2=-1).sum(-1) - 1.0)
