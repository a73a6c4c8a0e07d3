"""Waymo Open Dataset, version 2: Parquet tables of a segment, in metres, with sensors that look along x.

A folder holds a folder per kind of table, and each of these a file per segment. camera_image has the vehicle's pose at
the moment of every image; vehicle_pose has one per turn of the lidar and stands in where images were not fetched.
camera_calibration has each camera on the vehicle, with x forward, y left and z up, and its lens with distortion. The
shutter rolls, so a pose is that of one moment of its image.
"""

from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import Sample
from merope.formats.pose_rows import poses_from_rows, stamps_ns
from merope.formats.tables import Columns, column_names, image_side, read_table, write_parquet
from merope.formats.trajectory import Trajectory
from merope.geometry.distorted_lenses import BrownConrady
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import VEHICLE_FROM_CAMERA, inverse

VEHICLE, IMAGES, CALIBRATION = "vehicle_pose", "camera_image", "camera_calibration"
SEGMENT, STAMP, CAMERA = "key.segment_context_name", "key.frame_timestamp_micros", "key.camera_name"
POSE_OF = {
    VEHICLE: "[VehiclePoseComponent].world_from_vehicle.transform",
    IMAGES: "[CameraImageComponent].pose.transform",
}
IMAGE_TIME = "[CameraImageComponent].pose_timestamp"
ON_VEHICLE = "[CameraCalibrationComponent].extrinsic.transform"
INTRINSIC = "[CameraCalibrationComponent].intrinsic."
PARAMETERS = {"fx": "f_u", "fy": "f_v", "cx": "c_u", "cy": "c_v"}
DISTORTION = ("k1", "k2", "p1", "p2", "k3")
WIDTH, HEIGHT = "[CameraCalibrationComponent].width", "[CameraCalibrationComponent].height"
CAMERAS = (
    *("UNKNOWN", "FRONT", "FRONT_LEFT", "FRONT_RIGHT", "SIDE_LEFT", "SIDE_RIGHT", "REAR_LEFT", "REAR", "REAR_RIGHT"),
)
"""As camera_name numbers them."""


def matches(sample: Sample) -> bool:
    """A folder of tables, or one of the two tables that have poses."""
    is_folder = CALIBRATION in sample.files and not sample.files.isdisjoint((VEHICLE, IMAGES))
    return is_folder or not sample.columns.isdisjoint(POSE_OF.values())


def read(path: Path, camera: str = "FRONT", segment: str | None = None) -> Trajectory:
    """A camera of a segment. path: the folder of the tables, or a file of vehicle_pose or camera_image in it."""
    number = _number(camera)
    table = _table(path, segment) if path.is_dir() else path
    poses, times_s, origin_ns, kind = _poses(table, number)
    calibration = table.parent.parent / CALIBRATION / table.name
    vehicle_from_camera, lens = _on_vehicle(calibration, number)
    return Trajectory(
        world_from_camera=poses @ vehicle_from_camera,
        is_metric=True,
        convention=f"Waymo 2: {kind}, vehicle to world, times {camera} on the vehicle, whose x axis looks ahead; "
        "turned to OpenCV axes; metres, times from µs",
        timestamps_s=times_s,
        lens=lens,
        name=table.stem,
        time_origin_ns=origin_ns,
    )


def _number(camera: str) -> int:
    if camera not in CAMERAS[1:]:
        raise invalid("camera", f"one of {', '.join(CAMERAS[1:])}", repr(camera), "the front one is FRONT")
    return CAMERAS.index(camera)


def _table(folder: Path, segment: str | None) -> Path:
    """The table of poses of a segment, of the images where there is one."""
    kind = IMAGES if (folder / IMAGES).is_dir() else VEHICLE
    names = sorted(file.stem for file in (folder / kind).glob("*.parquet"))
    if segment is None and len(names) == 1:
        segment = names[0]
    if segment not in names:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        fix = "pass segment=…" if names else "name the folder that holds vehicle_pose and camera_calibration"
        raise invalid("segment", f"one of {shown or 'the files'} in {folder / kind}", repr(segment), fix)
    return folder / kind / f"{segment}.parquet"


