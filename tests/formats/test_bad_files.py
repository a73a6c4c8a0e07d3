"""Empty, truncated, malformed and ambiguous files: errors that name the file, the line and what was expected."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lens_zoo import LENSES
from paths import FOLDERS, NEEDS, random_trajectory

from merope import formats
from merope.geometry.lenses import Pinhole

RE10K_LINE = "0 0.5 0.9 0.5 0.5 0 0 1 0 0 0 0 1 0 0 0 0 1 0"
POSE = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]

BAD_TEXTS = [
    ("re10k", f"url\n{RE10K_LINE}\n{RE10K_LINE[:-9]}\n", r"path:3 must be 19 numbers \(time fx .*\), got 14 of them"),
    ("re10k", f"url\n{RE10K_LINE}\n\n{RE10K_LINE[:-1]}x\n", r"path:4 must be 19 numbers .* got 'x'"),
    ("re10k", f"url\n{RE10K_LINE}\n{RE10K_LINE[:-1]}nan\n", r"path:3 must be finite"),
    ("re10k", "# url\n", r"path must be lines of time fx .* got no line of data"),
    ("re10k", "url\n", r"path must be lines of time fx .* got no line of data"),
    ("re10k", f"url\n{RE10K_LINE.replace('1 0 0 0 0 1', '2 0 0 0 0 1')}\n", r"path:2\[.*must be rotations"),
    ("kitti", "1 0 0 0 0 1 0 0 0 0 1 0\n1 0 0 0 0 1 0 0\n", r"path:2 must be 12 numbers"),
    ("kitti", "1 0 0 0 0 1 0 0 0 0 -1 0\n", r"path:1\[.*proper rotations"),
    ("tum", "# head\n1 0 0 0 0 0 0 1\n2 0 0 0 0 0 0 0.5\n", r"path:3 must be a unit quaternion, got one of length 0.5"),
    ("tum", "1 0 0 0 0 0 0 1\n2 0 0 0 0 0 0", r"path:2 must be 8 numbers \(time tx .*got 7 of them"),
    ("tum", "1 0 0 0 0 0 0 1\n2 0 inf 0 0 0 0 1", r"path:2 must be finite"),
    ("tum", f"1 0 0 0 0 0 0 1\n1e-{'9' * 30} 0 0 0 0 0 0 1", r"path:2 must be a time in seconds"),
    ("nerfstudio", '{"frames": [', r"path:1 must be valid JSON"),
    ("nerfstudio", '{"fl_x": 1,\n "frames": []}', r"path frames must be a list with at least one frame"),
    ("nerfstudio", json.dumps({"frames": [{"file_path": "a", "transform_matrix": POSE[:3]}]}), r"frames\[0\].*4 × 4"),
    ("nerfstudio", json.dumps({"frames": [{"transform_matrix": POSE}]}), r"frames\[0\] must be .* with 'file_path'"),
    ("nerfstudio", json.dumps({"frames": [{"file_path": "a", "transform_matrix": POSE}]}), r"transforms file with w"),
    (
        "nerfstudio",
        json.dumps({"w": 4, "h": 3, "fl_x": "5", "frames": [{"file_path": "a", "transform_matrix": POSE}]}),
        r"path fl_x must be a number, got '5'",
    ),
    (
        "nerfstudio",
        json.dumps({"camera_model": "FOV", "w": 4, "h": 3, "frames": [{"file_path": "a", "transform_matrix": POSE}]}),
        r"path camera_model must be PINHOLE, .*got FOV",
    ),
    (
        "nerfstudio",
        json.dumps({"k4": 0.1, "fl_x": 5, "w": 4, "h": 3, "frames": [{"file_path": "a", "transform_matrix": POSE}]}),
        r"path k4 must be 0 for an OPENCV camera, got 0.1",
    ),
    ("blender", json.dumps({"frames": [{"file_path": "a", "transform_matrix": POSE}]}), r"file with camera_angle_x"),
    ("recammaster", '{"frame0": {"cam01": "[1 0 0 0] [0 1 0 0] [0 0 1 0]"}}', r"frame0.cam01 must be four rows"),
    (
        "recammaster",
        '{"frame0": {"cam01": "[1 0 0 0] [0 1 0] [0 0 1 0] [0 0 0 1]"}}',
        r"frame0.cam01 must be 4 numbers",
    ),
    ("recammaster", '{"frame0": {"cam01": ""}, "frames": 1}', r"got 'frames'"),
    ("merope", '{"format": "merope-trajectory", "version": 2}', r"path: .*; version must be 1, got 2"),
    ("merope", '{"format": "merope-trajectory"}', r"path: version, is_metric, frames must be there"),
    ("merope", "[1, 2]", r"path must be a JSON object with format, .*, got list"),
    ("panshot", "text", r"path must be a NumPy array of numbers"),
]


@pytest.mark.parametrize(("format", "text", "message"), BAD_TEXTS)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, format: str, text: str, message: str) -> None:
    (tmp_path / "path").write_text(text)
    with pytest.raises(ValueError, match=message):
        formats.read(tmp_path / "path", format)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_empty_and_binary_files_are_refused(tmp_path: Path, format: str) -> None:
    if format == "colmap":
        (tmp_path / "cameras.txt").write_text("1 PINHOLE 640 480 500 500 320 240\n")
    options = {"body_from_camera": torch.eye(4)} if format == "euroc" else {}
    path = tmp_path / "images.txt"
    for content in (b"", b" \n\n", b"\x00\xff\xfe\x80" * 9):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"images.txt must be"):
            formats.read(path, format, **options)
    with pytest.raises(FileNotFoundError):
        formats.read(tmp_path / "absent" / "images.txt", format, **options)


@pytest.mark.parametrize("format", [name for name in formats.FORMATS if name not in FOLDERS])
@given(share=st.floats(0.0, 1.0, exclude_max=True))
def test_a_file_cut_anywhere_never_gives_wrong_poses(
    tmp_path_factory: pytest.TempPathFactory, format: str, share: float
) -> None:
    """A cut between lines leaves a shorter path; any other cut is a ValueError or loses digits of the last number."""
    path = tmp_path_factory.mktemp("cut") / "path"
    trajectory = random_trajectory(format, count=3)
    _, write_options, read_options = NEEDS[format]
    formats.write(trajectory, path, format, **write_options)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    poses = trajectory.world_from_camera[:0]
    complaint = f"{path}"
    try:
        poses = formats.read(path, format, **read_options).world_from_camera
    except ValueError as error:
        complaint = str(error)
    assert str(path) in complaint
    difference = (poses - trajectory.world_from_camera[: len(poses)]).abs().amax((-2, -1))
    assert (difference[:-1] < 1e-5).all()


def test_what_is_not_there_is_not_invented(tmp_path: Path) -> None:
    np.save(tmp_path / "bad.npy", np.zeros((4, 4)))
    with pytest.raises(ValueError, match=r"bad.npy must be one of the formats .* got an array \[4, 4\]"):
        formats.detect(tmp_path / "bad.npy")
    np.save(tmp_path / "ints.npy", np.zeros((4, 3, 4), dtype=np.int64))
    with pytest.raises(ValueError, match=r"ints.npy must be floats \[T, 3, 4\], got int64"):
        formats.read(tmp_path / "ints.npy")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"objects.npy must be a NumPy array of numbers"):
        formats.detect(tmp_path / "objects.npy")
    (tmp_path / "note.txt").write_text("dear diary\n1 2 3\n")
    with pytest.raises(ValueError, match=r"got text that begins with 'dear diary'"):
        formats.detect(tmp_path / "note.txt")
    (tmp_path / "list.json").write_text('[{"pose_path": "a.npy"}]')
    with pytest.raises(ValueError, match=r"got a JSON list"):
        formats.detect(tmp_path / "list.json")
    with pytest.raises(ValueError, match=r"got a folder with \['bad.npy'"):
        formats.detect(tmp_path)
    (model := tmp_path / "sparse").mkdir()
    for name in ("cameras.bin", "images.bin", "points3D.bin"):
        (model / name).write_bytes(bytes(5))
    with pytest.raises(ValueError, match=r"sparse/cameras.bin must be a whole COLMAP file, got one that ends after 5"):
        formats.read(model)


def test_the_documentation_makes_a_path_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    poses = random_trajectory("merope", count=4).world_from_camera
    millimetres = poses.clone()
    millimetres[:, :3, 3] *= 1000
    np.save("w2c.npy", torch.linalg.inv(millimetres).numpy())
    with pytest.raises(ValueError, match=r"got an array \[4, 4, 4\]; .*docs/formats.md"):
        formats.read("w2c.npy")
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    (code,) = re.findall(r"```python\n(import numpy.*?)```", page, re.DOTALL)
    exec(code, names := {})
    assert names["trajectory"].is_metric
    assert (names["trajectory"].world_from_camera - poses).abs().max() < 1e-9


def test_ambiguous_files_name_the_candidates(tmp_path: Path) -> None:
    path = tmp_path / "path.csv"
    path.write_text("12.5,1,2,3,0,0,0,1\n13.5,1,2,3,0,0,0,1\n")
    with pytest.raises(ValueError, match=r"tum and euroc are possible.*pass format='tum'"):
        formats.read(path)
    assert formats.read(path, "tum").count == 2
    path.write_text("1000000000001,1,2,3,0,0,0,1\n")  # after 10¹² the first column can only be nanoseconds
    assert formats.detect(path) == "euroc"
    path.write_text(json.dumps({"frames": [{"file_path": "a", "transform_matrix": POSE}]}))
    with pytest.raises(ValueError, match=r"nerfstudio and blender are possible"):
        formats.detect(path)


def test_quaternions_may_be_rounded_but_not_wrong(tmp_path: Path) -> None:
    path = tmp_path / "path.txt"
    path.write_text("1 0 0 0 0 0.3827 0 0.924\n")  # a turn of 45°, three digits: longer than 1 by 1e-4
    rotation = formats.read(path).world_from_camera[0, :3, :3]
    assert rotation[:, 2].tolist() == pytest.approx([0.5**0.5, 0.0, 0.5**0.5], abs=1e-4)
    path.write_text("1 0 0 0 0 0 0 1.02\n")
    with pytest.raises(ValueError, match=r"must be a unit quaternion, got one of length 1.02"):
        formats.read(path)


def test_names_of_formats_and_options_are_checked(tmp_path: Path) -> None:
    trajectory = random_trajectory("tum")
    with pytest.raises(ValueError, match=r"format must be one of merope, re10k.*got 'openexr'"):
        formats.read(tmp_path, "openexr")
    with pytest.raises(ValueError, match=r"options of tum must be among \['body_from_camera'\], got 'camera'"):
        formats.write(trajectory, tmp_path / "a", "tum", camera="cam01")


@pytest.mark.parametrize("format", ["kitti", "tum", "euroc", "recammaster"])
def test_arbitrary_scale_is_not_written_as_metres(tmp_path: Path, format: str) -> None:
    trajectory = replace(random_trajectory(format), is_metric=False)
    with pytest.raises(ValueError, match=f"trajectory.is_metric must be True for {format}"):
        formats.write(trajectory, tmp_path / "a", format, **NEEDS[format][1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("format", "lens"),
    [
        ("re10k", "brown"),
        ("blender", "pinhole"),
        ("nerfstudio", "rational"),
        ("colmap", "sphere-positive"),
        ("panshot", "pinhole"),
    ],
)
def test_a_lens_that_the_format_cannot_hold_is_refused(tmp_path: Path, format: str, lens: str) -> None:
    with pytest.raises(ValueError, match=r"trajectory.lens must be .*, got"):
        formats.write(replace(random_trajectory(format), lens=LENSES[lens]), tmp_path / "a", format)


@pytest.mark.parametrize("format", ["re10k", "colmap", "nerfstudio", "blender"])
def test_a_missing_lens_is_asked_for_and_nothing_is_left_behind(tmp_path: Path, format: str) -> None:
    with pytest.raises(ValueError, match=f"lens must be given for {format}, got None; read the path with lens="):
        formats.write(replace(random_trajectory(format), lens=None), tmp_path / "path", format)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_trajectory_or_no_lens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trajectory must be a Trajectory, got int;"):
        formats.write(3, tmp_path / "path")  # type: ignore[arg-type]
    formats.write(random_trajectory("merope"), tmp_path / "path.json")
    with pytest.raises(ValueError, match="lens must be a lens, got 3;"):
        formats.read(tmp_path / "path.json", lens=3)  # type: ignore[arg-type]


def test_a_refused_lens_is_named_and_not_printed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"for panshot, got another Pinhole; write merope JSON"):
        formats.write(replace(random_trajectory("panshot"), lens=LENSES["pinhole"]), tmp_path / "a", "panshot")


def test_a_centred_pinhole_is_a_panshot_lens(tmp_path: Path) -> None:
    lens = Pinhole(500.0, 500.0, 320.0, 240.0, 640, 480)
    formats.write(replace(random_trajectory("panshot"), lens=lens), tmp_path / "a.npy", "panshot")
    again = formats.read(tmp_path / "a.npy", image_size=(640, 480)).lens
    assert again is not None
    pixels = torch.tensor([[0.5, 0.5], [400.0, 300.0]], dtype=torch.float64)
    torch.testing.assert_close(again.unproject(pixels)[0], lens.unproject(pixels)[0], rtol=0, atol=1e-9)


def test_blender_refuses_a_centred_lens_without_square_pixels(tmp_path: Path) -> None:
    lens = Pinhole(500.0, 510.0, 320.0, 240.0, 640, 480)
    with pytest.raises(ValueError, match=r"trajectory.lens must be one centred Pinhole with fx = fy for blender"):
        formats.write(replace(random_trajectory("blender"), lens=lens), tmp_path / "a", "blender")


def test_a_pose_that_is_not_finite_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "path.txt").write_text("0 0 0 0 0 0 0 1\n0.1 nan 0 0 0 0 0 1\n0.2 2 0 0 0 0 0 1\n")
    with pytest.raises(ValueError, match=r"path\.txt:2 must be finite, got NaN or inf; drop this pose$"):
        formats.read(tmp_path / "path.txt", format="tum")


def test_missing_and_broken_times_are_refused(tmp_path: Path) -> None:
    trajectory = random_trajectory("tum")
    with pytest.raises(ValueError, match=r"trajectory.timestamps_s must be given for tum"):
        formats.write(replace(trajectory, timestamps_s=None), tmp_path / "a", "tum")
    times = torch.arange(7.0, dtype=torch.float64)
    times[3] = math.nan
    with pytest.raises(ValueError, match=r"trajectory.timestamps_s must be finite, got NaN or inf at index 3"):
        formats.write(replace(trajectory, timestamps_s=times), tmp_path / "a", "merope")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("is_metric", 1, "is_metric must be true or false"),
        ("unit", "arbitrary", "unit must be 'metre'"),
        ("axes", "OpenGL", "axes must be 'x right, y down, z forward'"),
        ("lens", {"model": "Cylinder"}, "lens.model must be one of Pinhole"),
        ("lens", {"model": "Pinhole", "fx": 1.0}, "lens must be a Pinhole with .* got no fy, cx, cy, width, height"),
        ("frames", [{"world_from_camera": [[1]]}], r"frames\[0\].world_from_camera must be a 3 × 4 matrix"),
        (
            "frames",
            [{"world_from_camera": POSE[:3], "time_s": 0.0}, {"world_from_camera": POSE[:3]}],
            r"frames\[\].time_s must be a float in every frame or in none, got 1 of 2",
        ),
        ("frames", [{"world_from_camera": POSE[:3], "name": 5}], r"frames\[\].name must be a str .*got 5"),
    ],
)
def test_our_json_is_checked_entry_by_entry(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = tmp_path / "a.json"
    formats.write(replace(random_trajectory("merope"), is_metric=True), path)
    document = json.loads(path.read_text())
    document[key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        formats.read(path)
