"""Which video belongs to which commanded path: names, folders and manifests."""

import json
from pathlib import Path

import pytest
import torch
from scenes import PINHOLE, straight_drive
from torch import Tensor

from merope import formats
from merope.evaluate.discover import ClipName, clip_name, match, read_commanded
from merope.formats.trajectory import Trajectory


def write_path(file: Path, poses: Tensor) -> None:  # [T, 4, 4]
    file.parent.mkdir(parents=True, exist_ok=True)
    formats.write(Trajectory(poses, True, "made by a test", lens=PINHOLE), file)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("scene", ClipName("scene")),
        ("left/scene", ClipName("scene", "left")),
        ("city/right/scene", ClipName("city/scene", "right")),
        ("city/scene_left", ClipName("city/scene", "left")),
        ("scene-original", ClipName("scene", "original")),
        ("CAM_FRONT_LEFT", ClipName("CAM_FRONT_LEFT")),
        ("leftover", ClipName("leftover")),
        ("left", ClipName("left")),
    ],
)
def test_names_tell_the_manoeuvre(place: str, expected: ClipName) -> None:
    assert clip_name(place) == expected


def test_names_match_however_the_manoeuvre_is_written(tmp_path: Path) -> None:
    for name in ("left/a", "original/a", "b"):
        write_path(tmp_path / f"commanded/{name}.json", straight_drive(2))
    formats.write(Trajectory(straight_drive(2), True, "", lens=PINHOLE), tmp_path / "commanded/model", "colmap")
    for name in ("a_left", "a", "b-original", "model"):
        (tmp_path / "videos").mkdir(exist_ok=True)
        (tmp_path / f"videos/{name}.mp4").touch()
    jobs, strays = match(read_commanded(tmp_path / "commanded"), {"ours": tmp_path / "videos"})
    found = {str(job.clip): job.video.name for job in jobs if job.video is not None}
    assert found == {"left/a": "a_left.mp4", "original/a": "a.mp4", "b": "b-original.mp4", "model": "model.mp4"}
    assert strays == []


def test_a_folder_of_merope_generate_is_its_own_commanded_paths(tmp_path: Path) -> None:
    """clip.mp4, clip.cameras.json, clip.json: video, path, record."""
    for name in ("a", "b_left", "v1.5"):
        write_path(tmp_path / f"{name}.cameras.json", straight_drive(2))
        (tmp_path / f"{name}.json").write_text(json.dumps({"settings": {}, "versions": {}, "wall_s": {}}))
        (tmp_path / f"{name}.mp4").touch()
    jobs, strays = match(read_commanded(tmp_path), {"ours": tmp_path})
    found = {str(job.clip): (job.commanded.poses.name, job.video.name) for job in jobs if job.video is not None}
    assert found == {
        "a": ("a.cameras.json", "a.mp4"),
        "left/b": ("b_left.cameras.json", "b_left.mp4"),
        "v1.5": ("v1.5.cameras.json", "v1.5.mp4"),
    }
    assert strays == []


def test_a_path_beside_cameras_of_the_same_name_is_not_taken_for_a_record(tmp_path: Path) -> None:
    for name in ("a.json", "a.cameras.json"):
        write_path(tmp_path / name, straight_drive(2))
    (tmp_path / "a.mp4").touch()
    (job,), _ = match(read_commanded(tmp_path), {"ours": tmp_path})
    assert job.refusal is not None
    assert job.refusal.kind == "ambiguous name"


def test_two_files_of_one_name_are_not_guessed_between(tmp_path: Path) -> None:
    write_path(tmp_path / "commanded/a.json", straight_drive(2))
    for name in ("a.mp4", "a.webm"):
        (tmp_path / "videos").mkdir(exist_ok=True)
        (tmp_path / f"videos/{name}").touch()
    (job,), _ = match(read_commanded(tmp_path / "commanded"), {"ours": tmp_path / "videos"})
    assert job.refusal is not None
    assert job.refusal.kind == "ambiguous name"


def test_a_manifest_cuts_clips_from_longer_paths(tmp_path: Path) -> None:
    write_path(tmp_path / "poses.json", straight_drive(20, step_m=1.0))
    row = {"id": "a", "poses": "poses.json", "start": 2, "stride": 3, "frames": 4, "manoeuvre": "u-turn", "mood": "?"}
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(json.dumps(row) + "\n")
    (one,) = read_commanded(manifest)
    assert one.clip == ClipName("a", "u-turn")
    assert one.trajectory().world_from_camera[:, 2, 3].tolist() == [2.0, 5.0, 8.0, 11.0]
    stamps_s = torch.arange(20, dtype=torch.float64)
    named = Trajectory(straight_drive(20), True, "", stamps_s, frame_names=tuple(map(str, range(20))), time_origin_ns=7)
    cut = named.at(torch.tensor([2, 5]))
    assert (cut.frame_names, cut.time_origin_ns) == (("2", "5"), 7)
    assert cut.timestamps_s is not None
    assert cut.timestamps_s.tolist() == [2.0, 5.0]
    manifest.write_text(json.dumps(row | {"frames": 9}))
    with pytest.raises(ValueError, match="at least 27"):
        read_commanded(manifest)[0].trajectory()
    times_s = torch.tensor([0.0, 0.1, 0.1], dtype=torch.float64)
    formats.write(Trajectory(straight_drive(3), True, "", times_s), tmp_path / "twice.txt", "tum")
    manifest.write_text(json.dumps({"id": "a", "poses": "twice.txt"}))
    with pytest.raises(ValueError, match=r"twice.txt must be increasing, got a duplicate timestamp at index 2"):
        read_commanded(manifest)[0].trajectory()
    manifest.write_text('{"id": "a"}')
    with pytest.raises(ValueError, match="line 1"):
        read_commanded(manifest)


@pytest.mark.parametrize("indent", [1, None])
def test_a_single_pose_file_is_no_manifest(tmp_path: Path, indent: int | None) -> None:
    file = tmp_path / "path.json"
    write_path(file, straight_drive(2))
    file.write_text(json.dumps(json.loads(file.read_text()), indent=indent))
    expected = "commanded must be a folder of pose files or a JSON-lines manifest, got .*path.json, which is one JSON"
    with pytest.raises(ValueError, match=f"{expected} document; put the file into a folder, named like its video"):
        read_commanded(file)