def _poses(file: Path, camera: int) -> tuple[Tensor, Tensor, int, str]:  # [T, 4, 4], [T], ns, what they are
    """world_from_vehicle in the order of time."""
    kind = IMAGES if POSE_OF[IMAGES] in column_names(file) else VEHICLE
    more = (CAMERA, IMAGE_TIME) if kind == IMAGES else ()
    table = read_table(file, (SEGMENT, STAMP, POSE_OF[kind], *more))
    segments = sorted({str(name) for name in table.columns[SEGMENT]})
    if len(segments) != 1:
        raise invalid(str(file), "of one segment", f"{len(segments)}: {', '.join(segments)[:80]}", "split it")
    matrices, stamps_us = table.matrices(POSE_OF[kind]), table.whole(STAMP)
    rows = sorted(range(len(stamps_us)), key=stamps_us.__getitem__)
    if kind == IMAGES:
        rows = [row for row in rows if table.columns[CAMERA][row] == camera]
        if not rows:
            raise invalid(str(file), f"images of {CAMERAS[camera]}", "none", "name a camera of this segment")
    first_us = stamps_us[rows[0]]
    times_s = torch.tensor([(stamps_us[row] - first_us) / 1e6 for row in rows], dtype=torch.float64)
    if kind == IMAGES:  # seconds since 1970 in float64, good to 0.2 µs
        moments_s = table.floats(IMAGE_TIME)[rows]
        times_s, first_us = moments_s - moments_s[0], round(1e6 * float(moments_s[0]))
    poses = poses_from_rows([f"{file} row {row}" for row in rows], matrices[rows])
    said = "poses at images" if kind == IMAGES else "poses at turns of the lidar"
    return poses, times_s, 1000 * first_us, said


def _on_vehicle(file: Path, camera: int) -> tuple[Tensor, BrownConrady]:  # [4, 4]
    """A camera with OpenCV axes on the vehicle, and its lens."""
    if not file.is_file():
        fix = f"keep {CALIBRATION} beside the folder of the poses, as the data set does"
        raise invalid(str(file), "there: poses are those of the vehicle", "no such file", fix)
    numbers = {name: f"{INTRINSIC}{column}" for name, column in PARAMETERS.items()}
    numbers |= {name: f"{INTRINSIC}{name}" for name in DISTORTION} | {"width": WIDTH, "height": HEIGHT}
    table = read_table(file, (CAMERA, ON_VEHICLE, *numbers.values()))
    cameras = table.columns[CAMERA]
    if camera not in cameras:
        known = ", ".join(CAMERAS[number] for number in cameras if number in range(1, len(CAMERAS)))
        raise invalid("camera", f"one of {known}", CAMERAS[camera], f"see {file}")
    row = cameras.index(camera)
    place = f"{file} row {row}"
    vehicle_from_sensor = poses_from_rows([place], table.matrices(ON_VEHICLE)[[row]])[0]
    values = {name: float(table.floats(column)[row]) for name, column in numbers.items()}
    width, height = (image_side(place, values.pop(name)) for name in ("width", "height"))
    return vehicle_from_sensor @ VEHICLE_FROM_CAMERA, BrownConrady(width=width, height=height, **values)


def write(trajectory: Trajectory, path: Path, camera: str = "FRONT") -> None:
    """vehicle_pose and camera_calibration of one segment. The camera stands at the vehicle's origin and looks ahead."""
    number = _number(camera)
    stamps_us = [(stamp + 500) // 1000 for stamp in stamps_ns(trajectory, "waymo")]
    intrinsics = _intrinsics(trajectory)
    matrices = (trajectory.world_from_camera @ inverse(VEHICLE_FROM_CAMERA)).flatten(1).tolist()
    poses: Columns = {SEGMENT: ["segment"] * len(stamps_us), STAMP: stamps_us, POSE_OF[VEHICLE]: matrices}
    write_parquet(path / VEHICLE / "segment.parquet", poses, {POSE_OF[VEHICLE]: "matrix"})
    identity = torch.eye(4, dtype=torch.float64).flatten().tolist()
    row: Columns = {SEGMENT: ["segment"], CAMERA: [number], ON_VEHICLE: [identity]}
    row |= {f"{INTRINSIC}{name}": [value] for name, value in intrinsics.items()}
    row |= {WIDTH: [trajectory.lens.width], HEIGHT: [trajectory.lens.height]}  # type: ignore[union-attr]
    types = {CAMERA: "int8", ON_VEHICLE: "matrix", WIDTH: "int32", HEIGHT: "int32"}
    write_parquet(path / CALIBRATION / "segment.parquet", row, types)


def _intrinsics(trajectory: Trajectory) -> dict[str, float]:
    lens = trajectory.lens
    is_plain = isinstance(lens, Pinhole)
    is_brown = isinstance(lens, BrownConrady) and not any(float(getattr(lens, k).max()) for k in ("k4", "k5", "k6"))
    if not (is_plain or is_brown) or lens is None or lens.batch_shape:
        expected = "one Pinhole, or BrownConrady without k4, k5, k6, for waymo"
        raise invalid("trajectory.lens", expected, f"another {type(lens).__name__}", "write merope JSON")
    values = {column: float(getattr(lens, name)) for name, column in PARAMETERS.items()}
    return values | {name: 0.0 if is_plain else float(getattr(lens, name)) for name in DISTORTION}
