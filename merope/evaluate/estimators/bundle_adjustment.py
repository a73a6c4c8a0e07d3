"""Bundle adjustment of a small scene: views and points that best explain where the points were seen.

Levenberg-Marquardt with Huber's loss; the points are eliminated (Schur complement), which leaves a dense system of six
unknowns per view. Arrays hold every view × point, so this is for hundreds of views and a few thousand points.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

MAX_STEPS = 15
LEAST_GAIN = 1e-4  # of the cost, below which a step was the last
FIRST_DAMPING, MAX_DAMPING = 1e-4, 1e4  # relative to the diagonal; scale, which nothing fixes, needs some
HUBER_PX = 1.0
BEHIND = 1e-3  # depth at which a point counts as not seen


@dataclass(frozen=True, eq=False)
class Scene:
    """T views, camera point = rotation · point + shift, and N points."""

    rotation: Floats  # [T, 3, 3] camera from world
    shift: Floats  # [T, 3]
    points: Floats  # [N, 3]

    def in_cameras(self) -> Floats:  # [T, N, 3]
        return self.points @ self.rotation.transpose(0, 2, 1) + self.shift[:, None]


def adjusted(
    scene: Scene,
    plane: Floats,  # [T, N, 2] where points were seen, on the plane z = 1
    seen: NDArray[np.bool_],  # [T, N]
    pixel: float,  # size of a pixel on the plane
) -> Scene:
    """The scene with least cost near the given one; view 0 stays where it is."""
    plane = np.where(seen[..., None], plane, 0.0)
    cost, damping = _cost(scene, plane, seen, pixel), FIRST_DAMPING
    for _ in range(MAX_STEPS):
        system = _Normal.of(scene, plane, seen, pixel)
        while damping < MAX_DAMPING:
            candidate = system.stepped(scene, damping)
            gain = 1.0 - _cost(candidate, plane, seen, pixel) / cost
            damping = damping / 10.0 if gain > 0.0 else damping * 10.0
            if gain > 0.0:
                break
        else:
            return scene
        scene, cost = candidate, cost * (1.0 - gain)
        if gain < LEAST_GAIN:
            break
    return scene


def _residuals(scene: Scene, plane: Floats, seen: NDArray[np.bool_], pixel: float) -> tuple[Floats, Floats, Floats]:
    """Errors [T, N, 2] in pixels, Huber's weights [T, N] (0 where not seen), points in the cameras [T, N, 3]."""
    local = scene.in_cameras()
    ahead = seen & (local[..., 2] > BEHIND)
    local = np.where(ahead[..., None], local, [0.0, 0.0, 1.0])
    error = (plane - local[..., :2] / local[..., 2:]) / pixel
    size = np.linalg.norm(error, axis=-1)
    return error, np.where(ahead, np.minimum(1.0, HUBER_PX / np.maximum(size, 1e-12)), 0.0), local


def _cost(scene: Scene, plane: Floats, seen: NDArray[np.bool_], pixel: float) -> float:
    error, weight, _ = _residuals(scene, plane, seen, pixel)
    size = np.linalg.norm(error, axis=-1)
    loss = np.where(size < HUBER_PX, 0.5 * size**2, HUBER_PX * (size - 0.5 * HUBER_PX))
    lost = int((seen & (weight == 0.0)).sum())  # a point behind its camera must not pay
    return float(loss[weight > 0.0].sum()) + 1e3 * lost + 1e-12


@dataclass(frozen=True, eq=False)
class _Normal:
    """Blocks of JᵀWJ and JᵀWr for views (turn, then shift) and points."""

    views: Floats  # [T, 6, 6]
    points: Floats  # [N, 3, 3]
    mixed: Floats  # [T, N, 6, 3]
    view_target: Floats  # [T, 6]
    point_target: Floats  # [N, 3]

    @classmethod
    def of(cls, scene: Scene, plane: Floats, seen: NDArray[np.bool_], pixel: float) -> "_Normal":
        error, weight, local = _residuals(scene, plane, seen, pixel)
        by_local = np.zeros((*local.shape[:2], 2, 3))  # of the plane point, by the point in the camera's frame
        by_local[..., 0, 0] = by_local[..., 1, 1] = 1.0 / local[..., 2]
        by_local[..., 2] = -local[..., :2] / local[..., 2:] ** 2
        by_local /= pixel
        by_turn = np.cross(local[..., None, :], by_local)  # a turn ω moves the point p by ω × p
        by_view = np.concatenate((by_turn, by_local), axis=-1)
        by_point = by_local @ scene.rotation[:, None]
        weighted = by_view * weight[..., None, None]
        return cls(
            views=np.einsum("tnai,tnaj->tij", weighted, by_view, optimize=True),
            points=np.einsum("tn,tnai,tnaj->nij", weight, by_point, by_point, optimize=True),
            mixed=weighted.swapaxes(-1, -2) @ by_point,
            view_target=np.einsum("tnai,tna->ti", weighted, error, optimize=True),
            point_target=np.einsum("tn,tnai,tna->ni", weight, by_point, error, optimize=True),
        )

    def stepped(self, scene: Scene, damping: float) -> Scene:
        """The scene after one damped step."""
        count, number = self.mixed.shape[:2]
        inverse = np.linalg.inv(_damped(self.points, damping))
        mixed = self.mixed.transpose(0, 2, 1, 3).reshape(6 * count, 3 * number)
        reduced = (self.mixed @ inverse).transpose(0, 2, 1, 3).reshape(6 * count, 3 * number)
        system = -reduced @ mixed.T
        blocks = _damped(self.views, damping)
        for t in range(count):
            system[6 * t : 6 * t + 6, 6 * t : 6 * t + 6] += blocks[t]
        target = self.view_target.reshape(-1) - reduced @ self.point_target.reshape(-1)
        step = np.zeros(6 * count)
        step[6:] = np.linalg.solve(system[6:, 6:], target[6:])  # view 0 stays
        by_point = self.point_target - (mixed.T @ step).reshape(number, 3)
        turn = _rotations(step.reshape(count, 6)[:, :3])
        shift = np.einsum("tij,tj->ti", turn, scene.shift) + step.reshape(count, 6)[:, 3:]
        points = scene.points + np.einsum("nij,nj->ni", inverse, by_point)
        return Scene(turn @ scene.rotation, shift, points)


def _damped(blocks: Floats, damping: float) -> Floats:  # [n, k, k] -> [n, k, k]
    diagonal = np.einsum("nii->ni", blocks)
    return blocks + (damping * diagonal + 1e-9)[..., None] * np.eye(blocks.shape[-1])


def _rotations(turns: Floats) -> Floats:  # [T, 3] axis · angle in radians -> [T, 3, 3]
    import cv2

    return np.stack([np.asarray(cv2.Rodrigues(turn)[0], np.float64) for turn in turns])
