"""Files of another convention than their format's, which read without an error would give another path."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lens_zoo import LENSES
from paths import random_trajectory

from merope import formats
from merope.formats.files import json_lines
from merope.formats.rig_file import read_rig
from merope.formats.trajectory import Trajectory

TURNED = "transpose matrices that are written for row vectors"


def row_vector_poses(count: int) -> np.ndarray:  # [count, 4, 4]
    """A straight drive as programs write it that multiply from the left."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, 3, 2] = np.arange(count)
    return poses


def test_matrices_for_row_vectors_are_refused_by_networks(tmp_path: Path) -> None:
    calibrations = np.tile(np.array([[30.0, 0, 16], [0, 30, 12], [0, 0, 1]]), (3, 1, 1))
    arrays = {"camera_poses": row_vector_poses(3), "intrinsics": calibrations, "depth_z": np.ones((3, 24, 32))}
    np.savez(tmp_path / "views.npz", **arrays)
    with pytest.raises(ValueError, match=TURNED):
        formats.read(tmp_path / "views.npz", "mapanything")


def test_matrices_for_row_vectors_are_refused_by_kitti360(tmp_path: Path) -> None:
    lines = [" ".join(map(str, (frame, *pose.flatten()))) for frame, pose in enumerate(row_vector_poses(3))]
    (tmp_path / "cam0_to_world.txt").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=TURNED):
        formats.read(tmp_path / "cam0_to_world.txt")


@pytest.mark.parametrize(("key", "value"), [("pose", "camera_from_rig"), ("axes", "x forward, y left, z up")])
def test_a_rig_of_another_convention_is_refused(tmp_path: Path, key: str, value: str) -> None:
    lens = {"model": "Pinhole", "fx": 30, "fy": 30, "cx": 24, "cy": 16, "width": 48, "height": 32}
    view = {"name": "front", "rig_from_camera": np.eye(4)[:3].tolist(), "lens": lens}
    document = {"format": "merope-rig", "version": 1, "views": [view]}
    (tmp_path / "rig.json").write_text(json.dumps(document))
    assert read_rig(tmp_path / "rig.json").names == ("front",)
    (tmp_path / "rig.json").write_text(json.dumps(document | {key: value}))
    with pytest.raises(ValueError, match=f"{key} must be .* got '{value}'"):
        read_rig(tmp_path / "rig.json")


def test_each_frame_of_nerfstudio_may_say_its_camera_model(tmp_path: Path) -> None:
    formats.write(replace(random_trajectory("nerfstudio"), lens=LENSES["fisheye"]), tmp_path / "t.json", "nerfstudio")
    document = json.loads((tmp_path / "t.json").read_text())
    model = document.pop("camera_model")
    for frame in document["frames"]:
        frame["camera_model"] = model
    (tmp_path / "t.json").write_text(json.dumps(document))
    assert type(formats.read(tmp_path / "t.json").lens) is type(LENSES["fisheye"])
    document["frames"][0]["camera_model"] = "OPENCV"
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"camera_model.* must be the same in all frames"):
        formats.read(tmp_path / "t.json")


def test_lists_from_windows_are_read_and_other_encodings_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"id": "a"}\r\n\r\n{"id": "b"}\r\n')
    assert [row["id"] for _, row in json_lines(file)] == ["a", "b"]
    file.write_bytes('{"id": "café"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows\.jsonl must be UTF-8 text"):
        list(json_lines(file))


def test_compressed_files_say_so(tmp_path: Path) -> None:
    (tmp_path / "poses.txt").write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00")
    with pytest.raises(ValueError, match="compressed with gzip; unpack it"):
        formats.read(tmp_path / "poses.txt", "tum")


def test_times_must_be_a_tensor() -> None:
    poses = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    with pytest.raises(ValueError, match=r"timestamps_s must be a torch.Tensor \[2\], got list"):
        Trajectory(poses, True, "told", timestamps_s=[0.0, 0.1])  # type: ignore[arg-type]
