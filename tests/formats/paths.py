"""Trajectories that the tests of formats share."""

from dataclasses import fields
from typing import Any

import torch
from scenes import random_poses
from torch import Tensor

from merope.formats.trajectory import Trajectory
from merope.geometry.distorted_lenses import BrownConrady
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.trajectories import unicycle_path

PINHOLE = Pinhole(501.5, 499.25, 322.0, 241.5, 640, 480)
CENTRED = Pinhole(500.0, 500.0, 320.0, 240.0, 640, 480)
WIDE = Pinhole(501.5, 499.25, 410.0, 241.5, 832, 480)
BROWN = BrownConrady(501.5, 499.25, 322.0, 241.5, 640, 480, k1=0.04, k2=-0.3, p1=0.001, p2=-0.002, k3=0.01)
UNIFIED = UnifiedCamera.from_fov(173.0, 1.66, 512, 288)
BODY_FROM_CAMERA = random_poses(1, seed=77)[0]

# What each format needs to be written and read: a lens that it can hold, and options.
NEEDS: dict[str, tuple[Lens | None, dict[str, Any], dict[str, Any]]] = {
    "merope": (PINHOLE, {}, {}),
    "re10k": (PINHOLE, {}, {"image_size": (640, 480)}),
    "kitti": (None, {}, {}),
    "tum": (None, {}, {}),
    "euroc": (None, {"body_from_camera": BODY_FROM_CAMERA}, {"body_from_camera": BODY_FROM_CAMERA}),
    "colmap": (PINHOLE, {}, {}),
    "nerfstudio": (PINHOLE, {}, {}),
    "blender": (CENTRED, {}, {"image_size": (640, 480)}),
    "recammaster": (None, {}, {}),
    "panshot": (UNIFIED, {}, {"image_size": (512, 288)}),
    "kitti360": (None, {}, {}),
    "argoverse2": (PINHOLE, {}, {}),
    "waymo": (BROWN, {}, {}),
    "lingbot": (WIDE, {}, {}),
    "vggt": (PINHOLE, {}, {}),
    "da3": (PINHOLE, {}, {}),
    "mapanything": (PINHOLE, {}, {}),
    "keys": (None, {"fps": 8.0}, {"fps": 8.0}),
}
METRIC = ("kitti", "tum", "euroc", "recammaster", "kitti360", "argoverse2", "waymo", "mapanything", "keys")
FOLDERS = {
    "colmap": ("cameras.txt", "images.txt"),
    "argoverse2": (
        *("city_SE3_egovehicle.feather", "calibration/egovehicle_SE3_sensor.feather"),
        "calibration/intrinsics.feather",
    ),
    "waymo": ("vehicle_pose/segment.parquet", "camera_calibration/segment.parquet"),
    "lingbot": ("poses.npy", "intrinsics.npy"),
}
"""Formats of several files, which are named by their folder."""


def random_trajectory(format: str, count: int = 7, seed: int = 0, spread_m: float = 5.0) -> Trajectory:
    """A path that the format can hold, with times that its unit can."""
    return Trajectory(
        world_from_camera=_random_poses(format, count, seed, spread_m),
        is_metric=format in METRIC,
        convention="made for a test",
        timestamps_s=3.0 + torch.arange(count, dtype=torch.float64) / 8,
        lens=NEEDS[format][0],
        frame_names=tuple(f"images/frame_{k}.png" for k in range(count)),
        name="https://example.org/watch?v=1",
    )


def _random_poses(format: str, count: int, seed: int, spread_m: float) -> Tensor:  # [T, 4, 4]
    """Anywhere, but for formats that hold level drives only."""
    if format != "keys":
        return random_poses(count, seed=seed, spread_m=spread_m)
    speed, yaw_rate = torch.randn(2, count - 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return unicycle_path(spread_m * speed, yaw_rate, 8.0)


def lens_difference(a: Lens | None, b: Lens | None) -> float:
    """Largest relative difference of two lenses' parameters; infinite for different kinds."""
    if a is None or b is None or type(a) is not type(b) or a.batch_shape != b.batch_shape:
        return float("inf")
    names = [f.name for f in fields(a) if f.init]  # type: ignore[arg-type]
    pairs = [(torch.as_tensor(getattr(a, n)).double(), torch.as_tensor(getattr(b, n)).double()) for n in names]
    return max(float(((x - y).abs() / x.abs().clamp_min(1.0)).max()) for x, y in pairs)


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())
