"""Write small data sets in the layouts of the real ones, so that every reader can be tried without a download."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.video import write_image
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import inverse
from merope.geometry.quaternions import quaternion_from_matrix
from merope.geometry.trajectories import driving_path
from merope.world.clips import DRIVE, dice
from merope.world.render import render
from merope.world.scene import World

MAP_FROM_WORLD = torch.tensor([[0.0, 0, 1, 0], [-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 0, 1]], dtype=torch.float64)
"""nuScenes maps have z up; worlds here have y down."""

EGO_FROM_CAMERA = torch.tensor([[0.0, 0, 1, 1.7], [-1, 0, 0, 0], [0, -1, 0, 1.5], [0, 0, 0, 1]], dtype=torch.float64)
"""A front camera on a car with x forward, y left, z up."""

Paint = Callable[[Cameras], Tensor]  # -> uint8 [V, H, W, 3]


@dataclass(frozen=True, eq=False)
class Drive:
    """One scene: poses in a y-down world, a start time, what a person would say about it, and where it was."""

    world_from_camera: Tensor  # [T, 4, 4]
    description: str
    location: str = "synthville"
    start_us: int = 1_600_000_000_000_000


def synthesise_nuscenes(root: Path, version: str, scenes: int, frames: int, height: int, width: int, seed: int) -> None:
    """A data set of random drives through procedural streets, one world a scene, in nuScenes' layout.

    `root` is new or empty: what another data set left there is neither replaced nor mixed in.
    """
    for name, value, least in (("scenes", scenes, 1), ("frames", frames, 2)):
        if value < least:
            raise invalid(name, f"at least {least}", value, "a data set has scenes, and scenes move")
    if root.exists() and any(root.iterdir()):  # versions share images by name: another's would show other streets
        raise invalid("out", "a new or empty folder", f"{root}, which holds files", "name another, or delete it first")
    lens = Pinhole(0.79 * width, 0.79 * width, width / 2, height / 2, width, height)  # 65° like nuScenes
    drives, worlds = [], []
    for number in range(scenes):
        path = driving_path(frames, 12.0, dice(seed + number, DRIVE), prefix=1)
        world = World(seed + number).cleared(path)
        drives.append(
            Drive(path, f"a drive through street {seed + number}", start_us=1_600_000_000_000_000 + number * 10**9)
        )
        worlds.append(world)
    remaining = iter(worlds)

    def paint(cameras: Cameras) -> Tensor:  # uint8 [V, H, W, 3]
        print(f"rendering {cameras.count} frames", file=sys.stderr)
        image = render(next(remaining), cameras, height, width).image
        return (255 * image).round().to(torch.uint8)

    write_nuscenes(root, version, drives, lens, paint)


def write_nuscenes(
    root: Path,
    version: str,
    drives: Sequence[Drive],
    lens: Pinhole,
    paint: Paint | None = None,
    frame_rate_hz: float = 12.0,
    frames_per_sample: int = 6,
) -> None:
    """Tables, and images with `paint`, of a front camera as in nuScenes: samples/ has key frames, sweeps/ the rest."""
    tables: dict[str, list[dict[str, object]]] = {
        name: [] for name in ("scene", "log", "sample", "sample_data", "ego_pose", "sensor", "calibrated_sensor")
    }
    sensor, calibration = _token("sensor"), _token("calibration")
    tables["sensor"].append({"token": sensor, "channel": "CAM_FRONT", "modality": "camera"})
    matrix = [[float(lens.fx), 0.0, float(lens.cx)], [0.0, float(lens.fy), float(lens.cy)], [0.0, 0.0, 1.0]]
    tables["calibrated_sensor"].append(
        {"token": calibration, "sensor_token": sensor, **_pose_fields(EGO_FROM_CAMERA), "camera_intrinsic": matrix}
    )
    for number, drive in enumerate(drives):
        names = _write_drive(tables, number, drive, lens, calibration, frame_rate_hz, frames_per_sample)
        if paint is not None:
            images = paint(Cameras(drive.world_from_camera, lens))
            for name, image in zip(names, images, strict=True):
                write_image(image, Path(root) / name)
    folder = Path(root) / version
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=0))


def _write_drive(
    tables: dict[str, list[dict[str, object]]],
    number: int,
    drive: Drive,
    lens: Pinhole,
    calibration: str,
    frame_rate_hz: float,
    frames_per_sample: int,
) -> list[str]:
    """Append the rows of one scene; returns its image files."""
    scene, log = _token("scene", number), _token("log", number)
    tables["log"].append({"token": log, "logfile": f"log-{number:04d}", "location": drive.location, "vehicle": "synth"})
    count = drive.world_from_camera.shape[0]
    sample_tokens = [_token("sample", number, index) for index in range(0, count, frames_per_sample)]
    scene_row = {"token": scene, "name": f"scene-{number:04d}", "log_token": log, "description": drive.description}
    tables["scene"].append({**scene_row, "nbr_samples": len(sample_tokens)})
    times_us = [drive.start_us + round(1e6 * index / frame_rate_hz) for index in range(count)]
    for index, token in enumerate(sample_tokens):
        tables["sample"].append(
            {"token": token, "scene_token": scene, "timestamp": times_us[index * frames_per_sample]}
        )
    ego = MAP_FROM_WORLD @ drive.world_from_camera @ inverse(EGO_FROM_CAMERA)
    names = []
    for index, time_us in enumerate(times_us):
        is_key = index % frames_per_sample == 0
        name = f"{'samples' if is_key else 'sweeps'}/CAM_FRONT/scene{number:04d}__CAM_FRONT__{time_us}.jpg"
        pose = _token("ego", number, index)
        tables["ego_pose"].append({"token": pose, "timestamp": time_us, **_pose_fields(ego[index])})
        row = {"token": _token("image", number, index), "sample_token": sample_tokens[index // frames_per_sample]}
        row |= {"ego_pose_token": pose, "calibrated_sensor_token": calibration, "filename": name, "fileformat": "jpg"}
        size = {"width": lens.width, "height": lens.height}
        tables["sample_data"].append({**row, **size, "timestamp": time_us, "is_key_frame": is_key})
        names.append(name)
    return names


def _pose_fields(pose: Tensor) -> dict[str, list[float]]:
    return {"translation": pose[:3, 3].tolist(), "rotation": quaternion_from_matrix(pose[:3, :3]).tolist()}


def _token(*parts: object) -> str:
    return hashlib.md5("/".join(map(str, parts)).encode(), usedforsecurity=False).hexdigest()
