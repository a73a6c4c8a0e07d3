"""Pose files: round trips, files made by hand in each convention, real files, and detection by content."""

import json
import re
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lens_zoo import LENSES, TYPICAL, batched
from paths import BODY_FROM_CAMERA, CENTRED, METRIC, NEEDS, largest, lens_difference, random_trajectory
from scenes import random_poses, random_rotations

from merope import formats
from merope.commands.models import key_and_value
from merope.formats.rig_file import read_rig
from merope.formats.trajectory import Trajectory
from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lenses import Equirectangular, Pinhole, UnifiedCamera
from merope.geometry.poses import inverse, relative, transform
from merope.geometry.trajectories import time_problem

DATA = Path(__file__).parents[1] / "data"
RE10K = sorted((DATA / "re10k").glob("*.txt"))
each_format = pytest.mark.parametrize("format", formats.FORMATS)
KEEPS_TIMES = {"merope": 0.0, "re10k": 1e-6, "tum": 0.0, "euroc": 1e-9, "argoverse2": 1e-9, "waymo": 1e-6}
KEEPS_NAMES = ("merope", "colmap", "nerfstudio", "blender")
PRECISION = {"panshot": 2e-5}  # float32; the rest is written with all digits

# A camera at (1, −2, 3) that looks along the world's x axis: right is −z, down is y.
HAND_MADE = torch.tensor([[0, 0, 1, 1], [0, 1, 0, -2], [-1, 0, 0, 3], [0, 0, 0, 1]], dtype=torch.float64)
OPENGL_ROWS = [[0, 0, -1, 1], [0, -1, 0, -2], [-1, 0, 0, 3], [0, 0, 0, 1]]
HALF = 0.5**0.5
FILES = {
    "re10k": "https://x\n0 0.5 0.9 0.5 0.5 0 0  0 0 -1 3  0 1 0 2  1 0 0 -1\n",
    "kitti": "0 0 1 1 0 1 0 -2 -1 0 0 3\n",
    "tum": f"# t x y z qx qy qz qw\n12.5 1 -2 3 0 {HALF} 0 {HALF}\n",
    "euroc": f"#timestamp,x,y,z,w,x,y,z,v\n1403636579758555392,1,-2,3,{HALF},0,{HALF},0,9,9,9\n",
    "nerfstudio": json.dumps(
        {"fl_x": 500, "w": 640, "h": 480, "frames": [{"file_path": "a.png", "transform_matrix": OPENGL_ROWS}]}
    ),
    "blender": json.dumps(
        {"camera_angle_x": 1.0, "frames": [{"file_path": "./train/r_0", "transform_matrix": OPENGL_ROWS}]}
    ),
    "recammaster": json.dumps({"frame0": {"cam01": "[1 0 0 0] [0 0 -1 0] [0 1 0 0] [100 200 300 1] "}}),
    "merope": json.dumps(
        {
            "format": "merope-trajectory",
            "version": 1,
            "name": "",
            "source": "by hand",
            "pose": "world_from_camera",
            "axes": "x right, y down, z forward",
            "is_metric": True,
            "unit": "metre",
            "lens": {"model": "Pinhole", "fx": 500, "fy": 500, "cx": 320, "cy": 240.5, "width": 640, "height": 480},
            "frames": [{"name": "a.png", "time_s": 0, "world_from_camera": HAND_MADE[:3].tolist()}],
        }
    ),
}


@each_format
def test_what_a_format_has_no_place_for_is_known(tmp_path: Path, format: str) -> None:
    """As its own file shows, read with all that it needs to be told."""
    trajectory = random_trajectory(format, 4, 0, 5.0)
    whole = replace(trajectory, timestamps_s=torch.arange(4, dtype=torch.float64), is_metric=True)
    _, write_options, read_options = NEEDS[format]
    formats.write(whole, tmp_path / "path.dat", format, **write_options)
    back = formats.read(tmp_path / "path.dat", **read_options)
    lost = formats.lost_in(whole, format)
    assert ("times" in lost) == (format not in KEEPS_TIMES)
    assert ("unit" in lost) == (not back.is_metric)
    assert ("lens" in lost) == (back.lens is None and whole.lens is not None)
    bare = replace(whole, timestamps_s=None, lens=None, is_metric=False)
    assert formats.lost_in(bare, format) == []


