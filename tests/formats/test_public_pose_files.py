"""Pose files of KITTI-360, LingBot-World, VGGT, Depth Anything 3, MapAnything and instant-ngp, as these write them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import NEEDS, largest, lens_difference, random_trajectory

from merope import formats
from merope.formats.trajectory import Trajectory
from merope.geometry.drives import turning_drive
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import inverse, rigid

# A camera at (1, −2, 3) that looks along the world's x axis: right is −z, down is y.
HAND_MADE = torch.tensor([[0, 0, 1, 1], [0, 1, 0, -2], [-1, 0, 0, 3], [0, 0, 0, 1]], dtype=torch.float64)
POSES, INVERTED = HAND_MADE[None].numpy(), inverse(HAND_MADE)[None].numpy()
MASK = {"final_mask": np.zeros((1, 480, 640))}
MATRIX = np.array([[[500.0, 0, 330], [0, 510, 240], [0, 0, 1]]])
LENS = Pinhole(500.0, 510.0, 330.0, 240.0, 640, 480)
CALIBRATION = """\
S_rect_00: 1.408e+03 3.76e+02
R_rect_00: 0 -1 0 1 0 0 0 0 1
P_rect_00: 552.5 0 682.0 0 0 552.5 238.7 0 0 0 1 0
"""


def test_kitti360_tables_of_the_camera_and_of_the_car(tmp_path: Path) -> None:
    """The camera is rectified by R_rect, as the data set's own scripts do it: pose · cam_to_pose · R_rectᵀ."""
    (tmp_path / "cam0_to_world.txt").write_text("386 0 0 1 1 0 1 0 -2 -1 0 0 3 0 0 0 1\n")
    camera = formats.read(tmp_path / "cam0_to_world.txt")
    assert formats.detect(tmp_path / "cam0_to_world.txt") == "kitti360"
    assert largest(camera.world_from_camera[0] - HAND_MADE) < 1e-12
    assert camera.frame_names == ("0000000386.png",)
    assert camera.is_metric
    turned = rigid(torch.tensor([[0, 1, 0], [-1, 0, 0], [0, 0, 1.0]]).double(), torch.zeros(3).double())
    body_from_camera = rigid(torch.eye(3).double(), torch.tensor([0.0, 0.5, 1.5]).double())
    world_from_body = HAND_MADE @ inverse(turned) @ inverse(body_from_camera)
    row = " ".join(map(str, world_from_body[:3].flatten().tolist()))
    (tmp_path / "poses.txt").write_text(f"386 {row}\n")
    (tmp_path / "perspective.txt").write_text(CALIBRATION)
    (tmp_path / "calib_cam_to_pose.txt").write_text("image_00: 1 0 0 0 0 1 0 0.5 0 0 1 1.5\n")
    assert formats.detect(tmp_path / "poses.txt") == "kitti360"
    from_car = formats.read(tmp_path / "poses.txt", calibration=tmp_path)
    assert largest(from_car.world_from_camera[0] - HAND_MADE) < 1e-12
    assert lens_difference(from_car.lens, Pinhole(552.5, 552.5, 682.0, 238.7, 1408, 376)) < 1e-12
    formats.write(replace(from_car, lens=None), tmp_path / "again", "kitti360")
    assert formats.read(tmp_path / "again").frame_names == from_car.frame_names


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "1 1 0 0 0 0 1 0 0 0 0 1 0\n",
            {},
            "calibration must be given for .*path, whose poses are of the inertial unit",
        ),
        ("1 1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1\n", {"camera": 1}, "camera must be 0 for .*path"),
        ("1 1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1\n", {"camera": 2}, "camera must be 0 or 1"),
        ("1 1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1\n2 1 0 0\n", {}, "path:2 must be 17 numbers"),
        ("nan 1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1\n", {}, "path must be whole frame numbers"),
        ("1.5 1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1\n", {}, "path must be whole frame numbers"),
    ],
)
def test_kitti360_refuses(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "path").write_text(text)
    with pytest.raises(ValueError, match=message):
        formats.read(tmp_path / "path", "kitti360", **options)


