"""`merope data synth` and `merope curate`, from an empty folder to a manifest."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from scenes import curved_drive

from merope.cli import main
from merope.curation.curate import read_manifest
from merope.datasets.loader import curation_of
from merope.datasets.nuscenes import NuScenes, Window
from merope.datasets.videos import VideoData, VideoSource, read_video_rows
from merope.formats import write
from merope.formats.trajectory import Trajectory


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("synth")
    size = ["--size", "18", "32"]
    assert main(["data", "synth", "--out", str(root), "--scenes", "2", "--frames", "8", "--seed", "3", *size]) == 0
    return root


def test_synth_writes_a_readable_data_set(synthetic: Path) -> None:
    data = NuScenes(synthetic, "v1.0-mini")
    assert all((synthetic / str(name)).is_file() for name in data.frames.filename)
    assert data.frames.scene_name.tolist() == ["scene-0000", "scene-0001"]
    clip = data.clip(Window("scene-0000", 0, 8, 1), 18, 32)
    assert clip.frames is not None
    brightness = clip.frames.float().mean((1, 2))
    assert (brightness > 40).all()  # a lit street, not a black image
    assert (brightness < 230).all()
    assert clip.frames.float().std(dim=(1, 2)).min() > 10  # and not a flat one
    assert not torch.equal(clip.frames[0], clip.frames[-1])


def open_as_the_devkit_does(root: Path, version: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The steps of nuscenes-devkit's NuScenes.__init__: every table, indices by token, and what it adds to rows."""
    names = "category attribute visibility instance sensor calibrated_sensor ego_pose log scene sample sample_data"
    rows = {
        name: json.loads((root / version / f"{name}.json").read_text())
        for name in [*names.split(), "sample_annotation", "map"]
    }
    tables = {name: {row["token"]: row for row in table} for name, table in rows.items()}
    assert all(len(tables[name]) == len(table) for name, table in rows.items())
    for row in rows["map"]:
        assert (root / row["filename"]).exists()  # MapMask asserts it
        with Image.open(root / row["filename"]) as mask:
            assert mask.mode == "L"
    for row in rows["sample_annotation"]:
        row["category_name"] = tables["category"][tables["instance"][row["instance_token"]]["category_token"]]["name"]
    for row in rows["sample_data"]:
        sensor = tables["sensor"][tables["calibrated_sensor"][row["calibrated_sensor_token"]]["sensor_token"]]
        row["sensor_modality"], row["channel"] = sensor["modality"], sensor["channel"]
        assert row["ego_pose_token"] in tables["ego_pose"]
    for row in rows["sample"]:
        row["data"], row["anns"] = {}, []
    for row in rows["sample_data"]:
        if row["is_key_frame"]:
            tables["sample"][row["sample_token"]]["data"][row["channel"]] = row["token"]
    map_of_log = {log: row["token"] for row in rows["map"] for log in row["log_tokens"]}
    for row in rows["log"]:
        row["map_token"] = map_of_log[row["token"]]
    return tables


