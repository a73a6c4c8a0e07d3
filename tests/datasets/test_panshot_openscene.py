"""PanShot and OpenScene clips from small files in their layouts."""

import json
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scenes import curved_drive, random_poses

from merope.datasets.clip import Clip
from merope.datasets.nuscenes import read_split
from merope.datasets.openscene import read_infos, read_openscene
from merope.datasets.panshot_clips import clip_key, read_near_depths, read_sample, read_samples, without_first_yaw
from merope.formats.video import write_image
from merope.geometry.distorted_lenses import BrownConrady
from merope.geometry.lenses import Pinhole, UnifiedCamera
from merope.geometry.poses import inverse

POSE_FILE = "aB-c_d-7-0-no_rot_aug_0.npy"


def read_panshot(root: Path, near_depths: Path | None = None) -> list[Clip]:
    depths = None if near_depths is None else read_near_depths(near_depths)
    return [read_sample(row, root, 480, 832, depths) for row in read_samples(root / "samples.json")]


@pytest.fixture
def panshot(tmp_path: Path) -> Path:
    np.save(tmp_path / POSE_FILE, random_poses(81, seed=3)[:, :3].numpy().astype(np.float32))
    rows = [{"pose_path": POSE_FILE, "x_fov": 173.0, "xi": 1.66, "caption": "a street"}]
    (tmp_path / "samples.json").write_text(json.dumps(rows))
    (tmp_path / "near.jsonl").write_text(json.dumps({"video_id": "aB-c_d", "clip_id": 7, "near_depth": 0.5}) + "\n")
    return tmp_path


def test_panshot_normalisation_divides_translations_only(panshot: Path) -> None:
    (off,), (on,) = (read_panshot(panshot, near_depths=depths) for depths in (None, panshot / "near.jsonl"))
    assert torch.allclose(on.world_from_camera[:, :3, 3], 2 * off.world_from_camera[:, :3, 3], atol=1e-6)
    assert torch.equal(on.world_from_camera[:, :3, :3], off.world_from_camera[:, :3, :3])
    assert not off.is_metric
    assert off.caption == "a street"
    assert isinstance(off.lens, UnifiedCamera)
    edge, _ = off.lens.unproject(torch.tensor([0.0, 240.0], dtype=torch.float64))
    assert math.degrees(math.acos(float(edge[2]))) == pytest.approx(173 / 2)
    assert off.latent_cameras().count == 21


def test_first_yaw_is_zero_and_nothing_else_changes(panshot: Path) -> None:
    poses = random_poses(5, seed=8)
    turned = without_first_yaw(poses)
    assert abs(float(turned[0, 0, 2])) < 1e-15
    assert float(turned[0, 2, 2]) > 0
    assert (inverse(turned[:1]) @ turned - inverse(poses[:1]) @ poses).abs().max() < 1e-12
    assert (turned[:, 1, :] - poses[:, 1, :]).abs().max() < 1e-12  # heights, pitch and roll
    assert abs(float(read_panshot(panshot)[0].world_from_camera[0, 0, 2])) < 1e-12


def test_panshot_names_what_is_wrong(panshot: Path) -> None:
    assert clip_key(POSE_FILE) == "aB-c_d-7"
    (panshot / "near.jsonl").write_text(json.dumps({"video_id": "x", "clip_id": 1, "near_depth": 1.0}))
    with pytest.raises(ValueError, match="a depth for aB-c_d-7"):
        read_panshot(panshot, near_depths=panshot / "near.jsonl")
    np.save(panshot / POSE_FILE, np.full((81, 3, 4), np.nan))
    with pytest.raises(ValueError, match=rf"{POSE_FILE}.*(finite|NaN)"):
        read_panshot(panshot)
    np.save(panshot / POSE_FILE, 2 * random_poses(81)[:, :3].numpy())
    with pytest.raises(ValueError, match=POSE_FILE):
        read_panshot(panshot)
    (panshot / POSE_FILE).write_bytes((panshot / POSE_FILE).read_bytes()[:500])
    with pytest.raises(ValueError, match=POSE_FILE):
        read_panshot(panshot)
    (panshot / "near.jsonl").write_text(json.dumps({"video_id": "aB-c_d", "clip_id": 7, "near_depth": 0.0}))
    with pytest.raises(ValueError, match="near_depth of aB-c_d-7 must be positive"):
        read_panshot(panshot, near_depths=panshot / "near.jsonl")
    (panshot / POSE_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=POSE_FILE):
        read_panshot(panshot)
    (panshot / "samples.json").write_text("[]")
    with pytest.raises(ValueError, match="samples must be a JSON list"):
        read_panshot(panshot)