@each_format
@given(seed=st.integers(0, 2**31), count=st.integers(1, 12), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, format: str, seed: int, count: int, scale: float) -> None:
    path = tmp_path_factory.mktemp("round") / "path.dat"
    trajectory = random_trajectory(format, count, seed, 5.0 * scale)
    _, write_options, read_options = NEEDS[format]
    formats.write(trajectory, path, format, **write_options)
    assert formats.detect(path) == format
    back = formats.read(path, **read_options)
    tolerance = PRECISION.get(format, 1e-13) * max(1.0, 20.0 * scale)
    assert largest(back.world_from_camera - trajectory.world_from_camera) < tolerance
    assert back.is_metric == trajectory.is_metric
    if trajectory.lens is not None:
        assert lens_difference(trajectory.lens, back.lens) < 1e-12
    if format in KEEPS_TIMES and not (format == "re10k" and count == 1):
        assert back.timestamps_s is not None
        times_s = back.time_origin_ns / 1e9 + back.timestamps_s
        assert largest(times_s - (3.0 + torch.arange(count) / 8)) <= KEEPS_TIMES[format]
    if format in KEEPS_NAMES:
        assert back.frame_names == trajectory.frame_names


@pytest.mark.parametrize("format", FILES)
def test_a_file_made_by_hand(tmp_path: Path, format: str) -> None:
    path = tmp_path / "path"
    path.write_text(FILES[format])
    options = {"body_from_camera": torch.eye(4)} if format == "euroc" else {}
    trajectory = formats.read(path, **options)
    assert formats.detect(path) == format
    assert largest(trajectory.world_from_camera[0] - HAND_MADE) < 1e-12
    ahead = transform(inverse(trajectory.world_from_camera), torch.tensor([[11.0, -2.0, 3.0]], dtype=torch.float64))
    assert largest(ahead - torch.tensor([0.0, 0.0, 10.0])) < 1e-12
    assert trajectory.is_metric == (format in (*METRIC, "merope"))
    assert trajectory.convention


def test_hand_made_array_and_its_sidecar(tmp_path: Path) -> None:
    np.save(tmp_path / "v-1-0-a_0.npy", HAND_MADE[None, :3].numpy().astype(np.float32))
    rows = [
        {"pose_path": f"p/{n}.npy", "x_fov": fov, "xi": 1.66, "caption": ""}
        for n, fov in (("b", 90), ("v-1-0-a_0", 173))
    ]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    path = tmp_path / "v-1-0-a_0.npy"
    trajectory = formats.read(path, sidecar=tmp_path / "list.json", image_size=(512, 288))
    assert largest(trajectory.world_from_camera[0] - HAND_MADE) < 1e-12
    assert lens_difference(trajectory.lens, NEEDS["panshot"][0]) < 1e-12
    assert formats.read(path).lens is None
    np.save(tmp_path / "other.npy", HAND_MADE[None, :3].numpy())
    with pytest.raises(ValueError, match=r"list.json must be a list with other.npy, got 2 others"):
        formats.read(tmp_path / "other.npy", sidecar=tmp_path / "list.json", image_size=(512, 288))


def test_an_image_circle_has_no_field_of_view_for_panshot(tmp_path: Path) -> None:
    circle = Trajectory(HAND_MADE[None], False, "a test", lens=UnifiedCamera(60.0, 60.0, 256.0, 144.0, 1.8, 512, 288))
    with pytest.raises(ValueError, match=r"a lens that sees the right edge of its image for panshot, got a circle"):
        formats.write(circle, tmp_path / "circle.npy", "panshot")


