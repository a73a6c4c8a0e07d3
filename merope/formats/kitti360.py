"""KITTI-360's pose tables: a frame number and a matrix per line, in metres, for the frames in which the car moved.

cam0_to_world.txt has 17 columns: rectified left camera to world, 4×4. poses.txt has 13: the car's inertial unit to
world, 3×4; with the folder `calibration` of the data set it gives any of the two rectified cameras.
"""

from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import CUT_OFF, Sample, data_lines, data_words, number_table, numbers, require_rows, shown
from merope.formats.pose_rows import poses_from_rows
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import inverse, rigid

CAMERA_COLUMNS, BODY_COLUMNS = 17, 13
CAMERAS = (0, 1)
TO_POSE, PERSPECTIVE = "calib_cam_to_pose.txt", "perspective.txt"


def matches(sample: Sample) -> bool:
    """Lines of 13 or 17 numbers, the first one whole."""
    row = sample.first_numbers()
    return len(row) in (CAMERA_COLUMNS, BODY_COLUMNS) and row[0] >= 0 and row[0].is_integer()


def read(path: Path, calibration: Path | str | None = None, camera: int = 0) -> Trajectory:
    """Either table. calibration: the data set's folder of that name, for the lens, and needed for poses.txt."""
    if camera not in CAMERAS:
        raise invalid("camera", "0 or 1, the rectified ones, for kitti360", camera, "the others are fisheyes")
    lines = data_words(path)
    require_rows(path, lines, "frame r11 r12 r13 t1 …")
    columns = len(lines[0][1])
    if columns not in (CAMERA_COLUMNS, BODY_COLUMNS):
        expected = f"{CAMERA_COLUMNS} or {BODY_COLUMNS} numbers, the first a frame number"
        raise invalid(lines[0][0], expected, f"{columns} of them", CUT_OFF)
    layout = "frame " + " ".join(f"m{1 + k // 4}{1 + k % 4}" for k in range(columns - 1))
    places, rows = number_table(path, lines, layout)
    poses = poses_from_rows(places, rows[:, 1:].unflatten(-1, (-1, 4)))
    folder = None if calibration is None else Path(calibration)
    said = "rectified left camera to world"
    if columns == BODY_COLUMNS:
        poses, said = _camera_of_body(path, poses, folder, camera), "inertial unit to world, times its camera"
    elif camera != 0:
        raise invalid("camera", f"0 for {path}, whose poses are of that camera", camera, "read poses.txt instead")
    if not bool((rows[:, 0] == rows[:, 0].round()).all() and torch.isfinite(rows[:, 0]).all()):
        raise invalid(str(path), "whole frame numbers", "fractions, NaN or inf", CUT_OFF)
    return Trajectory(
        world_from_camera=poses,
        is_metric=True,
        convention=f"KITTI-360: {said}; OpenCV axes, metres",
        lens=None if folder is None else _lens(folder / PERSPECTIVE, camera),
        frame_names=tuple(f"{int(frame):010d}.png" for frame in rows[:, 0].tolist()),
        name=path.parent.name,
    )


def _camera_of_body(path: Path, poses: Tensor, folder: Path | None, camera: int) -> Tensor:  # [T, 4, 4] -> [T, 4, 4]
    """The rectified camera of a pose of the inertial unit: world_from_body · body_from_camera · R_rectᵀ."""
    if folder is None:
        fix = 'pass calibration="…/calibration", or read cam0_to_world.txt'
        raise invalid("calibration", f"given for {path}, whose poses are of the inertial unit", None, fix)
    body_from_camera = _entry(folder / TO_POSE, f"image_{camera:02d}", (3, 4))
    rectified = _entry(folder / PERSPECTIVE, f"R_rect_{camera:02d}", (3, 3))
    rectified_from_camera = rigid(rectified, torch.zeros(3, dtype=torch.float64))
    place = [f"{folder / TO_POSE} image_{camera:02d}"]
    return poses @ poses_from_rows(place, body_from_camera[None])[0] @ inverse(rectified_from_camera)


def _lens(file: Path, camera: int) -> Pinhole:
    projection = _entry(file, f"P_rect_{camera:02d}", (3, 4))
    width, height = _entry(file, f"S_rect_{camera:02d}", (1, 2))[0].tolist()
    (fx, _, cx, _), (_, fy, cy, _), _ = projection.tolist()
    return Pinhole(fx, fy, cx, cy, int(width), int(height))


def _entry(file: Path, name: str, shape: tuple[int, int]) -> Tensor:
    """The matrix behind `name:` in a file of calibrations."""
    for place, line in data_lines(file):
        if line.startswith(f"{name}:"):
            layout = " ".join(f"m{k}" for k in range(shape[0] * shape[1]))
            values = numbers(place, line.split(":", 1)[1].split(), layout)
            return torch.tensor(values, dtype=torch.float64).reshape(shape)
    raise invalid(str(file), f"a line that begins with {name}:", "none", "pass the data set's folder `calibration`")


def write(trajectory: Trajectory, path: Path) -> None:
    """As cam0_to_world.txt. Frame numbers are those in the names of the images, else 0, 1, 2, …"""
    stems = [Path(name).stem for name in trajectory.frame_names or ()]
    has_numbers = bool(stems) and all(stem.isascii() and stem.isdigit() for stem in stems)
    frames = [int(stem) for stem in stems] if has_numbers else range(trajectory.count)
    rows = trajectory.world_from_camera.flatten(1).tolist()
    replace_text(path, "".join(f"{frame} {shown(row)}\n" for frame, row in zip(frames, rows, strict=True)))
