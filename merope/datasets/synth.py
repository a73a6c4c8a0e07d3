"""Write small data sets in the layouts of the real ones, so that every reader can be tried without a download."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.formats import write
from merope.formats.parts import Part, forget_parts, note_finished, own_or_all, part_folder, say_lost_parts
from merope.formats.trajectory import Trajectory
from merope.formats.video import as_bytes, write_image, write_video
from merope.formats.writing import replace_text
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import VEHICLE_FROM_CAMERA, inverse
from merope.geometry.quaternions import quaternion_from_matrix
from merope.geometry.trajectories import driving_path
from merope.world.clips import DRIVE, dice
from merope.world.render import render
from merope.world.scene import World

MAP_FROM_WORLD = VEHICLE_FROM_CAMERA
"""nuScenes maps have z up; worlds here have y down."""

EGO_FROM_CAMERA = torch.tensor([[0.0, 0, 1, 1.7], [-1, 0, 0, 0], [0, -1, 0, 1.5], [0, 0, 0, 1]], dtype=torch.float64)
"""A front camera on a car with x forward, y left, z up."""

FRAME_RATE_HZ = 12.0
FRAMES_PER_SAMPLE = 6  # every so many frames, one is a key frame

TABLES = (
    *("category", "attribute", "visibility", "instance", "sensor", "calibrated_sensor", "ego_pose", "log"),
    *("scene", "sample", "sample_data", "sample_annotation", "map"),
)
"""All that the official devkit loads. Nothing is annotated, so that some are empty."""

Paint = Callable[[Cameras], Tensor]  # -> uint8 [V, H, W, 3]
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Drive:
    """One scene: poses in a y-down world, a start time, what a person would say about it, and where it was."""

    world_from_camera: Tensor  # [T, 4, 4]
    description: str
    location: str = "synthville"
    start_us: int = 1_600_000_000_000_000


def synthesise_nuscenes(
    root: Path, version: str, scenes: int, frames: int, height: int, width: int, seed: int, part: Part | None = None
) -> None:
    """Write a data set of random drives through procedural streets, one world a scene, in nuScenes' layout.

    `root` is new or empty: what another data set left there is neither replaced nor mixed in. It may also hold what an
    earlier run or parts of the same data set have made. A part renders its own scenes alone.
    """
    lens = _lens(root, scenes, frames, height, width, {"layout": "nuscenes", "version": version, "seed": seed})
    drives = [_random_drive(frames, seed + number, number) for number in range(scenes)]
    for number, images in _render_missing(root, drives, lens, seed, part):
        names = _write_drive({name: [] for name in TABLES}, number, drives[number], lens, _token("calibration"))
        for name, image in zip(names, images, strict=True):
            write_image(image, root / name)
    if part is None:
        write_nuscenes(root, version, drives, lens)
        forget_parts(root)


def synthesise_videos(
    root: Path, scenes: int, frames: int, height: int, width: int, seed: int, part: Part | None = None
) -> None:
    """Write the same drives as videos with pose files, and the lists of clips that `kind = "videos"` reads.

    The last scene is the clip of val.jsonl, all others are those of train.jsonl. A single one is in both.
    """
    if height % 2 or width % 2:
        raise invalid("size", "even in height and width", f"{height}×{width}", "H.264 wants it")
    lens = _lens(root, scenes, frames, height, width, {"layout": "videos", "seed": seed})
    times_s = torch.arange(frames, dtype=torch.float64) / FRAME_RATE_HZ
    drives = [_random_drive(frames, seed + number, number) for number in range(scenes)]
    for number, images in _render_missing(root, drives, lens, seed, part):
        name, drive = f"scene-{number:04d}", drives[number]
        write_video(images, root / "videos" / f"{name}.mp4", FRAME_RATE_HZ)
        path = Trajectory(drive.world_from_camera, True, "merope data synth", times_s, lens, name=name)
        write(path, root / "poses" / f"{name}.json")
    if part is not None:
        return
    names = [f"scene-{number:04d}" for number in range(scenes)]
    rows = [
        {"id": name, "video": f"videos/{name}.mp4", "poses": f"poses/{name}.json", "caption": drive.description}
        for name, drive in zip(names, drives, strict=True)
    ]
    for file, some in (("train.jsonl", rows[:-1] or rows), ("val.jsonl", rows[-1:])):
        replace_text(root / file, "".join(json.dumps(row) + "\n" for row in some))
    forget_parts(root)


def _lens(root: Path, scenes: int, frames: int, height: int, width: int, settings: dict[str, Any]) -> Pinhole:
    """A view of 65° like nuScenes', after the arguments were checked."""
    for name, value, least in (("scenes", scenes, 1), ("frames", frames, 2)):
        if value < least:
            raise invalid(name, f"at least {least}", value, "a data set has scenes, and scenes move")
    text = json.dumps(settings | {"scenes": scenes, "frames": frames, "size": [height, width]})
    begun = part_folder(root) / "settings.json"
    is_same = begun.is_file() and begun.read_text() == text
    if root.exists() and any(root.iterdir()) and not is_same:  # versions share images by name: another's would differ
        raise invalid("out", "a new or empty folder", f"{root}, which holds files", "name another, or delete it first")
    replace_text(begun, text)
    return Pinhole(0.79 * width, 0.79 * width, width / 2, height / 2, width, height)


def _random_drive(frames: int, seed: int, number: int) -> Drive:
    path = driving_path(frames, FRAME_RATE_HZ, dice(seed, DRIVE), prefix=1)
    return Drive(path, f"a drive through street {seed}", start_us=1_600_000_000_000_000 + number * 10**9)