@pytest.mark.parametrize("path", RE10K, ids=lambda path: path.stem)
def test_real_re10k_files_agree_with_opencv(path: Path, tmp_path: Path) -> None:
    trajectory = formats.read(path)
    assert formats.detect(path) == "re10k"
    assert trajectory.count == 16
    assert not trajectory.is_metric
    assert trajectory.name.startswith("https://www.youtube.com/watch?v=")
    assert isinstance(trajectory.lens, Pinhole)
    points = np.random.default_rng(0).normal(size=(20, 3)) * 2
    rows = np.loadtxt(path, skiprows=1)
    for row, pose in zip(rows, trajectory.world_from_camera, strict=True):
        k = np.array([[row[1] * 1280, 0, row[3] * 1280], [0, row[2] * 720, row[4] * 720], [0, 0, 1]])
        matrix = row[7:].reshape(3, 4)
        seen = (points @ matrix[:, :3].T + matrix[:, 3])[:, 2] > 0.1
        expected = cv2.projectPoints(points, cv2.Rodrigues(matrix[:, :3])[0], matrix[:, 3], k, None)[0][:, 0]
        pixels, valid = trajectory.lens.project(transform(inverse(pose), torch.from_numpy(points)))
        assert valid[torch.from_numpy(seen)].all()
        scale = np.maximum(1.0, np.abs(expected[seen])) * 1e-5  # nine digits, rotations repaired
        assert (np.abs(pixels.numpy()[seen] - expected[seen]) < scale).all()
    copy = tmp_path / "copy"
    formats.write(trajectory, copy, "re10k")
    again = np.loadtxt(copy, skiprows=1)
    assert np.array_equal(again[:, 0], rows[:, 0])
    assert np.abs(again - rows)[:, 1:].max() < 1e-6


def test_a_real_drive_survives_every_metric_format(tmp_path: Path, highway: torch.Tensor) -> None:
    drive = Trajectory(highway, is_metric=True, convention="comma2k19", timestamps_s=torch.arange(6.0).double())
    for format in {"merope", *METRIC} - {"keys"}:  # a real car tilts
        lens, _, options = NEEDS[format]
        formats.write(replace(drive, lens=lens), tmp_path / format, format, **NEEDS[format][1])
        back = formats.read(tmp_path / format, **options)
        assert (
            largest(relative(back.world_from_camera[:1], back.world_from_camera) - relative(highway[:1], highway))
            < 2e-8
        )


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.parametrize("per_frame", [False, True])
def test_our_json_keeps_every_lens(tmp_path: Path, name: str, per_frame: bool) -> None:
    lens = batched(LENSES[name], (7,)) if per_frame else LENSES[name]
    formats.write(replace(random_trajectory("merope"), lens=lens), tmp_path / "a.json")
    assert lens_difference(formats.read(tmp_path / "a.json").lens, lens) == 0.0


@pytest.mark.parametrize("format", ["re10k", "colmap", "nerfstudio"])
def test_lenses_may_change_from_frame_to_frame(tmp_path: Path, format: str) -> None:
    zoom = Pinhole(500.0 + torch.arange(7).double(), 500.0, 320.0, 240.0, 640, 480)
    formats.write(replace(random_trajectory(format), lens=zoom), tmp_path / "zoom", format)
    assert lens_difference(formats.read(tmp_path / "zoom", **NEEDS[format][2]).lens, zoom) < 1e-12


@pytest.mark.parametrize("name", ["brown", "fisheye", "panorama"])
def test_nerfstudio_keeps_distortion(tmp_path: Path, name: str) -> None:
    formats.write(replace(random_trajectory("nerfstudio"), lens=LENSES[name]), tmp_path / "t.json", "nerfstudio")
    lens = formats.read(tmp_path / "t.json").lens
    assert isinstance(lens, (BrownConrady, KannalaBrandt, Equirectangular))
    assert lens_difference(lens, LENSES[name]) < 1e-12


