"""RealEstate10K text, also the pose files of CameraCtrl, VideoX-Fun and Wan-Fun.

A first line (the URL of the video), then one line of 19 columns per frame: time in µs (CameraCtrl: a frame number,
often 0), fx/W fy/H cx/W cy/H, two zeros, and the 3×4 matrix camera_from_world, row-major, OpenCV axes. The scale comes
from structure from motion: not metric.
"""

from pathlib import Path

from merope.formats.files import Sample, as_numbers, data_lines, number_table, require_rows, shown
from merope.formats.pose_rows import pinhole_of_rows, pinhole_rows, poses_from_rows
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text
from merope.geometry.poses import inverse

LAYOUT = "time fx fy cx cy 0 0 r11 r12 r13 t1 r21 r22 r23 t2 r31 r32 r33 t3"
COLUMNS = len(LAYOUT.split())
IMAGE_SIZE = (1280, 720)  # what CameraCtrl assumes of the videos
SHORTEST_STEP_US = 1000.0  # column 0 advancing by less counts frames, not microseconds
OUR_TITLE = "merope: "  # a bare name may look like numbers or like a comment


def matches(sample: Sample) -> bool:
    rows = [as_numbers(line.split()) for line in sample.data_lines]
    data = rows[1:] if rows and rows[0] is None else rows
    return bool(data) and data[0] is not None and len(data[0]) == COLUMNS


def read(path: Path, image_size: tuple[int, int] = IMAGE_SIZE) -> Trajectory:
    """A path in SfM units. image_size: (width, height) of the video, by which the file's intrinsics are normalised."""
    lines = list(data_lines(path))
    require_rows(path, lines, LAYOUT)
    title = ""
    if as_numbers(lines[0][1].split()) is None:
        title = lines.pop(0)[1].removeprefix(OUR_TITLE)
    places, rows = number_table(path, [(place, text.split()) for place, text in lines], LAYOUT)
    width, height = image_size
    intrinsics = rows[:, 1:5] * rows.new_tensor([width, height, width, height])
    counts_frames = len(rows) == 1 or float(rows[:, 0].diff().abs().median()) < SHORTEST_STEP_US
    times = "frame numbers, no times" if counts_frames else "times in µs"
    return Trajectory(
        world_from_camera=inverse(poses_from_rows(places, rows[:, 7:].unflatten(-1, (3, 4)))),
        is_metric=False,
        convention=f"RealEstate10K: world-to-camera, inverted; OpenCV axes; SfM scale; {times}; "
        f"intrinsics normalised by an image of {width}×{height}",
        timestamps_s=None if counts_frames else rows[:, 0] / 1e6,
        lens=pinhole_of_rows(intrinsics, width, height),
        name=title,
    )


def write(trajectory: Trajectory, path: Path) -> None:
    """Times are rounded to µs; without times column 0 counts frames."""
    rows_px, lens = pinhole_rows(trajectory, "re10k")
    intrinsics = (rows_px / rows_px.new_tensor([lens.width, lens.height, lens.width, lens.height])).tolist()
    if trajectory.timestamps_s is None:
        times = list(range(trajectory.count))
    else:
        times = [round(trajectory.time_origin_ns / 1e3 + 1e6 * t) for t in trajectory.timestamps_s.tolist()]
    matrices = inverse(trajectory.world_from_camera)[:, :3].flatten(1).tolist()
    rows = (f"{t} {shown(k)} 0 0 {shown(m)}" for t, k, m in zip(times, intrinsics, matrices, strict=True))
    title = OUR_TITLE + trajectory.name.replace("\n", " ")
    replace_text(path, "\n".join((title, *rows)) + "\n")
