"""The paper's operator in plain NumPy, written from its equations alone: the oracle of the tests.

Nothing is shared with the library. Every function names its equation.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RHO = (0.0, 0.05, 0.15, 0.4, 0.7, 1.0)


def skew(v: Array) -> Array:
    return np.array([[0, -v[2], v[1]], [v[2], 0, -v[0]], [-v[1], v[0], 0]])


def minrot(direction: Array) -> Array:
    """Eq. 5; at the pole, where it is undefined, the project's decision: a half turn about y."""
    e_z = np.array([0.0, 0.0, 1.0])
    if np.linalg.norm(e_z + direction) < 1e-6:
        return np.diag([-1.0, 1.0, -1.0])
    v, c = skew(e_z) @ direction, float(e_z @ direction)
    return np.eye(3) + skew(v) + skew(v) @ skew(v) / (1 + c)


def rot(theta: float) -> Array:
    return np.array([[math.cos(theta), -math.sin(theta)], [math.sin(theta), math.cos(theta)]])


def direct_sum(blocks: list[Array]) -> Array:
    size = sum(len(block) for block in blocks)
    out, at = np.zeros((size, size)), 0
    for block in blocks:
        out[at : at + len(block), at : at + len(block)] = block
        at += len(block)
    return out


def anchors(u_infinity: Array, displacement: Array) -> list[Array]:
    """Eq. 9, collapsed to u_infinity where it is undefined."""
    if np.linalg.norm(displacement) < 1e-6:
        return [u_infinity] * len(RHO)
    e = displacement / np.linalg.norm(displacement)
    across = e - (e @ u_infinity) * u_infinity
    if np.linalg.norm(across) < 1e-6:
        return [u_infinity] * len(RHO)
    t, beta = across / np.linalg.norm(across), math.acos(np.clip(e @ u_infinity, -1, 1))
    return [math.cos(rho * beta) * u_infinity + math.sin(rho * beta) * t for rho in RHO]


def operator(
    pose_i: Array, ray_a: Array, position_a: Array, pose_j: Array, ray_b: Array, position_b: Array, head_dim: int
) -> Array:
    """U_ab of Eq. 11: poses are camera-to-world, positions are (time, column, row)."""
    n, m, frequencies, native = {128: (2, 12, 4, (16, 8, 8)), 192: (3, 18, 6, (24, 12, 12))}[head_dim]
    r_ij = pose_i[:3, :3].T @ pose_j[:3, :3]  # Eq. 2
    displacement = pose_i[:3, :3].T @ (pose_j[:3, 3] - pose_i[:3, 3])
    a_query = minrot(ray_a)
    to_anchors = [a_query.T @ minrot(u) for u in anchors(r_ij @ ray_b, displacement)]
    disparity = [block for block in to_anchors for _ in range(n)]  # Eq. 10
    rotation = [a_query.T @ r_ij @ minrot(ray_b)] * m  # Eq. 6
    wavelengths = [0.5 * (200 / 0.5) ** (k / (frequencies - 1)) for k in range(frequencies)]  # Eq. 7
    translation = [rot(2 * math.pi / wave * displacement[c]) for c in range(3) for wave in wavelengths]  # Eq. 8
    axes = [
        rot(10000 ** (-2 * k / dim) * (position_b[axis] - position_a[axis]))
        for axis, dim in enumerate(native)
        for k in range(dim // 2)
    ]
    return direct_sum(disparity + rotation + translation + axes)


def attention(q: Array, k: Array, v: Array, operators: Array) -> Array:
    """Eq. 1 for one head: q [Nq, d], k and v [Nk, d], operators [Nq, Nk, d, d]."""
    logits = np.einsum("ai,abij,bj->ab", q, operators, k) / math.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("ab,abij,bj->ai", weights, operators, v)
