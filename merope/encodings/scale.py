"""One translation scale for a data set: what GTA, PRoPE and UCPE need before they can take metres."""

from collections.abc import Iterable

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.epipolar import BASELINE_FLOOR_M
from merope.geometry.poses import check_rigid


def translation_scale(
    trajectories: Iterable[Tensor],  # of [T, 4, 4] world_from_camera, metres
) -> float:  # 1 / m
    """1 / mean over clips of the largest distance of any camera from the clip's first camera.

    With it the largest translation of a typical clip is 1. The paper fixes one such number from training trajectories
    and does not say how; this statistic is ours. Compute it once, on training clips only, and keep it with the model:
    a scale per clip would take the metres out. Every clip counts, also one that does not move.
    """
    distances_m = [_largest_distance_m(poses, f"trajectories[{i}]") for i, poses in enumerate(trajectories)]
    if not distances_m:
        raise invalid("trajectories", "at least one clip", "none", "pass the poses of the training clips")
    mean_m = sum(distances_m) / len(distances_m)
    if mean_m < BASELINE_FLOOR_M:
        got = f"a mean largest distance of {mean_m:.3g} m over {len(distances_m)} clips"
        raise invalid("trajectories", "clips of which some move", got, "check that the poses are in metres")
    return 1 / mean_m


def _largest_distance_m(
    world_from_camera: Tensor,  # [T, 4, 4]
    name: str,
) -> float:
    poses = check_rigid(world_from_camera, name)
    if poses.ndim != 3 or poses.shape[0] == 0:
        fix = "pass an iterable of clips, a single one as [poses]"
        raise invalid(name, "[T, 4, 4] with T ≥ 1", list(poses.shape), fix)
    centres_m = poses[:, :3, 3]
    return float(torch.linalg.vector_norm(centres_m - centres_m[0], dim=-1).max())
