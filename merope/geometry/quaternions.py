"""Unit quaternions (w, x, y, z): the compact form of a rotation, four numbers, orthogonal by construction."""

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize


def matrix_from_quaternion(quaternion: Tensor) -> Tensor:  # [..., 4] -> [..., 3, 3]
    """Rotation matrix of a unit quaternion."""
    w, x, y, z = quaternion.unbind(-1)
    entries = (
        1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
        2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
        2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
    )  # fmt: skip
    return torch.stack(entries, dim=-1).unflatten(-1, (3, 3))


def quaternion_from_matrix(rotation: Tensor) -> Tensor:  # [..., 3, 3] -> [..., 4]
    """Unit quaternion of a rotation matrix, with the largest of its four components positive.

    Row c of the table below is 4·q_c·q for component c. The row with the largest q_c² is divided by the square root
    of a number that is at least 1, so that no rotation angle is special.
    """
    (r00, r01, r02), (r10, r11, r12), (r20, r21, r22) = (row.unbind(-1) for row in rotation.unbind(-2))
    entries = (
        1 + r00 + r11 + r22, r21 - r12, r02 - r20, r10 - r01,
        r21 - r12, 1 + r00 - r11 - r22, r10 + r01, r02 + r20,
        r02 - r20, r10 + r01, 1 - r00 + r11 - r22, r21 + r12,
        r10 - r01, r02 + r20, r21 + r12, 1 - r00 - r11 + r22,
    )  # fmt: skip
    table = torch.stack(entries, dim=-1).unflatten(-1, (4, 4))
    largest = table.diagonal(dim1=-2, dim2=-1).argmax(dim=-1)
    row = table.gather(-2, largest[..., None, None].expand(*largest.shape, 1, 4)).squeeze(-2)
    return row / torch.linalg.vector_norm(row, dim=-1, keepdim=True)


def multiply(
    a: Tensor,  # [..., 4]
    b: Tensor,  # [..., 4]
) -> Tensor:  # [..., 4]
    """Quaternion of the rotation b followed by the rotation a: R(a·b) = R(a) R(b)."""
    aw, ax, ay, az = a.unbind(-1)
    bw, bx, by, bz = b.unbind(-1)
    entries = (
        aw * bw - ax * bx - ay * by - az * bz,
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
    )
    return torch.stack(entries, dim=-1)


def quaternion_from_axis_angle(
    axis: Tensor,  # [..., 3] unit
    angle_rad: Tensor,  # [...]
) -> Tensor:  # [..., 4]
    """Quaternion of the right-handed turn by `angle_rad` about a unit axis."""
    half = angle_rad / 2
    return torch.cat((half.cos()[..., None], half.sin()[..., None] * axis), dim=-1)


def slerp(a: Tensor, b: Tensor, share: Tensor) -> Tensor:  # [..., 4] unit twice, [...] 0 at a, 1 at b -> [..., 4]
    """Constant turn from a to b, the short way round; opposite orientations (180°) are turned either way."""
    b = torch.where((a * b).sum(-1, keepdim=True) < 0, -b, b)
    half_rad = torch.atan2(torch.linalg.vector_norm(b - a, dim=-1), torch.linalg.vector_norm(b + a, dim=-1))
    angle_rad = 2.0 * half_rad  # at most π/2 after the flip, so sin(angle) vanishes at 0 only
    weight_a = (1 - share) * sinc((1 - share) * angle_rad) / sinc(angle_rad)
    weight_b = share * sinc(share * angle_rad) / sinc(angle_rad)
    return normalize(weight_a[..., None] * a + weight_b[..., None] * b, dim=-1)


def sinc(x: Tensor) -> Tensor:
    """sin(x)/x; torch's own is of πx."""
    return torch.sinc(x / math.pi)
