"""The pose that explains which rays show which points: perspective-n-point on the sphere, for any lens."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from merope.geometry.poses import transform

Floats = NDArray[np.float64]
MAX_INLIER_PX = 2.0
MIN_INLIERS = 30
MAX_RAY_DEG = 75.0  # from the axis: what the minimal solver, which works on a plane, may see
MAX_STEPS = 20  # of least squares; with outliers it takes most of them


@dataclass(frozen=True, eq=False)
class RayPairs:
    """Points in one camera's frame, and the unit rays on which another camera sees them."""

    points_m: Tensor  # [N, 3] float64
    rays: Tensor  # [N, 3] float64
    pixel_rad: float  # angle of a pixel at the centre of the image

    def motion_px(self, ray_camera_from_point_camera: Tensor) -> float:  # [4, 4]
        """How far the points move across the image between the two cameras, on average."""
        moved = transform(ray_camera_from_point_camera, self.points_m)
        turn_rad = (normalize(moved, dim=-1) - normalize(self.points_m, dim=-1)).norm(dim=-1)
        return float(turn_rad.mean()) / self.pixel_rad


@dataclass(frozen=True, eq=False)
class Answer:
    ray_camera_from_point_camera: Tensor  # [4, 4] float64
    inliers: int


def solve(pairs: RayPairs, seed: int) -> Answer | None:
    """RANSAC on the plane z = 1, then least squares on the sphere; None if too few pairs agree."""
    import cv2

    ahead = pairs.rays[:, 2] > math.cos(math.radians(MAX_RAY_DEG))
    if int(ahead.sum()) < MIN_INLIERS:
        return None
    plane = (pairs.rays[ahead, :2] / pairs.rays[ahead, 2:]).numpy()
    cv2.setRNGSeed(seed)
    found, turn, shift, _ = cv2.solvePnPRansac(
        pairs.points_m[ahead].numpy(), plane, np.eye(3), np.zeros(4), iterationsCount=200,
        reprojectionError=MAX_INLIER_PX * pairs.pixel_rad, confidence=0.9999, flags=cv2.SOLVEPNP_SQPNP,
    )  # fmt: skip
    if not found:
        return None
    return _refined(pairs, _rigid(turn[:, 0], shift[:, 0]))


def _refined(pairs: RayPairs, pose: Floats) -> Answer | None:  # [4, 4] ray_camera_from_point_camera
    """Gauss-Newton on the angles between predicted and seen rays, with Tukey's weights: outliers count for nothing."""
    points, seen = (np.ascontiguousarray(part.numpy().T) for part in (pairs.points_m, pairs.rays))  # each [3, N]
    cutoff_rad = MAX_INLIER_PX * pairs.pixel_rad
    for _ in range(MAX_STEPS):
        rays, distance_m, error_rad = _predicted(points, seen, pose)
        weight = np.square(np.maximum(1.0 - np.square(error_rad / cutoff_rad), 0.0))
        if np.count_nonzero(weight) < MIN_INLIERS:
            return None
        step = np.linalg.solve(*_normal_equations(rays, seen, weight, distance_m))
        pose = _rigid(step[:3], step[3:]) @ pose
        if np.abs(step).max() < 1e-9:
            break
    inliers = int(np.count_nonzero(_predicted(points, seen, pose)[2] < cutoff_rad))
    return Answer(torch.from_numpy(pose), inliers)


def _predicted(
    points_m: Floats,  # [3, N]
    seen: Floats,  # [3, N] unit rays
    pose: Floats,  # [4, 4]
) -> tuple[Floats, Floats, Floats]:  # [3, N], [N], [N]
    """Unit rays of the points as the pose has them, distances in metres, and how far the seen rays are from them."""
    moved = pose[:3, :3] @ points_m + pose[:3, 3:]
    distance_m = _lengths(moved)
    rays = moved / distance_m
    return rays, distance_m, _lengths(seen - rays)


def _lengths(vectors: Floats) -> Floats:  # [3, N] -> [N]
    x, y, z = vectors
    return np.asarray(np.sqrt(x * x + y * y + z * z))


def _normal_equations(
    rays: Floats,  # [3, N] predicted unit rays
    seen: Floats,  # [3, N]
    weight: Floats,  # [N]
    distance_m: Floats,  # [N]
) -> tuple[Floats, Floats]:  # [6, 6], [6]
    """Of the small motion (turn, shift) of the points that brings predicted rays to the seen ones.

    A turn ω moves the ray u of a point at distance r by ω × u, a shift τ by (1 − u uᵀ) τ / r. Products of these are
    made of 1 − u uᵀ and of cross products with u: there is no need to build the derivatives of every point.
    """
    matrix, vector, near = np.empty((6, 6)), np.empty(6), weight / distance_m
    matrix[:3, :3] = np.eye(3) * weight.sum() - (rays * weight) @ rays.T
    matrix[3:, 3:] = np.eye(3) * (near / distance_m).sum() - (rays * (near / distance_m)) @ rays.T
    x, y, z = rays @ near
    matrix[:3, 3:] = [[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]]
    matrix[3:, :3] = matrix[:3, 3:].T
    (_, xy, xz), (yx, _, yz), (zx, zy, _) = (rays * weight) @ seen.T
    vector[:3] = yz - zy, zx - xz, xy - yx
    vector[3:] = seen @ near - rays @ (near * (rays * seen).sum(axis=0))
    return matrix, vector


def _rigid(turn_rad: NDArray[Any], shift_m: NDArray[Any]) -> Floats:  # [3] axis times angle, [3] -> [4, 4]
    import cv2

    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = cv2.Rodrigues(turn_rad)[0], shift_m
    return pose