def test_nerfstudio_centres_what_it_does_not_say_and_a_frame_overrules_the_file(tmp_path: Path) -> None:
    document = json.loads(FILES["nerfstudio"])
    (tmp_path / "t.json").write_text(json.dumps(document))
    assert lens_difference(formats.read(tmp_path / "t.json").lens, CENTRED) < 1e-12
    document["frames"][0] |= {"fl_x": 600, "cx": 300}
    (tmp_path / "t.json").write_text(json.dumps(document | {"cx": 310}))
    assert lens_difference(formats.read(tmp_path / "t.json").lens, replace(CENTRED, fx=600, fy=600, cx=300)) < 1e-12


@pytest.mark.parametrize("is_per_frame", [False, True])
def test_instant_ngp_says_fisheye_in_its_own_way(tmp_path: Path, is_per_frame: bool) -> None:
    formats.write(replace(random_trajectory("nerfstudio"), lens=LENSES["fisheye"]), tmp_path / "t.json", "nerfstudio")
    document = json.loads((tmp_path / "t.json").read_text())
    del document["camera_model"]
    for place in document["frames"] if is_per_frame else [document]:
        place["is_fisheye"] = True
    (tmp_path / "t.json").write_text(json.dumps(document))
    lens = formats.read(tmp_path / "t.json").lens
    assert isinstance(lens, KannalaBrandt)
    assert lens_difference(lens, LENSES["fisheye"]) < 1e-12
    if is_per_frame:
        document["frames"][0]["is_fisheye"] = False
        (tmp_path / "t.json").write_text(json.dumps(document))
        with pytest.raises(ValueError, match=r"is_fisheye must be the same in all frames"):
            formats.read(tmp_path / "t.json")


def test_blender_angle_is_horizontal(tmp_path: Path) -> None:
    path = tmp_path / "transforms_train.json"
    path.write_text(FILES["blender"])
    lens = formats.read(path, image_size=(800, 600)).lens
    assert isinstance(lens, Pinhole)
    ray, _ = lens.unproject(torch.tensor([800.0, 300.0], dtype=torch.float64))
    assert float(torch.atan2(ray[0], ray[2])) == pytest.approx(0.5)
    assert formats.read(path).lens is None
    assert formats.read(path, lens=CENTRED).lens is CENTRED


def test_unreal_axes_and_centimetres(tmp_path: Path) -> None:
    """The second camera is 1 m ahead, 0.5 m to the right and 0.2 m above the first, which looks along −y."""
    first, second = "[0 -1 0 0] [1 0 0 0] [0 0 1 0] [10 20 30 1] ", "[0 -1 0 0] [1 0 0 0] [0 0 1 0] [60 -80 50 1] "
    frames = {"frame1": {"cam01": second, "cam02": first}, "frame0": {"cam01": first, "cam02": first}}
    path = tmp_path / "cameras.json"
    path.write_text(json.dumps(frames))
    poses = formats.read(path, camera="cam01").world_from_camera
    moved = relative(poses[0], poses[1])
    assert largest(moved[:3, 3] - torch.tensor([0.5, -0.2, 1.0]).double()) < 1e-7
    assert largest(formats.read(path, camera="cam02").world_from_camera[0] - poses[0]) == 0.0
    with pytest.raises(ValueError, match=r"camera must be one of \['cam01', 'cam02'\]"):
        formats.read(path)


@given(st.integers(0, 2**31))
def test_unreal_relative_poses_are_those_of_the_published_recipe(seed: int) -> None:
    """Transpose, columns 1 2 0 3, negate column 1, centimetres: improper, but its relative poses are right."""
    rows = torch.eye(4, dtype=torch.float64).repeat(5, 1, 1)
    rows[:, :3, :3] = random_rotations(5, seed=seed)
    rows[:, 3, :3] = 100 * random_poses(5, seed=seed)[:, :3, 3]
    recipe = rows.mT[..., [1, 2, 0, 3]] * torch.tensor([1.0, -1.0, 1.0, 0.01], dtype=torch.float64)
    recipe[:, 3, 3] = 1
    ours = torch.eye(4, dtype=torch.float64).repeat(5, 1, 1)
    ours[:, :3] = formats.recammaster.opencv_from_unreal(rows)
    assert largest(torch.linalg.det(recipe[:, :3, :3]) + 1) < 1e-12
    assert largest(torch.linalg.det(ours[:, :3, :3]) - 1) < 1e-12
    assert largest(torch.linalg.solve(recipe[:1], recipe) - relative(ours[:1], ours)) < 1e-9