def walk(table: dict[str, dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """The rows of a chain of `next`, whose `prev` lead back."""
    chain, before = [], ""
    while first:
        row = table[first]
        assert row["prev"] == before
        chain.append(row)
        before, first = first, row["next"]
    return chain


def test_synth_opens_as_in_the_official_devkit(synthetic: Path) -> None:
    tables = open_as_the_devkit_does(synthetic, "v1.0-mini")
    assert len(tables["scene"]) == 2
    for scene in tables["scene"].values():
        samples = walk(tables["sample"], scene["first_sample_token"])
        assert samples[-1]["token"] == scene["last_sample_token"]
        assert len(samples) == scene["nbr_samples"] == 2
        images = walk(tables["sample_data"], samples[0]["data"]["CAM_FRONT"])
        assert [image["is_key_frame"] for image in images] == [True, *[False] * 5, True, False]
        assert [image["timestamp"] for image in images] == sorted(image["timestamp"] for image in images)
        assert all((synthetic / image["filename"]).is_file() for image in images)
        log = tables["log"][scene["log_token"]]
        assert {"logfile", "location", "vehicle", "date_captured"} <= log.keys()
        assert log["token"] in tables["map"][log["map_token"]]["log_tokens"]


def test_synth_writes_videos_that_training_reads(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "synth", "--layout", "videos", "--scenes", "2", "--frames", "8", "--seed", "3"]
    assert main([*command, "--out", str(tmp_path / "mine"), "--size", "18", "32"]) == 0
    manifests = {"manifest": tmp_path / "mine/train.jsonl", "validation_manifest": tmp_path / "mine/val.jsonl"}
    data = VideoData("videos", tmp_path / "mine", **manifests, frames=8, height=18, width=32)
    data.check_files()
    train, validation = data.training_clips(), data.validation_clips()
    assert validation is not None
    assert [train.name(0), validation.name(0)] == ["scene-0000", "scene-0001"]
    assert train.doubts() == validation.doubts() == []
    clip, same = train.clip(0), NuScenes(synthetic, "v1.0-mini").clip(Window("scene-0000", 0, 8, 1), 18, 32)
    assert clip.frames is not None
    assert same.frames is not None
    assert (clip.frames.float() - same.frames.float()).abs().mean() < 6  # two lossy codecs
    assert clip.caption == same.caption
    assert clip.fps == pytest.approx(12.0)
    assert float(clip.lens.fx) == pytest.approx(float(same.lens.fx))
    assert main([*command, "--out", str(tmp_path / "odd"), "--size", "18", "33"]) == 2
    assert "size must be even" in capsys.readouterr().err


def test_synth_leaves_a_folder_with_files_alone(synthetic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.read_bytes() for file in synthetic.rglob("*") if file.is_file()}
    assert main(["data", "synth", "--out", str(synthetic), "--version", "v1.0-other", "--scenes", "1"]) == 2
    assert "out must be a new or empty folder" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in synthetic.rglob("*") if file.is_file()} == before


def test_curate_windows_of_a_data_set(synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--version", "v1.0-mini", "--frames", "5", "--clusters", "2", "--out", str(tmp_path)]
    assert main(["curate", "--nuscenes", str(synthetic), *options]) == 0
    manifest = read_manifest(tmp_path / "manifest.jsonl")
    assert len(manifest.ids) == 8
    assert manifest.ids[0] == "scene-0000/CAM_FRONT/0"
    assert json.loads((tmp_path / "curation.json").read_text())["seed"] == 0
    assert (tmp_path / "curation.png").read_bytes().startswith(b"\x89PNG")
    assert "manifest.jsonl" in capsys.readouterr().out


def test_curate_pose_files(tmp_path: Path) -> None:
    files = []
    for number, yaw_step_rad in enumerate((0.0, 0.02, 0.2)):
        path = Trajectory(curved_drive(12, yaw_step_rad=yaw_step_rad), True, "made for a test", name=f"path-{number}")
        files.append(tmp_path / f"path-{number}.json")
        write(path, files[-1])
    out = tmp_path / "out"
    assert main(["curate", "--poses", *map(str, files), "--clusters", "1", "--out", str(out)]) == 0
    manifest = read_manifest(out / "manifest.jsonl")
    assert manifest.ids == tuple(map(str, files))
    assert manifest.curation.kept.sum() >= 2  # the sharp turn is more than a metre from the others


def test_curate_clips_of_videos_under_the_ids_of_training(tmp_path: Path) -> None:
    """Cut as training cuts them: one pose file, two clips; the videos need not be there."""
    write(Trajectory(curved_drive(30), True, "made for a test"), tmp_path / "path.json")
    rows = [{"id": f"clip-{start}", "video": "no.mp4", "poses": "path.json", "start": start} for start in (0, 10)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--frames", "12", "--clusters", "1", "--out", str(tmp_path / "out")]
    assert main(["curate", "--videos", str(tmp_path / "train.jsonl"), *options]) == 0
    manifest = read_manifest(tmp_path / "out/manifest.jsonl")
    assert manifest.ids == ("clip-0", "clip-10")
    source = VideoSource(read_video_rows(tmp_path / "train.jsonl"), tmp_path, 12, 1, 1)
    assert curation_of(source, manifest).kept.sum() >= 1
    assert (source.trajectory(1).world_from_camera - curved_drive(30)[10:22]).abs().max() < 1e-12


@pytest.mark.parametrize("source", ["--poses", "--videos"])
def test_curate_refuses_what_generate_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str) -> None:
    metres, times_s = curved_drive(30), torch.arange(30, dtype=torch.float64) / 12
    centimetres = metres.clone()
    centimetres[:, :3, 3] *= 100
    for name, poses, stamps_s, message in (
        ("cm", centimetres, times_s, "positions are not in metres"),
        ("back", metres, times_s.flip(0), "timestamps do not increase"),
        ("good", metres, times_s, ""),
    ):
        write(Trajectory(poses, True, "made for a test", stamps_s), tmp_path / f"{name}.json")
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"id": name, "video": "no.mp4", "poses": f"{name}.json"}))
        files = {"--poses": [str(tmp_path / f"{name}.json")], "--videos": [str(rows), "--frames", "20"]}
        status = main(["curate", source, *files[source], "--clusters", "1", "--out", str(tmp_path / "out")])
        assert status == (2 if message else 0)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "synth", "--out", "unused", "--frames", "1"], "frames must be at least 2"),
        (["data", "synth", "--out", "unused", "--scenes", "0"], "scenes must be at least 1"),
        (["curate", "--nuscenes", "nowhere"], "--nuscenes must be a file or folder that exists, got nowhere"),
        (["curate", "--poses", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1


def test_windows_longer_than_scenes_are_named(
    synthetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--version", "v1.0-mini", "--frames", "50", "--out", str(tmp_path)]
    assert main(["curate", "--nuscenes", str(synthetic), *options]) == 2
    assert "frames must be at most 8" in capsys.readouterr().err