def test_a_folder_of_lingbot(tmp_path: Path) -> None:
    """One row of intrinsics stands for all frames; both files as NumPy of any float type."""
    poses = torch.stack([HAND_MADE, HAND_MADE]).numpy()
    np.save(tmp_path / "poses.npy", poses.astype(np.float32))
    np.save(tmp_path / "intrinsics.npy", np.array([[502.0, 503.0, 415.0, 239.0]], dtype=np.float32))
    assert formats.detect(tmp_path) == "lingbot"
    path = formats.read(tmp_path)
    assert largest(path.world_from_camera - HAND_MADE) < 1e-6
    assert lens_difference(path.lens, Pinhole(502.0, 503.0, 415.0, 239.0, 832, 480)) < 1e-12
    assert not path.is_metric
    for name, array, message in (
        ("intrinsics.npy", np.zeros((3, 3)), r"must be floats \[T, 4\]"),
        ("intrinsics.npy", np.zeros((0, 4)), r"must be floats \[T, 4\]"),
        ("poses.npy", poses.transpose(0, 2, 1), "last row 0 0 0 1"),
    ):
        np.save(tmp_path / name, array)
        with pytest.raises(ValueError, match=message):
            formats.read(tmp_path, "lingbot")
        np.save(tmp_path / "intrinsics.npy", np.array([[502.0, 503.0, 415.0, 239.0]]))
    with pytest.raises(ValueError, match=r"must be a folder with poses.npy and intrinsics.npy, got a file"):
        formats.read(tmp_path / "poses.npy", "lingbot")


def test_lingbot_gets_the_lens_of_its_own_size(tmp_path: Path) -> None:
    drive = replace(random_trajectory("lingbot"), lens=Pinhole(100.0, 200.0, 208.0, 60.0, 416, 120))
    formats.write(drive, tmp_path / "out", "lingbot")
    assert np.load(tmp_path / "out" / "intrinsics.npy")[0].tolist() == [200.0, 800.0, 416.0, 240.0]


@pytest.mark.parametrize(
    ("format", "arrays"),
    [
        ("vggt", {"extrinsic": INVERTED[:, :3], "intrinsic": MATRIX, "images": np.zeros((1, 3, 480, 640))}),
        ("vggt", {"extrinsic": INVERTED[:, :3], "intrinsic": MATRIX, "depth": np.zeros((1, 480, 640, 1))}),
        ("da3", {"extrinsics": INVERTED[:, :3], "intrinsics": MATRIX, "depth": np.zeros((1, 480, 640))}),
        ("da3", {"extrinsics": INVERTED, "intrinsics": MATRIX, "image": np.zeros((1, 480, 640, 3))}),
        ("mapanything", {"camera_poses": POSES, "intrinsics": MATRIX, "depth_z": np.zeros((1, 480, 640, 1))}),
        ("mapanything", {"extrinsic": POSES, "intrinsic": MATRIX, "images": np.zeros((1, 480, 640, 3)), **MASK}),
    ],
    ids=["vggt", "vggt depth", "da3", "da3 4×4", "mapanything", "mapanything's app"],
)
def test_predictions_of_networks(tmp_path: Path, format: str, arrays: dict[str, Any]) -> None:
    """Compressed or not, in float32, with objects beside that are not touched. MapAnything's first pixel is at 0."""
    lens = replace(LENS, cx=330.5, cy=240.5) if format == "mapanything" else LENS
    small = {name: array.astype(np.float32) for name, array in arrays.items()}
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "a.npz", **small, pose_enc_list=np.array([{}], dtype=object))  # type: ignore[operator]
        assert formats.detect(tmp_path / "a.npz") == format
        path = formats.read(tmp_path / "a.npz")
        assert largest(path.world_from_camera[0] - HAND_MADE) < 1e-6
        assert lens_difference(path.lens, lens) < 1e-6
        assert path.is_metric == (format == "mapanything")
    cameras = [name for name in small if not name.startswith(("depth", "image"))]
    np.savez(tmp_path / "b.npz", **{name: np.asfortranarray(small[name]) for name in cameras})
    assert formats.read(tmp_path / "b.npz").lens is None
    assert lens_difference(formats.read(tmp_path / "b.npz", image_size=(640, 480)).lens, lens) < 1e-6