def infos(count: int, distortion: list[float]) -> list[dict[str, Any]]:
    """Frames of a rig whose lidar stands 1 m above the camera's origin, driving `curved_drive`."""
    lidar_from_camera = random_poses(seed=2)
    frames = []
    for index, world_from_camera in enumerate(curved_drive(count)):
        camera = {
            "data_path": f"CAM_F0/{index}.png",
            "sensor2lidar_rotation": lidar_from_camera[:3, :3].numpy(),
            "sensor2lidar_translation": lidar_from_camera[:3, 3].numpy(),
            "cam_intrinsic": np.array([[1545.0, 0, 960], [0, 1545.0, 560], [0, 0, 1]]),
            "distortion": np.array(distortion),
        }
        lidar2global = (world_from_camera @ inverse(lidar_from_camera)).numpy()
        frames.append({"timestamp": 100_000 * index, "lidar2global": lidar2global, "cams": {"CAM_F0": camera}})
    return frames


def test_openscene_poses_lens_and_frames(tmp_path: Path) -> None:
    frames = infos(6, [-0.35, 0.12, 1e-3, -2e-4, -0.02])
    (tmp_path / "log.pkl").write_bytes(pickle.dumps(frames[::-1]))
    for index in range(6):
        write_image(torch.full((54, 96, 3), 30 * index, dtype=torch.uint8), tmp_path / f"CAM_F0/{index}.png")
    clip = read_openscene(tmp_path / "log.pkl", tmp_path, 54, 96, allow_pickle=True)
    assert (clip.world_from_camera - curved_drive(6)).abs().max() < 1e-12
    assert clip.frames is not None
    assert clip.frames[:, 0, 0, 0].tolist() == [0, 30, 60, 90, 120, 150]
    assert clip.fps == pytest.approx(10.0)
    assert isinstance(clip.lens, BrownConrady)
    assert float(clip.lens.fx) == pytest.approx(1545 * 96 / 1920)
    assert float(clip.lens.k3) == pytest.approx(-0.02)
    (tmp_path / "straight.pkl").write_bytes(pickle.dumps({"infos": infos(2, [0.0] * 5)}))
    straight = read_openscene(tmp_path / "straight.pkl", tmp_path, 54, 96, with_frames=False, allow_pickle=True)
    assert isinstance(straight.lens, Pinhole)


@pytest.mark.parametrize("count", [4, 5, 8])
def test_openscene_keeps_every_coefficient_or_refuses(tmp_path: Path, count: int) -> None:
    coefficients = [-0.35, 0.12, 1e-3, -2e-4, -0.02, 0.2, 0.03, 4e-3]
    (tmp_path / "log.pkl").write_bytes(pickle.dumps(infos(2, coefficients[:count])))
    lens = read_openscene(tmp_path / "log.pkl", tmp_path, 54, 96, with_frames=False, allow_pickle=True).lens
    kept = [float(getattr(lens, name)) for name in ("k1", "k2", "p1", "p2", "k3", "k4", "k5", "k6")]
    assert kept == pytest.approx(coefficients[:count] + [0.0] * (8 - count))
    (tmp_path / "prism.pkl").write_bytes(pickle.dumps(infos(2, [*coefficients, 0.1, 0.0, 0.0, 0.0])))
    with pytest.raises(ValueError, match=r"distortion of CAM_F0/0.png must be k1 k2 p1 p2 .* got 12 of them"):
        read_openscene(tmp_path / "prism.pkl", tmp_path, 54, 96, with_frames=False, allow_pickle=True)


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


def test_pickles_are_read_on_request_only_and_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.pkl"
    file.write_bytes(pickle.dumps(infos(2, [])))
    with pytest.raises(ValueError, match="allow_pickle must be True"):
        read_infos(file)
    file.write_bytes(pickle.dumps([Harm()]))
    with pytest.raises(ValueError, match=r"builtins.print"):
        read_infos(file, allow_pickle=True)
    assert capsys.readouterr().out == ""
    file.write_bytes(pickle.dumps(infos(2, []))[:50])
    with pytest.raises(ValueError, match=r"log.pkl cannot be read"):
        read_infos(file, allow_pickle=True)


def test_openscene_without_intrinsics_is_named_and_old_pickles_are_read(tmp_path: Path) -> None:
    frames = infos(3, [])
    (tmp_path / "old.pkl").write_bytes(pickle.dumps(frames, protocol=2))
    assert len(read_infos(tmp_path / "old.pkl", allow_pickle=True)) == 3
    del frames[0]["cams"]["CAM_F0"]["cam_intrinsic"]
    (tmp_path / "log.pkl").write_bytes(pickle.dumps(frames))
    with pytest.raises(ValueError, match=r"cam_intrinsic of CAM_F0/0.png"):
        read_openscene(tmp_path / "log.pkl", tmp_path, 54, 96, with_frames=False, allow_pickle=True)


