"""What the pose metrics see and do not see: the table of docs/evaluation.md.

    python benchmarks/metric_blind_spots.py

One commanded path of 25 m in 49 frames, straight and then 31° to the right, against estimates that are wrong in one
known way each. ATE takes the estimate for metric.
"""

import math

import torch
from torch import Tensor

from merope.evaluate.auc import pose_auc
from merope.evaluate.metrics import PoseMetrics, pose_metrics
from merope.geometry.poses import inverse, rigid
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle
from merope.geometry.trajectories import unicycle_path

FRAMES, LENGTH_M, TURN_DEG, RATE_HZ = 49, 25.0, 31.0, 12.0


def commanded_path() -> Tensor:  # [49, 4, 4] world_from_camera
    """Straight for half of the way, then an arc."""
    steps = FRAMES - 1
    speed_m_s = torch.full((steps,), LENGTH_M / steps * RATE_HZ, dtype=torch.float64)
    yaw_rate_rad_s = torch.zeros(steps, dtype=torch.float64)
    yaw_rate_rad_s[steps // 2 :] = math.radians(TURN_DEG) / (steps // 2) * RATE_HZ
    return unicycle_path(speed_m_s, yaw_rate_rad_s, RATE_HZ)


def yawed(path: Tensor, frame: int, angle_deg: float) -> Tensor:  # [T, 4, 4] twice
    """One camera of the path turned about its own vertical."""
    axis = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    angle_rad = torch.tensor(math.radians(angle_deg), dtype=torch.float64)
    turned = path.clone()
    turned[frame, :3, :3] = path[frame, :3, :3] @ matrix_from_quaternion(quaternion_from_axis_angle(axis, angle_rad))
    return turned


def scaled(path: Tensor, factor: float) -> Tensor:  # [T, 4, 4] twice
    """All centres multiplied."""
    return rigid(path[:, :3, :3], factor * path[:, :3, 3])


def with_outlier(path: Tensor, distance_m: float) -> Tensor:  # [T, 4, 4] twice
    """The last camera further ahead."""
    moved = path.clone()
    moved[-1, :3, 3] += distance_m * moved[-1, :3, 2]
    return moved


def estimates(path: Tensor) -> dict[str, Tensor]:  # [T, 4, 4] each
    """The path as an estimator might report it after one thing went wrong."""
    return {
        "none": path,
        "half the speed": scaled(path, 0.5),
        "driven backwards": scaled(path, -1.0),
        "2.5° yaw in frame 1 only": yawed(path, 0, 2.5),
        "2.5° yaw in frame 25 only": yawed(path, 24, 2.5),
        "last camera 25 m too far": with_outlier(path, 25.0),
        "standing still, turning": scaled(path, 0.0),
        "world-to-camera matrices": inverse(path),
    }


def row(name: str, metrics: PoseMetrics, auc_3: float, auc_10: float) -> str:
    """One line of the table."""
    numbers = (metrics.rot_deg, metrics.tr_percent, auc_3, auc_10, metrics.cammc, metrics.trans_err, metrics.scale)
    cells = [f"{number:.2f}" for number in (*numbers, metrics.ate_m)]
    return f"| {name} | {' | '.join(cells)} | {'yes' if metrics.reversed_motion else 'no'} |"


def main() -> None:
    """Print the table."""
    print("| what is wrong | rot° | tr% | AUC@3 | AUC@10 | CamMC | TransErr | s* | ATE (m) | reversed |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    path = commanded_path()
    for name, estimate in estimates(path).items():
        aucs = (pose_auc([(path, estimate)], tau) for tau in (3, 10))
        print(row(name, pose_metrics(path, estimate, is_metric=True), *aucs))


if __name__ == "__main__":
    main()
