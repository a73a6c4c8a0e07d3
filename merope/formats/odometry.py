"""Text formats of odometry and SLAM: KITTI, TUM and EuRoC. All metric, all camera- or body-to-world.

KITTI: 12 numbers per line, a 3×4 matrix, row-major; times in a file of their own. TUM: time x y z qx qy qz qw.
EuRoC: CSV of time in ns, position, qw qx qy qz of the IMU body, more columns ignored; needs the camera's place on it.
"""

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import CUT_OFF, Sample, data_lines, data_words, number_table, numbers, shown
from merope.formats.pose_rows import poses_from_quaternions, poses_from_rows, quaternion_rows, required_times, stamps_ns
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text
from merope.geometry.poses import check_rigid, inverse

KITTI_LAYOUT = "r11 r12 r13 t1 r21 r22 r23 t2 r31 r32 r33 t3"
TUM_LAYOUT = "time tx ty tz qx qy qz qw"
EUROC_LAYOUT = "ns px py pz qw qx qy qz"
EUROC_HEADER = (
    "#timestamp [ns],p_RS_R_x [m],p_RS_R_y [m],p_RS_R_z [m],q_RS_w [],q_RS_x [],q_RS_y [],q_RS_z []"  # as EuRoC has it
)
SHORTEST_EUROC_NS = 1e12  # 17 minutes after 1970: smaller numbers are seconds
LARGEST_TIME_S = 2**63 // 10**9  # in nanoseconds 64 bits hold no more


def matches_kitti(sample: Sample) -> bool:
    return len(sample.first_numbers()) == len(KITTI_LAYOUT.split())


def matches_tum(sample: Sample) -> bool:
    """Eight columns; with commas too, unless a header or the size of the times says nanoseconds."""
    for separator in (None, ","):
        row = sample.first_numbers(separator)
        if len(row) == len(TUM_LAYOUT.split()):
            says_ns = sample.lines[0].startswith("#") and "[ns]" in sample.lines[0]
            return separator is None or not (says_ns or row[0] > SHORTEST_EUROC_NS)
    return False


def matches_euroc(sample: Sample) -> bool:
    return len(sample.first_numbers(",")) >= len(EUROC_LAYOUT.split())


def read_kitti(path: Path, times: Path | str | None = None) -> Trajectory:
    """KITTI odometry poses of the left camera. times: the sequence's times.txt, seconds, one per line."""
    places, rows = number_table(path, data_words(path), KITTI_LAYOUT)
    timestamps_s = None
    if times is not None:
        seconds = [numbers(place, words, "seconds")[0] for place, words in data_words(Path(times))]
        if len(seconds) != len(rows):
            fix = "pass the times of this sequence"
            raise invalid(str(times), f"{len(rows)} times, one per pose", f"{len(seconds)} of them", fix)
        timestamps_s = torch.tensor(seconds, dtype=torch.float64)
    return Trajectory(
        world_from_camera=poses_from_rows(places, rows.unflatten(-1, (3, 4))),
        is_metric=True,
        convention="KITTI odometry: camera-to-world, OpenCV axes, metres, as it is in the file",
        timestamps_s=timestamps_s,
        name=path.stem,
    )


def write_kitti(trajectory: Trajectory, path: Path, times: Path | str | None = None) -> None:
    """12 numbers per line; times: a second file for the timestamps, which the format keeps apart."""
    rows = trajectory.world_from_camera[:, :3].flatten(1).tolist()
    replace_text(path, "".join(shown(row) + "\n" for row in rows))
    if times is not None:
        seconds = required_times(trajectory, "kitti with times=")
        replace_text(Path(times), "".join(shown([time_s]) + "\n" for time_s in seconds))


def read_tum(path: Path, body_from_camera: Tensor | None = None) -> Trajectory:
    """A TUM trajectory. body_from_camera [4, 4]: the camera on the tracked body; None if the camera was tracked."""
    _, first = next(data_lines(path), ("", ""))
    lines = data_words(path, "," if "," in first else None)
    places, rows = number_table(path, lines, TUM_LAYOUT)
    times_s, origin_ns = _since_first([_seconds(place, words[0]) for place, words in lines])
    body = "camera" if body_from_camera is None else "body, brought to the camera by body_from_camera"
    return Trajectory(
        world_from_camera=_camera_poses(places, rows[:, 1:4], rows[:, [7, 4, 5, 6]], body_from_camera),
        is_metric=True,
        convention=f"TUM: {body}-to-world, quaternions (x, y, z, w), OpenCV axes, metres, seconds",
        timestamps_s=torch.tensor(times_s, dtype=torch.float64),
        name=path.stem,
        time_origin_ns=origin_ns,
    )


def _seconds(place: str, text: str) -> Decimal:
    """A stamp to the last digit."""
    try:
        return Decimal(text.strip())
    except ArithmeticError:  # an exponent that floats take for 0 or inf
        raise invalid(place, "a time in seconds", repr(text[:40]), CUT_OFF) from None


