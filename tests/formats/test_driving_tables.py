"""Argoverse 2 and Waymo: tables that their own libraries wrote and read, what they leave out, and what is refused."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paths import largest, lens_difference, random_trajectory

from merope import formats
from merope.cli import main
from merope.formats.tables import write_feather, write_parquet
from merope.geometry.distorted_lenses import BrownConrady
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import inverse, rigid, transform

DATA = Path(__file__).parents[1] / "data"
LOG, SEGMENTS = DATA / "argoverse2", DATA / "waymo"
SEGMENT = "1234567890123456789_6380_000_6400_000"
FIRST_NS = 315966253572412942


@pytest.mark.parametrize("camera", ["ring_front_center", "ring_side_left"])
def test_a_log_projects_as_av2_does(camera: str) -> None:
    path = formats.read(LOG, camera=camera)
    assert formats.detect(LOG) == formats.detect(LOG / "city_SE3_egovehicle.feather") == "argoverse2"
    assert isinstance(path.lens, Pinhole)
    assert (path.count, path.is_metric, path.time_origin_ns) == (12, True, FIRST_NS)
    assert float(path.world_from_camera[0, 0, 3]) > 5000  # a city's coordinates
    for seen in json.loads((LOG / "projected_by_av2.json").read_text())[camera]:
        points = torch.tensor(seen["city_points_m"], dtype=torch.float64)
        pixels, valid = path.lens.project(transform(inverse(path.world_from_camera[seen["row"]]), points))
        assert valid.all()
        assert largest(pixels - torch.tensor(seen["pixels"], dtype=torch.float64)) < 1e-6
        assert path.timestamps_s is not None
        assert round(1e9 * float(path.timestamps_s[seen["row"]])) == seen["timestamp_ns"] - FIRST_NS
    assert lens_difference(formats.read(LOG / "city_SE3_egovehicle.feather", camera=camera).lens, path.lens) == 0
    assert formats.validate(path) == []


def test_stamps_one_nanosecond_apart_stay_apart(tmp_path: Path) -> None:
    path = formats.read(LOG)
    assert path.timestamps_s is not None
    assert float(path.timestamps_s.diff().min()) == pytest.approx(1e-9, rel=1e-6)
    formats.write(path, tmp_path / "log", "argoverse2")
    again = formats.read(tmp_path / "log")
    assert again.timestamps_s is not None
    assert again.time_origin_ns == FIRST_NS
    assert torch.equal(again.timestamps_s, path.timestamps_s)
    assert largest(again.world_from_camera - path.world_from_camera) < 2e-12


def test_a_camera_has_the_poses_of_its_images(tmp_path: Path) -> None:
    log = Path(shutil.copytree(LOG, tmp_path / "log"))
    whole = formats.read(log)
    images = log / "sensors" / "cameras" / "ring_front_center"
    images.mkdir(parents=True)
    for stamp in (FIRST_NS + 100_000_003, FIRST_NS, 17):
        (images / f"{stamp}.jpg").touch()
    path = formats.read(log)
    assert path.frame_names == tuple(
        f"sensors/cameras/ring_front_center/{FIRST_NS + ns}.jpg" for ns in (0, 100_000_003)
    )
    assert "at 2 of 3 images" in path.convention
    torch.testing.assert_close(path.world_from_camera, whole.world_from_camera[[0, 2]], rtol=1e-14, atol=1e-12)
    assert formats.read(log, camera="ring_side_left").count == 12
    for file in images.iterdir():
        file.unlink()
    (images / "17.jpg").touch()
    with pytest.raises(ValueError, match=r"ring_front_center must be images at stamps of city_SE3.*got 1 others"):
        formats.read(log)


def test_what_a_log_does_not_say(tmp_path: Path) -> None:
    log = Path(shutil.copytree(LOG, tmp_path / "log"))
    with pytest.raises(ValueError, match=r"camera must be one of ring_front_center, ring_side_left, got 'left'"):
        formats.read(log, camera="left")
    (log / "calibration" / "intrinsics.feather").unlink()
    assert formats.read(log).lens is None
    (log / "calibration" / "egovehicle_SE3_sensor.feather").unlink()
    with pytest.raises(ValueError, match=r"egovehicle_SE3_sensor.feather must be there: poses are those of the car"):
        formats.read(log)


def test_a_segment_in_hand_made_numbers() -> None:
    """8 m/s and 0.3 rad/s to the left, as tests/data/README.md says; the side camera looks left."""
    path = formats.read(SEGMENTS)
    assert formats.detect(SEGMENTS) == "waymo"
    assert path.timestamps_s is not None
    assert path.time_origin_ns == 1000 * (1550083467346370 + 50_000)
    assert path.timestamps_s.tolist() == pytest.approx([0.1 * k + 13e-6 * (k % 2) for k in range(8)], abs=1e-6)
    for k, time_s in enumerate(path.timestamps_s.tolist()):
        yaw = 0.3 * (time_s + 0.05)
        ahead, left = (
            torch.tensor([math.cos(yaw), math.sin(yaw), 0.0]),
            torch.tensor([-math.sin(yaw), math.cos(yaw), 0]),
        )
        vehicle = torch.tensor([-7821.5 + 8 / 0.3 * math.sin(yaw), 21034.25 + 8 / 0.3 * (1 - math.cos(yaw)), 12.5])
        rotation = torch.stack([-left, torch.tensor([0.0, 0, -1]), ahead], dim=-1)
        centre = vehicle.double() + 1.5 * ahead + torch.tensor([0, 0, 2.1])
        assert largest(path.world_from_camera[k] - rigid(rotation.double(), centre)) < 1e-3  # made in float32
    assert formats.validate(path) == []
    side = formats.read(SEGMENTS, camera="SIDE_LEFT")
    assert isinstance(side.lens, BrownConrady)
    assert (side.lens.width, side.lens.height, float(side.lens.k2)) == (1920, 886, -0.321)
    looks = side.world_from_camera[0, :3, 2]
    yaw = 0.3 * 0.02
    assert looks.tolist() == pytest.approx([-math.sin(yaw), math.cos(yaw), 0.0], abs=1e-6)


def test_poses_at_turns_of_the_lidar_are_those_of_their_own_table(tmp_path: Path) -> None:
    file = SEGMENTS / "vehicle_pose" / f"{SEGMENT}.parquet"
    assert formats.detect(file) == "waymo"
    path = formats.read(file)
    assert path.time_origin_ns == 1550083467346370_000
    assert "turns of the lidar" in path.convention
    assert path.world_from_camera[0, :3, 3].tolist() == [-7821.5 + 1.5, 21034.25, 12.5 + 2.1]
    without = Path(shutil.copytree(SEGMENTS, tmp_path / "segments"))
    shutil.rmtree(without / "camera_image")
    torch.testing.assert_close(formats.read(without).world_from_camera, path.world_from_camera, rtol=1e-14, atol=1e-12)
    formats.write(path, tmp_path / "again", "waymo")
    again = formats.read(tmp_path / "again")
    assert again.time_origin_ns == path.time_origin_ns
    assert largest(again.world_from_camera - path.world_from_camera) < 1e-11
    assert lens_difference(again.lens, path.lens) == 0


def test_what_a_folder_of_segments_does_not_say(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SEGMENTS, tmp_path / "segments"))
    shutil.copy(folder / "camera_image" / f"{SEGMENT}.parquet", folder / "camera_image" / "other.parquet")
    with pytest.raises(ValueError, match=rf"segment must be one of {SEGMENT}, other in .*got None; pass segment="):
        formats.read(folder)
    with pytest.raises(ValueError, match=r"camera_calibration/other.parquet must be there: poses are those of the veh"):
        formats.read(folder, segment="other")
    assert formats.read(folder, segment=SEGMENT).count == 8
    with pytest.raises(ValueError, match="camera must be one of FRONT, SIDE_LEFT, got REAR; see"):
        formats.read(folder / "vehicle_pose" / f"{SEGMENT}.parquet", camera="REAR")
    with pytest.raises(ValueError, match="must be images of REAR, got none"):
        formats.read(folder, segment=SEGMENT, camera="REAR")
    with pytest.raises(ValueError, match=r"camera must be one of FRONT, FRONT_LEFT, .*got 'front'"):
        formats.read(folder, camera="front")


def test_other_tables_and_values_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "poses.feather"
    stamps = {"timestamp_ns": [1, 2]}
    write_feather(table, stamps | {"x": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"one of the formats .*got a table with the columns \['timestamp_ns', 'x'\]"):
        formats.read(table)
    with pytest.raises(ValueError, match=r"the columns timestamp_ns, qw, .*, got one without qw, qx"):
        formats.read(table, "argoverse2")
    numbers = {name: [0.0, 0.0] for name in ("qx", "qy", "qz", "tx_m", "ty_m", "tz_m")}
    for odd, message in (
        (stamps | {"qw": [1.0, None]}, "poses.feather qw must be numbers, got None"),
        (stamps | {"qw": [1.0, 0.5]}, "poses.feather row 1 must be a unit quaternion"),
        ({"timestamp_ns": [1.0, 2.0], "qw": [1.0, 1.0]}, "timestamp_ns must be whole numbers, got 1.0"),
    ):
        write_feather(table, odd | numbers)
        with pytest.raises(ValueError, match=message):
            formats.read(table)
    column = "[VehiclePoseComponent].world_from_vehicle.transform"
    keys = {"key.segment_context_name": ["a", "a"], "key.frame_timestamp_micros": [1, 2]}
    for keyed, matrix, message in (
        (keys, [0.0] * 15, r"transform must be 16 numbers per row, got \[0.0, 0.0"),
        (keys, [0.0] * 15 + [1.0], r"row 0.* must be rotations"),
        (keys, [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 1.0], r"row 0.* transpose"),
        (keys | {"key.segment_context_name": ["a", "b"]}, [0.0] * 16, "must be of one segment, got 2: a, b"),
    ):
        write_parquet(tmp_path / "p", keyed | {column: [matrix, matrix]}, {})
        with pytest.raises(ValueError, match=message):
            formats.read(tmp_path / "p")


def test_lenses_and_times_that_tables_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = random_trajectory("waymo")
    with pytest.raises(ValueError, match=r"lens must be one Pinhole for argoverse2, got another BrownConrady"):
        formats.write(path, tmp_path / "a", "argoverse2")
    rational = replace(path, lens=replace(path.lens, k5=0.1))  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"one Pinhole, or BrownConrady without k4, k5, k6, for waymo"):
        formats.write(rational, tmp_path / "a", "waymo")
    for format in ("argoverse2", "waymo"):
        with pytest.raises(ValueError, match=f"timestamps_s must be given for {format}"):
            formats.write(replace(random_trajectory(format), timestamps_s=None), tmp_path / "a", format)
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"need pyarrow, which is not installed: pip install 'merope\[tables\]'"
    ):
        formats.read(LOG)
    assert main(["path", "convert", str(LOG), "path.json"]) == 2
    assert "pyarrow is not installed: pip install 'merope[tables]'" in capsys.readouterr().err


def test_other_formats_do_without_pyarrow() -> None:
    code = "import sys; from merope import formats; formats.read(sys.argv[1]); sys.exit('pyarrow' in sys.modules)"
    path = next((DATA / "re10k").glob("*.txt"))
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0