def test_kitti_times_have_a_file_of_their_own(tmp_path: Path) -> None:
    trajectory = random_trajectory("kitti")
    formats.write(trajectory, tmp_path / "00.txt", "kitti", times=tmp_path / "times.txt")
    back = formats.read(tmp_path / "00.txt", times=tmp_path / "times.txt")
    assert back.timestamps_s is not None
    assert trajectory.timestamps_s is not None
    assert torch.equal(back.timestamps_s, trajectory.timestamps_s)
    assert formats.read(tmp_path / "00.txt").timestamps_s is None
    (tmp_path / "times.txt").write_text("0.0\n0.1\n")
    with pytest.raises(ValueError, match=r"times.txt must be 7 times, one per pose, got 2 of them"):
        formats.read(tmp_path / "00.txt", times=tmp_path / "times.txt")


def test_the_body_of_tum_and_euroc_carries_the_camera(tmp_path: Path) -> None:
    trajectory = random_trajectory("tum")
    formats.write(trajectory, tmp_path / "a", "tum", body_from_camera=BODY_FROM_CAMERA)
    body = formats.read(tmp_path / "a").world_from_camera
    assert largest(body @ BODY_FROM_CAMERA - trajectory.world_from_camera) < 1e-12
    formats.write(trajectory, tmp_path / "b", "euroc", body_from_camera=BODY_FROM_CAMERA)
    for call in (lambda: formats.read(tmp_path / "b"), lambda: formats.write(trajectory, tmp_path / "c", "euroc")):
        with pytest.raises(ValueError, match=r"must be given for euroc.*pass body_from_camera=T_BS"):
            call()


@pytest.mark.parametrize("format", ["tum", "euroc"])
def test_the_body_may_come_from_a_command_line(tmp_path: Path, format: str) -> None:
    formats.write(random_trajectory(format), tmp_path / "a", format, body_from_camera=BODY_FROM_CAMERA)
    name, rows = key_and_value(f"body_from_camera={json.dumps(BODY_FROM_CAMERA.tolist())}")
    expected = formats.read(tmp_path / "a", format, body_from_camera=BODY_FROM_CAMERA)
    read = formats.read(tmp_path / "a", format, **{name: rows})
    assert torch.equal(read.world_from_camera, expected.world_from_camera)
    for value in ("[[1, 0], [0]]", "[[1, 0, 0, 0", '[["a", 0, 0, 0]]'):
        name, rows = key_and_value(f"body_from_camera={value}")
        with pytest.raises(ValueError, match=r"^body_from_camera must be four rows of four numbers, got"):
            formats.read(tmp_path / "a", format, **{name: rows})


def test_cameractrl_frame_numbers_are_no_times(tmp_path: Path) -> None:
    lines = [f"{k} 0.5 0.9 0.5 0.5 0 0 1 0 0 0 0 1 0 0 0 0 1 {-k}" for k in range(5)]
    for text in ("\n".join(("header", *lines)), "\n".join(lines), "\n".join(f"0 {line[2:]}" for line in lines)):
        (tmp_path / "a.txt").write_text(text)
        trajectory = formats.read(tmp_path / "a.txt")
        assert trajectory.count == 5
        assert trajectory.timestamps_s is None
        assert trajectory.world_from_camera[:, 2, 3].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("step_us", "is_time"), [(999, False), (1000, True), (33333, True)])
