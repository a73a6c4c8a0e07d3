"""A log of Argoverse 2: Feather tables of the car's poses in its city and of its cameras on the car, in metres.

city_SE3_egovehicle.feather has the car at every stamp of every sensor. A camera of calibration/ stands on the car by
egovehicle_SE3_sensor.feather, with the axes of OpenCV, and has the lens of intrinsics.feather. Its images are already
undistorted: the k1, k2 and k3 in that table are those of the lens before.
"""

from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import Sample
from merope.formats.pose_rows import poses_from_quaternions, quaternion_rows, stamps_ns
from merope.formats.tables import Columns, Table, image_side, read_table, write_feather
from merope.formats.trajectory import Trajectory
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import VEHICLE_FROM_CAMERA, inverse

POSES = "city_SE3_egovehicle.feather"
EXTRINSICS, INTRINSICS = Path("calibration", "egovehicle_SE3_sensor.feather"), Path("calibration", "intrinsics.feather")
IMAGES = Path("sensors", "cameras")
QUATERNION, CENTRE = ("qw", "qx", "qy", "qz"), ("tx_m", "ty_m", "tz_m")
PINHOLE = ("fx_px", "fy_px", "cx_px", "cy_px")
SIZE = ("width_px", "height_px")
FRONT = "ring_front_center"


def matches(sample: Sample) -> bool:
    """A log's folder, or its table of poses; labels have these columns and others."""
    return POSES in sample.files or sample.columns == {"timestamp_ns", *QUATERNION, *CENTRE}


def read(path: Path, camera: str = FRONT) -> Trajectory:
    """A camera of a log, given by its folder or its table of poses: at the stamps of its images, if they are there."""
    table = read_table(path / POSES if path.is_dir() else path, ("timestamp_ns", *QUATERNION, *CENTRE))
    folder, all_ns = table.path.parent, table.whole("timestamp_ns")
    city_from_car = _rigid_rows(table)
    rows, names, said = _rows_of_images(folder / IMAGES / camera, all_ns)
    first_ns = all_ns[rows[0]]
    return Trajectory(
        world_from_camera=city_from_car[rows] @ _car_from_camera(folder / EXTRINSICS, camera),
        is_metric=True,
        convention=f"Argoverse 2: {said}, car to city, times {camera} on the car; quaternions (w, x, y, z), "
        "OpenCV axes, metres, times from ns",
        timestamps_s=torch.tensor([(all_ns[row] - first_ns) / 1e9 for row in rows], dtype=torch.float64),
        lens=_lens(folder / INTRINSICS, camera),
        frame_names=names,
        name=folder.name,
        time_origin_ns=first_ns,
    )


def _rows_of_images(images: Path, all_ns: list[int]) -> tuple[list[int], tuple[str, ...] | None, str]:
    """Rows in the order of time, all or those with an image; the images' names; and which, in words."""
    ordered = sorted(range(len(all_ns)), key=all_ns.__getitem__)
    if not images.is_dir():
        return ordered, None, "poses at the stamps of all sensors"
    named = {int(file.stem): file.name for file in images.iterdir() if file.stem.isascii() and file.stem.isdigit()}
    rows = [row for row in ordered if all_ns[row] in named]
    if not rows:
        raise invalid(str(images), f"images at stamps of {POSES}", f"{len(named)} others", "is this one log?")
    names = tuple((IMAGES / images.name / named[all_ns[row]]).as_posix() for row in rows)
    return rows, names, f"poses at {len(rows)} of {len(named)} images"


def _rigid_rows(table: Table) -> Tensor:  # [T, 4, 4] float64
    wxyz, centres = (torch.stack([table.floats(name) for name in names], dim=-1) for names in (QUATERNION, CENTRE))
    return poses_from_quaternions([f"{table.path} row {row}" for row in range(len(wxyz))], wxyz, centres)


def _car_from_camera(file: Path, camera: str) -> Tensor:  # [4, 4] float64
    if not file.is_file():
        fix = "read the log with its folder calibration"
        raise invalid(str(file), "there: poses are those of the car", "no such file", fix)
    table = read_table(file, ("sensor_name", *QUATERNION, *CENTRE))
    sensors = table.columns["sensor_name"]
    if camera not in sensors:
        names = ", ".join(sorted(str(name) for name in sensors if "lidar" not in str(name)))
        raise invalid("camera", f"one of {names}", repr(camera), f"see {file.name}")
    return _rigid_rows(table)[sensors.index(camera)]


def _lens(file: Path, camera: str) -> Pinhole | None:
    """None where the table or its row is missing, as it is for the stereo cameras of some logs."""
    if not file.is_file():
        return None
    table = read_table(file, ("sensor_name", *PINHOLE, *SIZE))
    if camera not in table.columns["sensor_name"]:
        return None
    row = table.columns["sensor_name"].index(camera)
    fx, fy, cx, cy, width, height = (float(table.floats(name)[row]) for name in (*PINHOLE, *SIZE))
    place = f"{file} row {row}"
    return Pinhole(fx, fy, cx, cy, image_side(place, width), image_side(place, height))


def write(trajectory: Trajectory, path: Path, camera: str = FRONT) -> None:
    """A folder like a log's. The camera stands at the car's origin and looks ahead; names have no place."""
    lens = trajectory.lens
    if not isinstance(lens, Pinhole) or lens.batch_shape:
        fix = "undistort the images first, or write merope JSON"
        raise invalid("trajectory.lens", "one Pinhole for argoverse2", f"another {type(lens).__name__}", fix)
    stamps: Columns = {"timestamp_ns": stamps_ns(trajectory, "argoverse2")}
    city_from_car = trajectory.world_from_camera @ inverse(VEHICLE_FROM_CAMERA)
    name: Columns = {"sensor_name": [camera]}
    pinhole: Columns = {column: [float(getattr(lens, column.removesuffix("_px")))] for column in PINHOLE}
    distortion: Columns = {column: [0.0] for column in ("k1", "k2", "k3")}
    size: Columns = {"height_px": [lens.height], "width_px": [lens.width]}
    write_feather(path / POSES, stamps | _columns(city_from_car))
    write_feather(path / EXTRINSICS, name | _columns(VEHICLE_FROM_CAMERA[None]))
    write_feather(path / INTRINSICS, name | pinhole | distortion | size)


def _columns(poses: Tensor) -> Columns:  # [T, 4, 4]
    columns = quaternion_rows(poses).unbind(-1)
    return {name: column.tolist() for name, column in zip((*QUATERNION, *CENTRE), columns, strict=True)}