def _since_first(stamps_s: Sequence[Decimal]) -> tuple[list[float], int]:
    """Seconds since the first stamp, and that stamp in whole ns; what cannot be a time in seconds stays as it is."""
    first = stamps_s[0]
    if not (all(stamp.is_finite() for stamp in stamps_s) and abs(first) < LARGEST_TIME_S):
        return [float(stamp) for stamp in stamps_s], 0
    origin_ns = int(first.scaleb(9))  # what is below a nanosecond stays in the times
    origin_s = Decimal(origin_ns).scaleb(-9)
    return [float(stamp - origin_s) for stamp in stamps_s], origin_ns


def write_tum(trajectory: Trajectory, path: Path, body_from_camera: Tensor | None = None) -> None:
    """time tx ty tz qx qy qz qw, of the camera or of the body that body_from_camera [4, 4] puts it on."""
    times = _clock_times(trajectory)
    rows = _body_rows(trajectory, body_from_camera)[:, [4, 5, 6, 1, 2, 3, 0]].tolist()
    lines = (f"{time} {shown(row)}\n" for time, row in zip(times, rows, strict=True))
    replace_text(path, f"# {TUM_LAYOUT}\n" + "".join(lines))


def _clock_times(trajectory: Trajectory) -> list[str]:
    """Seconds on the source's clock, to the last digit."""
    times_s = required_times(trajectory, "tum")
    if not trajectory.time_origin_ns:
        return [shown([time_s]) for time_s in times_s]
    origin_s = Decimal(trajectory.time_origin_ns).scaleb(-9)
    return [str(origin_s + Decimal(shown([time_s]))) for time_s in times_s]


def read_euroc(path: Path, body_from_camera: Tensor | None = None) -> Trajectory:
    """EuRoC ground truth. body_from_camera [4, 4]: T_BS of the camera's sensor.yaml."""
    body_from_camera = _required_body(body_from_camera)
    width = len(EUROC_LAYOUT.split())
    lines = [(place, words[:width]) for place, words in data_words(path, ",")]
    places, rows = number_table(path, lines, EUROC_LAYOUT)
    stamps = [_whole_ns(place, words[0]) for place, words in lines]
    return Trajectory(
        world_from_camera=_camera_poses(places, rows[:, 1:4], rows[:, 4:8], body_from_camera),
        is_metric=True,
        convention="EuRoC: IMU body-to-world, brought to the camera by body_from_camera; quaternions (w, x, y, z), "
        "metres, times from ns",
        timestamps_s=torch.tensor([(stamp - stamps[0]) / 1e9 for stamp in stamps], dtype=torch.float64),
        name=path.stem,
        time_origin_ns=stamps[0],
    )


def _whole_ns(place: str, text: str) -> int:
    """A stamp to the last digit; 1.4e18 and the like are as good as floats are."""
    stamp = float(text)
    if not abs(stamp) < 2.0**63:
        raise invalid(place, "a time in ns", repr(text[:40]), CUT_OFF)
    return int(text) if text.strip().isdecimal() else round(stamp)


def write_euroc(trajectory: Trajectory, path: Path, body_from_camera: Tensor | None = None) -> None:
    """ns,px,py,pz,qw,qx,qy,qz of the body."""
    stamps = stamps_ns(trajectory, "euroc")
    rows = _body_rows(trajectory, _required_body(body_from_camera))[:, [4, 5, 6, 0, 1, 2, 3]].tolist()
    lines = (f"{stamp},{shown(row, ',')}" for stamp, row in zip(stamps, rows, strict=True))
    replace_text(path, "\n".join((EUROC_HEADER, *lines)) + "\n")


def _required_body(body_from_camera: Tensor | None) -> Tensor:  # [4, 4]
    if body_from_camera is None:
        fix = "pass body_from_camera=T_BS of cam0/sensor.yaml as 4 rows, or the identity if the file holds camera poses"
        raise invalid("body_from_camera", "given for euroc, which tracks the IMU", None, fix)
    return body_from_camera


def _camera_poses(places: list[str], centres: Tensor, wxyz: Tensor, body_from_camera: Tensor | None) -> Tensor:
    poses = poses_from_quaternions(places, wxyz, centres)
    return poses if body_from_camera is None else poses @ _as_pose(body_from_camera)


def _body_rows(trajectory: Trajectory, body_from_camera: Tensor | None) -> Tensor:  # [T, 7] w x y z, x y z
    poses = trajectory.world_from_camera
    if body_from_camera is not None:
        poses = poses @ inverse(_as_pose(body_from_camera))
    return quaternion_rows(poses)


def _as_pose(body_from_camera: Tensor | Sequence[Sequence[float]]) -> Tensor:  # [4, 4]
    """The camera on its body; from a command line it comes as rows."""
    if not isinstance(body_from_camera, Tensor):
        try:
            body_from_camera = torch.tensor(body_from_camera, dtype=torch.float64)
        except (TypeError, ValueError):
            fix = "write [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]] with the numbers of yours"
            raise invalid("body_from_camera", "four rows of four numbers", repr(body_from_camera), fix) from None
    return check_rigid(body_from_camera, "body_from_camera")
