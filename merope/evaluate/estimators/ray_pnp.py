"""The pose that explains which rays show which points: perspective-n-point on the sphere, for any lens."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from merope.geometry.poses import rigid, transform
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle

MAX_INLIER_PX = 2.0
MIN_INLIERS = 30
MAX_RAY_DEG = 75.0  # from the axis: what the minimal solver, which works on a plane, may see
MAX_STEPS = 20  # of least squares; it takes five or so


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
    return _refined(pairs, rigid(torch.from_numpy(cv2.Rodrigues(turn)[0]), torch.from_numpy(shift[:, 0])))


def _refined(pairs: RayPairs, pose: Tensor) -> Answer | None:  # [4, 4] ray_camera_from_point_camera
    """Gauss-Newton on the angles between predicted and seen rays, with Tukey's weights: outliers count for nothing."""
    cutoff_rad = MAX_INLIER_PX * pairs.pixel_rad
    for _ in range(MAX_STEPS):
        error, jacobian = _ray_errors(pairs, pose)
        weight = (1.0 - (error.norm(dim=-1) / cutoff_rad).square()).clamp_min(0.0).square()
        if int((weight > 0.0).sum()) < MIN_INLIERS:
            return None
        weighted = (jacobian * weight[:, None, None]).flatten(0, 1)
        step = torch.linalg.solve(weighted.mT @ jacobian.flatten(0, 1), weighted.mT @ error.flatten())
        pose = _small_motion(step) @ pose
        if float(step.abs().max()) < 1e-9:
            break
    return Answer(pose, int((_ray_errors(pairs, pose)[0].norm(dim=-1) < cutoff_rad).sum()))


def _ray_errors(pairs: RayPairs, pose: Tensor) -> tuple[Tensor, Tensor]:  # [N, 3], [N, 3, 6]
    """Seen minus predicted unit rays, and how predictions change with a small motion (turn, shift) of the points.

    A turn ω moves the ray u of a point at distance r by ω × u, a shift τ by (1 − u uᵀ) τ / r.
    """
    points = transform(pose, pairs.points_m)
    distance = points.norm(dim=-1)[:, None, None]
    rays = points / distance[..., 0]
    axes = torch.eye(3, dtype=torch.float64)
    by_turn = torch.linalg.cross(axes.expand(len(rays), 3, 3), rays[:, None], dim=-1).mT
    by_shift = (axes - rays[:, :, None] * rays[:, None]) / distance
    return pairs.rays - rays, torch.cat((by_turn, by_shift), dim=-1)


def _small_motion(step: Tensor) -> Tensor:  # [6] turn in radians, shift in metres -> [4, 4]
    angle_rad = step[:3].norm()
    turn = quaternion_from_axis_angle(step[:3] / angle_rad.clamp_min(1e-300), angle_rad)
    return rigid(matrix_from_quaternion(turn), step[3:])
