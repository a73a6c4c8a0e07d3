"""nuScenes clips from tables that the library writes itself, in the official layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scenes import curved_drive, random_poses
from torch import Tensor

from merope.curation.retrieve import Target
from merope.datasets.history_source import FrameLibrary
from merope.datasets.json_stream import stream_objects
from merope.datasets.nuscenes import NuScenes, Window, read_split
from merope.datasets.synth import MAP_FROM_WORLD, Drive, write_nuscenes
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole

VERSION = "v1.0-mini"
LENS = Pinhole(1266.4, 1266.4, 816.3, 491.5, 1600, 900)


def stripes(cameras: Cameras) -> Tensor:  # uint8 [V, H, W, 3]
    """A flat colour per frame: frame number in red, so that the order of frames can be checked."""
    images = torch.zeros(cameras.count, 90, 160, 3, dtype=torch.uint8)
    images[..., 0] = (4 * torch.arange(cameras.count))[:, None, None]
    return images


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nuscenes")
    drives = [
        Drive(curved_drive(30), "rain, parked cars", "singapore-queenstown"),
        Drive(
            curved_drive(20, yaw_step_rad=-0.02), "night, turn left", "boston-seaport", start_us=1_700_000_000_000_000
        ),
    ]
    small = Pinhole(126.64, 126.64, 81.63, 49.15, 160, 90)
    write_nuscenes(folder, VERSION, drives, small, stripes)
    return folder


def rotation(quaternion: list[float]) -> np.ndarray:  # [3, 3]
    """Rotation matrix of (w, x, y, z), written out independently of the library."""
    w, (x, y, z) = quaternion[0], quaternion[1:]
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + 2 * w * cross + 2 * cross @ cross


def rigid(row: dict[str, list[float]]) -> np.ndarray:  # [4, 4]
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = rotation(row["rotation"]), row["translation"]
    return pose


def test_poses_are_the_composition_of_the_tables(root: Path) -> None:
    tables = {name: json.loads((root / VERSION / f"{name}.json").read_text()) for name in ("sample_data", "ego_pose")}
    (calibration,) = json.loads((root / VERSION / "calibrated_sensor.json").read_text())
    ego = {row["token"]: row for row in tables["ego_pose"]}
    frames = NuScenes(root, VERSION).frames
    expected = {r["filename"]: rigid(ego[r["ego_pose_token"]]) @ rigid(calibration) for r in tables["sample_data"]}
    assert len(frames.filename) == len(expected) == 50
    for name, pose in zip(frames.filename, frames.world_from_camera, strict=True):
        assert np.abs(pose - expected[str(name)]).max() < 1e-12


def test_poses_are_those_that_were_driven(root: Path) -> None:
    clip = NuScenes(root, VERSION).clip(Window("scene-0000", 0, 30, 1), 90, 160)
    assert (clip.world_from_camera - MAP_FROM_WORLD @ curved_drive(30)).abs().max() < 1e-12


def test_clips_carry_frames_lens_prompt_and_times(root: Path) -> None:
    data = NuScenes(root, VERSION)
    clip = data.clip(Window("scene-0000", 2, 4, 3), 45, 80)
    assert clip.frames is not None
    assert clip.frames.shape == (4, 45, 80, 3)
    assert (clip.frames[..., 0].float().mean((1, 2)) - torch.tensor([8.0, 20.0, 32.0, 44.0])).abs().max() < 3
    assert clip.caption == "rain, parked cars"
    assert clip.location == "singapore-queenstown"
    assert clip.fps == pytest.approx(4.0)
    assert torch.allclose(clip.timestamps_s, torch.arange(4, dtype=torch.float64) / 4, atol=1e-5)
    assert isinstance(clip.lens, Pinhole)
    assert float(clip.lens.fx) == pytest.approx(126.64 / 2)
    assert float(clip.lens.cy) == pytest.approx(49.15 / 2)
    assert clip.latent_cameras().count == 1


def test_windows_stay_inside_scenes_and_splits(root: Path, tmp_path: Path) -> None:
    data = NuScenes(root, VERSION)
    windows = data.windows(count=9)
    assert len(windows) == (30 - 8) + (20 - 8)
    scenes = data.frames.scene
    assert all(len(set(scenes[w.start : w.start + 9])) == 1 for w in windows)
    split = tmp_path / "splits.json"
    split.write_text(json.dumps({"train": ["scene-0000"], "val": ["scene-0001"]}))
    assert {w.scene for w in data.windows(count=9, scenes=read_split(split, "val"))} == {"scene-0001"}
    assert len(data.windows(count=5, stride=2, step=4, scenes=["scene-0000"])) == 6
    with pytest.raises(ValueError, match="scene-9999"):
        data.windows(count=9, scenes=["scene-9999"])
    with pytest.raises(ValueError, match="test"):
        read_split(split, "test")


@pytest.mark.parametrize("gap_us", [83_333, 400_000], ids=["one lost frame", "half a second"])
def test_windows_do_not_cross_gaps_in_time(tmp_path: Path, gap_us: int) -> None:
    write_nuscenes(tmp_path, VERSION, [Drive(curved_drive(20), "a")], LENS)
    file = tmp_path / VERSION / "sample_data.json"
    rows = json.loads(file.read_text())
    for row in rows[10:]:
        row["timestamp"] += gap_us
    file.write_text(json.dumps(rows))
    assert [w.start for w in NuScenes(tmp_path, VERSION).windows(count=9)] == [0, 1, 10, 11]


def test_the_cache_is_used_and_equal(root: Path) -> None:
    first, second = NuScenes(root, VERSION).frames, NuScenes(root, VERSION).frames
    assert list((root / VERSION).glob("merope-*.npz"))
    assert np.array_equal(first.world_from_camera, second.world_from_camera)
    assert np.array_equal(first.filename, second.filename)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    small = Pinhole(126.64, 126.64, 81.63, 49.15, 160, 90)
    write_nuscenes(tmp_path, VERSION, [Drive(curved_drive(8), "a")], small, stripes)
    data = NuScenes(tmp_path, VERSION)
    gone, broken = (tmp_path / str(name) for name in data.frames.filename[2:4])
    gone.unlink()
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(FileNotFoundError, match=gone.name):
        data.clip(Window("scene-0000", 2, 1, 1), 45, 80)
    with pytest.raises(ValueError, match=rf"{broken.name} cannot be decoded"):
        data.clip(Window("scene-0000", 3, 1, 1), 45, 80)


def test_broken_tables_are_named(tmp_path: Path) -> None:
    write_nuscenes(tmp_path, VERSION, [Drive(random_poses(6), "a")], LENS)
    table = tmp_path / VERSION / "ego_pose.json"
    text = table.read_text()
    table.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"ego_pose.json: broken off or malformed after \d+ objects"):
        NuScenes(tmp_path, VERSION)
    rows = json.loads(text)
    table.write_text(json.dumps(rows[1:]))
    with pytest.raises(ValueError, match=rf"lacks 1 poses, first {rows[0]['token']}"):
        NuScenes(tmp_path, VERSION)
    table.unlink()
    with pytest.raises(FileNotFoundError, match=r"ego_pose.json is missing"):
        NuScenes(tmp_path, VERSION)
    with pytest.raises(
        ValueError, match=r"version must be a folder of tables .*'v1.0-test'; there are \['v1.0-mini'\]"
    ):
        NuScenes(tmp_path, "v1.0-test")


def test_duplicate_timestamps_and_wrong_channels_are_named(tmp_path: Path) -> None:
    write_nuscenes(tmp_path, VERSION, [Drive(random_poses(6), "a")], LENS)
    with pytest.raises(ValueError, match=r"channel must be .*'CAM_BACK'"):
        NuScenes(tmp_path, VERSION, channel="CAM_BACK")
    file = tmp_path / VERSION / "sample_data.json"
    rows = json.loads(file.read_text())
    rows[3]["timestamp"] = rows[2]["timestamp"]
    file.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match="have the same timestamp"):
        NuScenes(tmp_path, VERSION)


def test_a_cache_of_other_tables_or_a_broken_one_is_not_used(tmp_path: Path) -> None:
    write_nuscenes(tmp_path, VERSION, [Drive(curved_drive(8), "a")], LENS)
    assert len(NuScenes(tmp_path, VERSION).frames.filename) == 8
    write_nuscenes(tmp_path, VERSION, [Drive(curved_drive(9), "a"), Drive(curved_drive(9), "b")], LENS)
    assert len(NuScenes(tmp_path, VERSION).frames.filename) == 18
    for cache in (tmp_path / VERSION).glob("merope-*.npz"):
        cache.write_bytes(cache.read_bytes()[:200])
    assert len(NuScenes(tmp_path, VERSION).frames.filename) == 18


def test_kept_tables_that_are_damaged_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_nuscenes(tmp_path, VERSION, [Drive(curved_drive(8), "a")], LENS)
    expected = NuScenes(tmp_path, VERSION).frames
    (kept,) = (tmp_path / VERSION).glob("merope-*.npz")
    whole = kept.read_bytes()
    with np.load(kept) as arrays:
        short = {name: array[:3] for name, array in arrays.items()} | {"scene": arrays["scene"]}
    np.savez_compressed(kept, **short)
    damaged = [kept.read_bytes(), b"", whole[:-30]]
    for place in range(5, len(whole), 97):
        damaged.append(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    for content in damaged:
        kept.write_bytes(content)
        again = NuScenes(tmp_path, VERSION).frames
        for name, array in vars(expected).items():
            assert np.array_equal(getattr(again, name), array)
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 4, "stride": 0}, {"count": 4, "step": 0}])
def test_windows_of_nothing_are_refused(root: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be an int ≥ 1, got 0"):
        NuScenes(root, VERSION).windows(**options)


def test_rows_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    for table, change, message in (
        ("calibrated_sensor", lambda row: row.pop("camera_intrinsic"), "a camera with intrinsics"),
        ("ego_pose", lambda row: row.update(rotation=[0.0, 0.0, 0.0, 0.0]), "a unit quaternion"),
        ("sample_data", lambda row: row.update(sample_token="gone"), "lacks gone"),
        ("scene", lambda row: row.pop("description"), r"cannot be joined.*'description'"),
        ("scene", lambda row: row.update(log_token="gone"), r"cannot be joined.*'gone'"),
        ("ego_pose", lambda row: row.pop("rotation"), r"cannot be joined.*'rotation'"),
        ("scene", lambda row: row.update(token=[]), r"cannot be joined.*unhashable"),
    ):
        write_nuscenes(tmp_path, VERSION, [Drive(curved_drive(3), "a")], LENS)
        file = tmp_path / VERSION / f"{table}.json"
        rows = json.loads(file.read_text())
        change(rows[0])
        file.write_text(json.dumps(rows))
        with pytest.raises(ValueError, match=message):
            NuScenes(tmp_path, VERSION)


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_stream_equals_json(tmp_path: Path, indent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merope.datasets.json_stream.CHUNK_CHARACTERS", 37)
    rows = [{"token": f"{i}", "text": 'a "quoted", [text] é ' * (i % 5), "list": [i, -1.5e-7, None]} for i in range(50)]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows, indent=indent))
    assert list(stream_objects(file)) == rows
    file.write_text("[]")
    assert list(stream_objects(file)) == []
    file.write_text('{"a": 1}')
    with pytest.raises(ValueError, match="expected a JSON list"):
        list(stream_objects(file))


@pytest.mark.parametrize("table", ["scene", "log", "sample", "sample_data", "sensor", "calibrated_sensor", "ego_pose"])
@pytest.mark.parametrize("text", ["[" * 100_000, "[3]", '[{"token": ' + "[" * 100_000, '["a"]'])
def test_tables_of_something_else_are_named(tmp_path: Path, table: str, text: str) -> None:
    write_nuscenes(tmp_path, VERSION, [Drive(curved_drive(3), "a")], LENS)
    (tmp_path / VERSION / f"{table}.json").write_text(text)
    with pytest.raises(ValueError, match=rf"item 0 of .*/{table}\.json must be a JSON object"):
        NuScenes(tmp_path, VERSION)


def test_donors_of_another_shape_carry_the_lens_of_their_images(root: Path) -> None:
    """Images of 160×90 scaled to a square: each axis of the lens by its own factor."""
    data = NuScenes(root, VERSION)
    library = FrameLibrary.of(data, None)
    target = Target(
        torch.from_numpy(data.frames.world_from_camera[:3]), "singapore-queenstown", traversal="another drive"
    )
    donors = library.donors(library.index.nearest(target, [0, 2]), 64, 64)
    assert donors is not None
    assert donors.frames.shape == (2, 64, 64, 3)
    lens = donors.cameras.lens
    assert isinstance(lens, Pinhole)
    expected = (126.64 * 64 / 160, 126.64 * 64 / 90, 81.63 * 64 / 160, 49.15 * 64 / 90)
    for values, value in zip((lens.fx, lens.fy, lens.cx, lens.cy), expected, strict=True):
        assert values.tolist() == pytest.approx([value, value])