def test_archives_that_are_no_paths_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, extrinsic=np.zeros((1, 2, 3, 4)), intrinsic=np.zeros((1, 2, 3, 3)))
    with pytest.raises(ValueError, match=r"matrices \[N, 3, 4\] .*, got \[1, 2, 3, 4\].*leave out the batch"):
        formats.read(file, "vggt")
    np.savez(file, depth=np.zeros(3))
    with pytest.raises(ValueError, match=r"one of the formats .*got an archive of arrays \['depth'\]"):
        formats.read(file)
    with pytest.raises(ValueError, match=r"an archive of VGGT with extrinsic, got only \['depth'\]"):
        formats.read(file, "vggt")
    np.savez(file, extrinsic=np.zeros((1, 3, 4), dtype=object), intrinsic=np.zeros((1, 3, 3)))
    with pytest.raises(ValueError, match=r"extrinsic must be at most 16,777,216 floats, got object"):
        formats.read(file, "vggt")


def test_an_angle_with_a_size_is_a_lens(tmp_path: Path) -> None:
    """Blender by way of instant-ngp."""
    opengl = (HAND_MADE * torch.tensor([1.0, -1.0, -1.0, 1.0])).tolist()
    document = {"camera_angle_x": 1.0, "w": 800, "h": 600, "aabb_scale": 4, "scale": 0.5, "offset": [0, 0, 0]}
    frames = [{"file_path": "images/0001.png", "sharpness": 30.0, "transform_matrix": opengl}]
    (tmp_path / "transforms.json").write_text(json.dumps(document | {"frames": frames}))
    path = formats.read(tmp_path / "transforms.json")
    assert largest(path.world_from_camera[0] - HAND_MADE) < 1e-12
    assert isinstance(path.lens, Pinhole)
    assert (path.lens.width, path.lens.height) == (800, 600)
    ray, _ = path.lens.unproject(torch.tensor([800.0, 300.0], dtype=torch.float64))
    assert float(torch.atan2(ray[0], ray[2])) == pytest.approx(0.5)


def test_intrinsics_in_every_frame_of_an_arkit_capture(tmp_path: Path) -> None:
    opengl = (HAND_MADE * torch.tensor([1.0, -1.0, -1.0, 1.0])).tolist()
    shared = {"fl_y": 601.0, "cx": 320, "cy": 240, "transform_matrix": opengl}
    frames = [{"file_path": f"images/{k}.png", "fl_x": 600.0 + k, **shared} for k in range(3)]
    (tmp_path / "t.json").write_text(json.dumps({"w": 640, "h": 480, "camera_angle_x": 0.9, "frames": frames}))
    path = formats.read(tmp_path / "t.json", is_metric=True)
    assert formats.detect(tmp_path / "t.json") == "nerfstudio"
    assert isinstance(path.lens, Pinhole)
    assert path.lens.fx.tolist() == [600.0, 601.0, 602.0]


def harmed(drive: torch.Tensor, harm: str) -> torch.Tensor:  # [T, 4, 4]
    if harm == "inverted":
        return inverse(drive)
    if harm == "OpenGL":
        return drive * drive.new_tensor([1.0, -1.0, -1.0, 1.0])
    return rigid(drive[:, :3, :3], 100.0 * drive[:, :3, 3])


FOUND = {
    "inverted": "look like world-to-camera",
    "OpenGL": "against its optical axis",
    "centimetres": "not in metres",
}


@pytest.mark.parametrize("harm", FOUND)
@pytest.mark.parametrize("format", ["kitti360", "argoverse2", "waymo", "lingbot", "vggt", "da3", "mapanything"])
def test_wrong_conventions_are_found_in_these_files_too(tmp_path: Path, format: str, harm: str) -> None:
    drive = turning_drive(9.0, 0.3, 0.5, 4.0, 12.0)
    is_metric = formats.FORMATS[format].only_metric
    for poses, expected in ((drive, None), (harmed(drive, harm), FOUND[harm])):
        times_s = torch.arange(len(poses), dtype=torch.float64) / 12
        path = Trajectory(poses, is_metric, "a test", times_s, NEEDS[format][0])
        formats.write(path, tmp_path / "file", format, **NEEDS[format][1])
        findings = formats.validate(formats.read(tmp_path / "file", is_metric=True))
        assert [expected in finding.message for finding in findings if expected] == ([True] if expected else [])
        assert bool(findings) == (expected is not None)