def _render_missing(
    root: Path, drives: Sequence[Drive], lens: Pinhole, seed: int, part: Part | None
) -> Iterator[tuple[int, Tensor]]:  # number, uint8 [T, H, W, 3]
    """What each drive sees of a world of its own, but for those that are there. The caller writes it, then goes on."""
    if part is None:
        say_lost_parts(root)
    done = {number: part_folder(root) / f"scene-{number:04d}" for number in range(len(drives))}
    missing = [number for number in own_or_all(range(len(drives)), part) if not done[number].exists()]
    progress = ProgressLine("rendering", len(missing), "scenes")
    for count, number in enumerate(missing, start=1):
        poses = drives[number].world_from_camera
        world, cameras = World(seed + number).cleared(poses), Cameras(poses, lens)
        yield number, as_bytes(render(world, cameras, lens.height, lens.width).image)
        replace_text(done[number], "")
        progress.show(count)
    if part is not None:
        note_finished(root, part)


def write_nuscenes(
    root: Path, version: str, drives: Sequence[Drive], lens: Pinhole, paint: Paint | None = None
) -> None:
    """Tables, and images with `paint`, of a front camera as in nuScenes: samples/ has key frames, sweeps/ the rest."""
    tables: dict[str, list[Row]] = {name: [] for name in TABLES}
    sensor, calibration = _token("sensor"), _token("calibration")
    tables["sensor"].append({"token": sensor, "channel": "CAM_FRONT", "modality": "camera"})
    matrix = [[float(lens.fx), 0.0, float(lens.cx)], [0.0, float(lens.fy), float(lens.cy)], [0.0, 0.0, 1.0]]
    tables["calibrated_sensor"].append(
        {"token": calibration, "sensor_token": sensor, **_pose_fields(EGO_FROM_CAMERA), "camera_intrinsic": matrix}
    )
    for number, drive in enumerate(drives):
        names = _write_drive(tables, number, drive, lens, calibration)
        if paint is not None:
            images = paint(Cameras(drive.world_from_camera, lens))
            for name, image in zip(names, images, strict=True):
                write_image(image, Path(root) / name)
    for location in dict.fromkeys(drive.location for drive in drives):
        tables["map"].append(_write_map(root, location, tables["log"]))
    for name, rows in tables.items():
        replace_text(Path(root) / version / f"{name}.json", json.dumps(rows, indent=0))


def _write_map(root: Path, location: str, logs: Sequence[Row]) -> Row:
    """The row of a location's map. Its mask, which the devkit wants to see, calls all ground drivable."""
    token = _token("map", location)
    write_image(torch.full((64, 64), 255, dtype=torch.uint8), Path(root) / "maps" / f"{token}.png")
    there = [log["token"] for log in logs if log["location"] == location]
    return {"token": token, "log_tokens": there, "category": "semantic_prior", "filename": f"maps/{token}.png"}


def _write_drive(tables: dict[str, list[Row]], number: int, drive: Drive, lens: Pinhole, calibration: str) -> list[str]:
    """Append the rows of one scene; returns its image files."""
    scene, log, count = _token("scene", number), _token("log", number), drive.world_from_camera.shape[0]
    times_us = [drive.start_us + round(1e6 * index / FRAME_RATE_HZ) for index in range(count)]
    about = {"logfile": f"log-{number:04d}", "location": drive.location, "vehicle": "synth"}
    tables["log"].append({"token": log, **about, "date_captured": "2020-09-13"})
    samples: list[Row] = [
        {"token": _token("sample", number, index), "scene_token": scene, "timestamp": times_us[index]}
        for index in range(0, count, FRAMES_PER_SAMPLE)
    ]
    row = {"token": scene, "name": f"scene-{number:04d}", "log_token": log, "description": drive.description}
    ends = {"first_sample_token": samples[0]["token"], "last_sample_token": samples[-1]["token"]}
    tables["scene"].append({**row, **ends, "nbr_samples": len(samples)})
    ego = MAP_FROM_WORLD @ drive.world_from_camera @ inverse(EGO_FROM_CAMERA)
    images: list[Row] = []
    for index, time_us in enumerate(times_us):
        is_key = index % FRAMES_PER_SAMPLE == 0
        name = f"{'samples' if is_key else 'sweeps'}/CAM_FRONT/scene{number:04d}__CAM_FRONT__{time_us}.jpg"
        pose = _token("ego", number, index)
        tables["ego_pose"].append({"token": pose, "timestamp": time_us, **_pose_fields(ego[index])})
        row = {"token": _token("image", number, index), "sample_token": samples[index // FRAMES_PER_SAMPLE]["token"]}
        row |= {"ego_pose_token": pose, "calibrated_sensor_token": calibration, "filename": name, "fileformat": "jpg"}
        size = {"width": lens.width, "height": lens.height}
        images.append({**row, **size, "timestamp": time_us, "is_key_frame": is_key})
    tables["sample"] += _chained(samples)
    tables["sample_data"] += _chained(images)
    return [image["filename"] for image in images]


def _chained(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows in order of time, each with the tokens of its neighbours; the ends have none."""
    for row in rows:
        row |= {"prev": "", "next": ""}
    for before, after in pairwise(rows):
        before["next"], after["prev"] = after["token"], before["token"]
    return rows


def _pose_fields(pose: Tensor) -> dict[str, list[float]]:
    return {"translation": pose[:3, 3].tolist(), "rotation": quaternion_from_matrix(pose[:3, :3]).tolist()}


def _token(*parts: object) -> str:
    return hashlib.md5("/".join(map(str, parts)).encode(), usedforsecurity=False).hexdigest()