def test_steps_of_a_millisecond_and_more_are_times(tmp_path: Path, step_us: int, is_time: bool) -> None:
    lines = [f"{k * step_us} 0.5 0.9 0.5 0.5 0 0 1 0 0 0 0 1 0 0 0 0 1 {-k}" for k in range(3)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    times_s = formats.read(tmp_path / "a.txt").timestamps_s
    expected_s = [k * step_us / 1e6 for k in range(3)] if is_time else None
    assert (None if times_s is None else times_s.tolist()) == expected_s
    (tmp_path / "a.txt").write_text(lines[1])
    assert formats.read(tmp_path / "a.txt").timestamps_s is None


def test_frames_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    shuffled = replace(random_trajectory("colmap", 12), frame_names=tuple(f"f_{k}.png" for k in reversed(range(12))))
    for format in ("colmap", "nerfstudio"):
        formats.write(shuffled, tmp_path / format, format)
        back = formats.read(tmp_path / format)
        assert back.frame_names == tuple(f"f_{k}.png" for k in range(12))
        assert largest(back.world_from_camera - shuffled.world_from_camera.flip(0)) < 1e-12


def test_the_caller_may_overrule_unit_and_lens(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(FILES["re10k"])
    scaled = formats.read(tmp_path / "a", is_metric=True)
    assert scaled.is_metric
    assert scaled.convention.endswith("metres, says the caller")
    assert formats.read(tmp_path / "a", lens=CENTRED).lens is CENTRED


def test_the_documented_json_and_table_are_true(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    rig, example = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "rig.json").write_text(rig)
    assert read_rig(tmp_path / "rig.json").names == ("front", "right")
    (tmp_path / "example").write_text(example)
    trajectory = formats.read(tmp_path / "example")
    assert (trajectory.count, trajectory.is_metric, trajectory.name) == (2, True, "highway")
    assert formats.validate(trajectory) == []
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|[^|]*\|[^|]*\|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(formats.FORMATS)
    assert {name for name, metric in rows if metric == "yes"} == set(METRIC)
    assert all(formats.FORMATS[name].only_metric == (metric == "yes") for name, metric in rows)


def test_nanoseconds_of_today_keep_their_last_digit(tmp_path: Path) -> None:
    """Stamps 1 ns apart, as several sensors of one car have them: float64 seconds since 1970 step by 238 ns."""
    stamps = [1403636579758555392, 1403636579758555393, 1403636579808555392]
    rows = [f"{stamp},{k},0,0,1,0,0,0" for k, stamp in enumerate(stamps)]
    (tmp_path / "poses.csv").write_text("#timestamp [ns],x,y,z,qw,qx,qy,qz\n" + "\n".join(rows) + "\n")
    path = formats.read(tmp_path / "poses.csv", body_from_camera=torch.eye(4))
    assert path.time_origin_ns == stamps[0]
    assert path.timestamps_s is not None
    assert path.timestamps_s.tolist() == [0.0, 1e-9, 0.05]
    assert time_problem(path.timestamps_s) is None
    formats.write(path, tmp_path / "again.csv", "euroc", body_from_camera=torch.eye(4))
    written = (tmp_path / "again.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in written] == stamps
    formats.write(path, tmp_path / "again.txt", "tum")
    written = (tmp_path / "again.txt").read_text().splitlines()[1:]
    assert [line.split()[0].replace(".", "") for line in written] == [str(stamp) for stamp in stamps]
    back = formats.read(tmp_path / "again.txt")
    assert back.time_origin_ns == stamps[0]
    assert back.timestamps_s is not None
    assert back.timestamps_s.tolist() == [0.0, 1e-9, 0.05]


def test_microseconds_of_today_are_distinct_times(tmp_path: Path) -> None:
    rows = [f"{1403636579758555 + k} 1 1 0.5 0.5 0 0 1 0 0 0 0 1 0 0 0 0 1 {k}" for k in (0, 40_000, 80_000, 80_001)]
    (tmp_path / "poses.txt").write_text("video\n" + "\n".join(rows) + "\n")
    times_s = formats.read(tmp_path / "poses.txt", image_size=(640, 360)).timestamps_s
    assert times_s is not None
    assert (times_s.diff() > 0).all()
