"""PanShot clips (Zhang et al. 2026): poses of shots cut from panoramas, through unified cameras of many fields of view.

A sample list is a JSON file of {pose_path, x_fov (degrees, horizontal), xi, caption}; poses are .npy (T, 3, 4),
camera-to-world, OpenCV axes, world gravity-aligned with y down. Their unit is that of a SLAM run, not the metre; the
data set divides translations by the depth of the nearest surface (`near_depth`) to make clips comparable.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.datasets.clip import Clip
from merope.errors import invalid
from merope.formats import read
from merope.geometry.lenses import UnifiedCamera
from merope.geometry.poses import rigid

FRAME_RATE_HZ = 16.0


def read_panshot(
    samples: Path,
    root: Path,
    height: int,
    width: int,
    near_depths: Path | None = None,
    zero_first_yaw: bool = True,
) -> list[Clip]:
    """The clips of a sample list, without frames.

    near_depths: JSON lines of {video_id, clip_id, near_depth}: translations are divided by it (the paper's
        "conditioning normalisation on"). None keeps them as they are ("off").
    zero_first_yaw: turn the world about the vertical so that the first camera looks along z; pitch and roll stay.
    """
    depths = None if near_depths is None else read_near_depths(near_depths)
    return [read_sample(row, root, height, width, depths, zero_first_yaw) for row in read_samples(samples)]


def read_samples(samples: Path) -> list[dict[str, Any]]:
    """The rows of a sample list."""
    rows = json.loads(Path(samples).read_text())
    if not isinstance(rows, list) or not rows:
        raise invalid("samples", "a JSON list of samples", samples, "each with pose_path, x_fov, xi and caption")
    return rows


def read_near_depths(path: Path) -> dict[str, float]:
    """Near depth by "<video_id>-<clip_id>"."""
    rows = (json.loads(line) for line in Path(path).read_text().splitlines() if line.strip())
    depths = {f"{row['video_id']}-{row['clip_id']}": float(row["near_depth"]) for row in rows}
    for key, depth in depths.items():
        if not 0 < depth < math.inf:
            raise invalid(f"near_depth of {key}", "positive and finite", depth, "repair or drop this row")
    return depths


def clip_key(pose_file: str) -> str:
    """The "<video_id>-<clip_id>" of "<video_id>-<clip_id>-<k>-<augmentation>_<j>.npy"; video ids may hold dashes."""
    return Path(pose_file).stem.rsplit("-", 2)[0]


def read_sample(
    row: dict[str, Any],
    root: Path,
    height: int,
    width: int,
    depths: dict[str, float] | None,  # of `read_near_depths`
    zero_first_yaw: bool = True,
) -> Clip:
    """The clip of one row, without frames."""
    file = Path(root) / str(row["pose_path"])
    world_from_camera = read(file, "panshot").world_from_camera
    if depths is not None:
        key = clip_key(file.name)
        if key not in depths:
            raise invalid("near_depths", f"a depth for {key}", f"{len(depths)} others", "use the list of this split")
        rotation, centres = world_from_camera[:, :3, :3], world_from_camera[:, :3, 3]
        world_from_camera = rigid(rotation, centres / depths[key])
    if zero_first_yaw:
        world_from_camera = without_first_yaw(world_from_camera)
    count = world_from_camera.shape[0]
    return Clip(
        name=file.stem,
        world_from_camera=world_from_camera,
        lens=UnifiedCamera.from_fov(float(str(row["x_fov"])), float(str(row["xi"])), width, height),
        timestamps_s=torch.arange(count, dtype=torch.float64) / FRAME_RATE_HZ,
        fps=FRAME_RATE_HZ,
        caption=str(row.get("caption", "")),
        is_metric=False,
    )


def without_first_yaw(
    world_from_camera: Tensor,  # [T, 4, 4], world y down
) -> Tensor:  # [T, 4, 4]
    """The world turned about its vertical so that the first camera's forward axis has no x component."""
    forward = world_from_camera[0, :3, 2]
    yaw_rad = math.atan2(float(forward[0]), float(forward[2]))
    c, s = math.cos(-yaw_rad), math.sin(-yaw_rad)
    turn = torch.tensor([[c, 0, s, 0], [0, 1, 0, 0], [-s, 0, c, 0], [0, 0, 0, 1]], dtype=torch.float64)
    return turn @ world_from_camera