def test_openscene_times_and_channels_are_checked(tmp_path: Path) -> None:
    frames = infos(3, [])
    frames[2]["timestamp"] = frames[1]["timestamp"]
    (tmp_path / "log.pkl").write_bytes(pickle.dumps(frames))
    with pytest.raises(ValueError, match="frames 1 and 2 are not in order of time"):
        read_openscene(tmp_path / "log.pkl", tmp_path, 54, 96, with_frames=False, allow_pickle=True)
    late = infos(4, [])
    late[3]["timestamp"] += 9 * (late[2]["timestamp"] - late[1]["timestamp"])
    (tmp_path / "gap.pkl").write_bytes(pickle.dumps(late))
    with pytest.raises(ValueError, match=r"equally far apart, got .* from frame 2 to the next"):
        read_openscene(tmp_path / "gap.pkl", tmp_path, 54, 96, with_frames=False, allow_pickle=True)
    with pytest.raises(ValueError, match=r"channel must be one of \['CAM_F0'\], got 'CAM_B0'"):
        read_openscene(tmp_path / "log.pkl", tmp_path, 54, 96, channel="CAM_B0", allow_pickle=True)


def test_infos_of_another_layout_are_named(tmp_path: Path) -> None:
    """mmdet3d writes lidar2ego and ego2global as quaternions, and all scenes of nuScenes into one file."""
    frames = infos(2, [])
    for frame in frames:
        del frame["lidar2global"]
        frame |= {"lidar2ego_rotation": [1.0, 0.0, 0.0, 0.0], "ego2global_rotation": [1.0, 0.0, 0.0, 0.0]}
    (tmp_path / "mmdet3d.pkl").write_bytes(pickle.dumps({"infos": frames, "metadata": {}}))
    with pytest.raises(ValueError, match=r'frame 0 of .*mmdet3d\.pkl must be .*got no lidar2global; .*"nuscenes"'):
        read_openscene(tmp_path / "mmdet3d.pkl", tmp_path, 54, 96, with_frames=False, allow_pickle=True)
    (tmp_path / "list.pkl").write_bytes(pickle.dumps([3]))
    with pytest.raises(ValueError, match=r"frame 0 of .*got no timestamp, lidar2global, cams"):
        read_infos(tmp_path / "list.pkl", allow_pickle=True)
    incomplete = infos(2, [])
    del incomplete[1]["cams"]["CAM_F0"]
    (tmp_path / "gap.pkl").write_bytes(pickle.dumps(incomplete))
    with pytest.raises(ValueError, match=r"channel must be one of \[\], got 'CAM_F0'"):
        read_openscene(tmp_path / "gap.pkl", tmp_path, 54, 96, with_frames=False, allow_pickle=True)


@pytest.mark.parametrize(
    ("of_frame", "of_camera", "words"),
    [
        ({"cams": 3}, {}, r"cams of frame 1 of .*log\.pkl must be a dict of cameras, each a dict, got 3"),
        ({"cams": {"CAM_F0": 3}}, {}, "cams of frame 1 of"),
        ({"cams": {"CAM_F0": {}}}, {}, "CAM_F0 of .* must be a camera with data_path"),
        ({"lidar2global": np.eye(3)}, {}, r"lidar2global of frame 1 of .* of shape \(4, 4\), got \(3, 3\)"),
        ({"lidar2global": "y"}, {}, "lidar2global of frame 1 of .* must be numbers, got 'y'"),
        ({"timestamp": "x"}, {}, "timestamp of frame 1 of .* must be a number of microseconds"),
        ({}, {"sensor2lidar_rotation": [1.0, 0.0, 0.0, 0.0]}, r"sensor2lidar_rotation of CAM_F0/1\.png .* got \(4,\)"),
        ({}, {"sensor2lidar_translation": {}}, r"sensor2lidar_translation of CAM_F0/1\.png must be numbers"),
        ({}, {"data_path": 3}, "CAM_F0 of .* must be a camera with data_path"),
    ],
    ids=str,
)
def test_frames_of_other_types_and_shapes_are_named(
    tmp_path: Path, of_frame: dict[str, Any], of_camera: dict[str, Any], words: str
) -> None:
    frames = infos(3, [])
    frames[1]["cams"]["CAM_F0"] |= of_camera
    frames[1] |= of_frame
    (tmp_path / "log.pkl").write_bytes(pickle.dumps(frames))
    with pytest.raises(ValueError, match=words):
        read_openscene(tmp_path / "log.pkl", tmp_path, 54, 96, with_frames=False, allow_pickle=True)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"video_id": 1}', "[3]", "nothing"])
def test_damaged_lists_are_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "damaged.json"
    file.write_text(text)
    for read_list in (read_near_depths, read_samples, partial(read_split, name="train")):
        if not (read_list is read_samples and text == "[3]"):  # a list, whose samples are looked at when they are read
            with pytest.raises(ValueError, match="must be"):
                read_list(file)
