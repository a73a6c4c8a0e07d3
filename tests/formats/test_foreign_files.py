"""Files that other programs wrote, one of each format that has one we may ship: tests/data/README.md says whose."""

import json
import math
from pathlib import Path

import pytest
import torch
from paths import largest

from merope import formats
from merope.geometry.drives import turning_drive
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import relative

POSES = Path(__file__).parents[1] / "data" / "poses"
DRIVE = POSES / "kitti360" / "data_poses" / "2013_05_28_drive_0000_sync" / "poses.txt"
TURN_RAD_S, STEPS_S = 0.3, 0.1


def circle_to_the_right(speed_m_s: float, count: int) -> torch.Tensor:  # [T, 4, 4]
    """From the identity, 0.3 rad/s, ten frames per second: what the made-up files hold."""
    return turning_drive(speed_m_s, TURN_RAD_S, 0.0, STEPS_S * (count - 1), 1 / STEPS_S)


@pytest.mark.parametrize("format", ["tum", "kitti"])
def test_what_evo_writes(format: str) -> None:
    file = POSES / f"evo_{format}.txt"
    path = formats.read(file)
    assert formats.detect(file) == format
    assert largest(path.world_from_camera - circle_to_the_right(6.0, 8)) < 1e-9
    if format == "tum":
        assert path.timestamps_s is not None
        assert path.time_origin_ns == 1305031102175800085
        assert path.timestamps_s.tolist() == pytest.approx([0.1 * k for k in range(8)], abs=1e-6)


def test_a_result_of_orb_slam_is_of_the_body() -> None:
    """KITTI's columns, but x looks ahead: the file is read, and what is odd about it is said."""
    path = formats.read(POSES / "orbslam_kitti.txt")
    assert formats.detect(POSES / "orbslam_kitti.txt") == "kitti"
    assert path.count == 10
    assert ["along its x axis" in finding.message for finding in formats.validate(path)] == [True]


def test_a_pose_of_tum_vi() -> None:
    path = formats.read(POSES / "tumvi_euroc.csv", body_from_camera=torch.eye(4))
    assert formats.detect(POSES / "tumvi_euroc.csv") == "euroc"
    assert path.time_origin_ns == 1520530308189679351
    assert path.world_from_camera[0, :3, 3].tolist() == [0.8417820384, -0.2193354118, 1.2499749141]
    turned_deg = math.degrees(2 * math.acos(0.9996498117))
    cosine = (float(path.world_from_camera[0, :3, :3].trace()) - 1) / 2
    assert math.degrees(math.acos(cosine)) == pytest.approx(turned_deg, abs=1e-4)


def test_cameras_of_recammaster_do_what_their_names_say() -> None:
    """Pan right and left, tilt up and down, zoom in and out, up, down, arc left and right; 10 frames, 22.4 cm."""
    file = POSES / "recammaster.json"
    assert formats.detect(file) == "recammaster"
    moved = {}
    for number in range(1, 11):
        poses = formats.read(file, camera=f"cam{number:02d}").world_from_camera
        last = relative(poses[0], poses[1])
        moved[number] = [*last[:2, 2].tolist(), *last[:3, 3].tolist()]  # looks right, down; moves right, down, ahead
    looks_right, looks_down, right_m, down_m, ahead_m = (
        {number: row[column] for number, row in moved.items()} for column in range(5)
    )
    assert looks_right[1] == pytest.approx(-looks_right[2]) == pytest.approx(0.0390161, abs=1e-6)
    assert looks_down[3] == pytest.approx(-looks_down[4]) == pytest.approx(-0.0195118, abs=1e-6)
    assert ahead_m[5] == pytest.approx(-ahead_m[6]) == pytest.approx(0.2236, abs=1e-9)
    assert down_m[7] == pytest.approx(-down_m[8]) == pytest.approx(-0.1118, abs=1e-4)
    assert right_m[9] == pytest.approx(-right_m[10]) == pytest.approx(-0.2236, abs=1e-3)
    assert looks_right[9] > 0.05  # towards what it goes around


def test_a_table_of_kitti360_gives_the_cameras_of_its_scripts() -> None:
    expected = json.loads((POSES / "kitti360" / "cam2world_by_kitti360scripts.json").read_text())
    assert formats.detect(DRIVE) == "kitti360"
    for camera in (0, 1):
        path = formats.read(DRIVE, calibration=POSES / "kitti360" / "calibration", camera=camera)
        frames = [str(int(Path(name).stem)) for name in path.frame_names or ()]
        true = torch.tensor([expected[str(camera)][frame] for frame in frames], dtype=torch.float64)
        assert largest(path.world_from_camera - true) < 1e-6  # eight digits, rotations repaired
        assert isinstance(path.lens, Pinhole)
        assert (float(path.lens.fx), float(path.lens.cy), path.lens.width) == (552.554, 238.769, 1408)


def test_a_capture_of_arkit_by_way_of_nerfstudio() -> None:
    path = formats.read(POSES / "record3d_nerfstudio.json")
    assert formats.detect(POSES / "record3d_nerfstudio.json") == "nerfstudio"
    assert path.frame_names == tuple(f"images/frame_{k:05d}.png" for k in (1, 2, 3))
    assert isinstance(path.lens, Pinhole)
    assert (float(path.lens.fx), float(path.lens.cx), path.lens.height) == (1450.5, 720.0, 1920)
    local = relative(path.world_from_camera[:1], path.world_from_camera)
    assert largest(local - circle_to_the_right(1.0, 8)[[0, 3, 7]]) < 1e-6  # float32


def test_a_frame_of_nerfs_lego_looks_at_the_model() -> None:
    """The cameras of that set stand on a sphere of radius 4.03 and look at the origin."""
    path = formats.read(POSES / "lego_blender.json", image_size=(800, 800))
    assert formats.detect(POSES / "lego_blender.json") == "blender"
    centre, ahead = path.world_from_camera[0, :3, 3], path.world_from_camera[0, :3, 2]
    assert float(centre.norm()) == pytest.approx(4.0311, abs=1e-4)
    assert largest(ahead + centre / centre.norm()) < 1e-6
    assert isinstance(path.lens, Pinhole)
    assert float(path.lens.fx) == pytest.approx(1111.111, abs=1e-3)


def test_what_depth_anything_3_exports() -> None:
    path = formats.read(POSES / "da3.npz")
    assert formats.detect(POSES / "da3.npz") == "da3"
    true = circle_to_the_right(0.0, 3)
    true[:, :3, 3] = torch.tensor([[0, 0, 0], [0.1, 0, 0.9], [0.3, 0, 1.8]], dtype=torch.float64)
    assert largest(path.world_from_camera - true) < 1e-6  # float32
    assert isinstance(path.lens, Pinhole)
    assert (float(path.lens.fy), path.lens.width, path.lens.height) == (401.0, 56, 28)
