"""Clips from files: one sequence for any split over ranks and any resume, broken ones replaced, bad ones refused."""

import inspect
import json
import logging
import shutil
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from merope.datasets.videos import VideoSource, read_video_rows
from merope.formats import read, write
from merope.formats.trajectory import Trajectory
from merope.formats.video import write_video
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.text import Text
from merope.geometry.lenses import Pinhole
from merope.train.clip_streams import ClipStream, FrameEncoder, clip_stream
from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.train.model import Model, build_model
from merope.train.streams import Examples, Share
from merope.train.toml_config import read_config
from tests.scenes import curved_drive
from tests.tiny_pipelines import LENS, video
from tests.train.tiny_files import file_config
from tests.train.tiny_runs import tiny_config

CPU = torch.device("cpu")
STEPS_OF_THREE = ("run.batch_size=3", "run.validation_clips=0")  # epochs of 9 draws: every third step ends one


@pytest.fixture(scope="module")
def model(tiny_files: Path) -> Model:
    return build_model(file_config(tiny_files, tiny_files / "out"), CPU, sharded=False)


@pytest.fixture
def broken_files(tiny_files: Path, tmp_path: Path) -> Path:
    """The same files with an unreadable image in the middle of the first and of the last scene."""
    root = shutil.copytree(tiny_files, tmp_path / "broken")
    (root / "tiny.toml").write_text((tiny_files / "tiny.toml").read_text().replace(str(tiny_files), str(root)))
    for scene in ("scene0000", "scene0002"):
        images = sorted((root / "nuscenes").glob(f"s*/CAM_FRONT/{scene}*"), key=lambda file: file.name)
        images[8].write_bytes(b"not an image")  # of the last of five windows
    return root


def stream(config: TrainConfig, model: Model, rank: int = 0, ranks: int = 1, micro_batch: int = 1) -> ClipStream:
    return clip_stream(config, model, Share(rank, ranks, micro_batch))


def names_by_place(parts: list[Examples]) -> dict[int, str]:
    return {place: name for part in parts for place, name in zip(part.places, part.names, strict=True)}


def inference_tokens() -> int:
    """Rows of text that the pipeline gives its model unless told otherwise."""
    return inspect.signature(CameraVideoPipeline.__call__).parameters["max_sequence_length"].default


def weights_and_losses(out: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return load_file(out / "trained/branch/diffusion_pytorch_model.safetensors"), [row["loss"] for row in rows]


@pytest.mark.parametrize("workers", [(0, 1), (1, 0)], ids=["0 then 1 workers", "1 then 0 workers"])
def test_stopping_within_an_epoch_changes_nothing(broken_files: Path, tmp_path: Path, workers: tuple[int, int]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(file_config(broken_files, whole, *STEPS_OF_THREE, "run.steps=10"))
    for steps, count in zip((5, 10), workers, strict=True):
        train(file_config(broken_files, parts, *STEPS_OF_THREE, f"run.steps={steps}", f"data.workers={count}"))
    (expected, expected_losses), (got, got_losses) = weights_and_losses(whole), weights_and_losses(parts)
    assert got_losses == expected_losses
    assert len(set(got_losses)) == 10
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_any_split_over_ranks_is_one_sequence(tiny_files: Path, model: Model) -> None:
    config = file_config(tiny_files, tiny_files / "out", "run.batch_size=4", "run.micro_batch=2")
    whole = stream(config, model, micro_batch=2)
    ranks = [stream(config, model, rank, 2) for rank in (0, 1)]
    for step in range(5):  # an epoch has two steps
        expected = names_by_place(list(whole.step(step)))
        parts = [names_by_place(list(rank.step(step))) for rank in ranks]
        assert set(parts[0]) == {0, 2}
        assert parts[0] | parts[1] == expected
    assert ranks[0].state_dict() == ranks[1].state_dict() == whole.state_dict()
    alone = stream(config, model)
    alone.load_state_dict(json.loads(json.dumps(ranks[1].state_dict())))
    assert names_by_place(list(alone.step(5))) == names_by_place(list(whole.step(5)))


def test_a_clip_that_cannot_be_read_is_named_and_replaced(
    broken_files: Path, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    clips = stream(file_config(broken_files, broken_files / "out"), model)
    with caplog.at_level(logging.WARNING):
        used = Counter(name for step in range(40) for part in clips.step(step) for name in part.names)
    assert set(clips.loader.skipped) == {"scene-0000/CAM_FRONT/4"}
    assert "scene-0000/CAM_FRONT/4: ValueError: image" in caplog.text
    assert len(used) == 9
    assert used.total() == 80


def test_validation_is_the_same_every_time_and_on_any_ranks(
    broken_files: Path, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    config = file_config(broken_files, broken_files / "out")
    whole = stream(config, model)
    first, second = ([part.clean for part in whole.held_out(2)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    split = [part for rank in (0, 1) for part in stream(config, model, rank, 2).held_out(2)]
    assert names_by_place(split) == {0: "scene-0002/CAM_FRONT/18", 1: "scene-0002/CAM_FRONT/20"}
    assert whole.example().names == ("scene-0002/CAM_FRONT/18",)
    with pytest.raises(ValueError, match=r"5 that can be read, got scene-0002/CAM_FRONT/22: image"):
        list(whole.held_out(5))
    assert "skipped validation clip scene-0002/CAM_FRONT/22" in caplog.text


def test_validation_clips_are_spread_over_all_scenes(tiny_files: Path, model: Model) -> None:
    config = file_config(tiny_files, tiny_files / "out", "data.split=val", "data.validation_split=train")
    parts = list(stream(config, model).held_out(2))
    assert names_by_place(parts) == {0: "scene-0000/CAM_FRONT/0", 1: "scene-0001/CAM_FRONT/9"}


def test_a_broken_validation_clip_gives_its_place_to_a_later_one(broken_files: Path, model: Model) -> None:
    images = sorted((broken_files / "nuscenes").glob("s*/CAM_FRONT/scene0002*"), key=lambda file: file.name)
    images[0].unlink()
    parts = list(stream(file_config(broken_files, broken_files / "out"), model).held_out(2))
    assert names_by_place(parts) == {0: "scene-0002/CAM_FRONT/19", 1: "scene-0002/CAM_FRONT/20"}


def test_a_manifest_of_other_names_is_refused_with_both(tiny_files: Path, model: Model, tmp_path: Path) -> None:
    file = tmp_path / "clusters.jsonl"
    row = {"id": "poses/a.json", "cluster": 0, "prototype": "poses/a.json", "is_prototype": True}
    file.write_text(json.dumps(row) + "\n")
    config = file_config(tiny_files, tmp_path, f"data.clusters={file}")
    with pytest.raises(ValueError, match=r"10 of 10 not in it, such as 'scene-.*; its first is 'poses/a.json'"):
        stream(config, model)


def test_clusters_are_drawn_equally_often(tiny_files: Path, model: Model, tmp_path: Path) -> None:
    """The manifest is one of all scenes, as `merope curate` writes it; those of the split are taken from it."""
    names = [f"scene-{scene:04d}/CAM_FRONT/{9 * scene + start}" for scene in range(3) for start in range(5)]
    rare = names[7]
    rows = [{"id": name, "cluster": int(name == rare), "prototype": name, "is_prototype": True} for name in names]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = file_config(tiny_files, tmp_path, f"data.clusters={tmp_path / 'manifest.jsonl'}")
    sampler = stream(config, model).loader.sampler
    drawn = Counter(index for _ in range(60) for index in sampler)
    assert sum(drawn.values()) == 600
    assert drawn[7] / 600 == pytest.approx(0.5, abs=0.07)
    assert set(drawn) == set(range(10))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.root=/nowhere"], ["/nowhere"]),
        (["data.split=night"], ["night", "train"]),
        (["data.height=40"], ["height", "multiple of 32", "32 or 64"]),
        (["data.frames=6"], ["num_frames", "4k + 1"]),
        (["data.frames=13"], ["data.frames", "13", "longest scene", "9"]),
        (["objective.prefix_frames=2"], ["objective.prefix_frames", "4k + 1"]),
        (["objective.prefix_frames=5"], ["objective.prefix_frames", "less than the 5 frames"]),
        (["run.validation_clips=6"], ["validation clips", "at least 6", "5"]),
        (["data.clusters=/nowhere.jsonl"], ["nowhere.jsonl"]),
    ],
    ids=lambda value: value[0] if len(value) == 1 else "",
)
def test_what_cannot_be_trained_on_is_refused_at_once(
    tiny_files: Path, model: Model, tmp_path: Path, changes: list[str], words: list[str]
) -> None:
    with pytest.raises((ValueError, OSError)) as error:
        stream(file_config(tiny_files, tmp_path, *changes), model)
    assert [word for word in words if word not in str(error.value)] == []


def test_validation_without_validation_data_is_refused_at_once(tiny_files: Path, model: Model) -> None:
    config = tiny_files / "no-split.toml"
    lines = (tiny_files / "tiny.toml").read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("split_file")))
    with pytest.raises(ValueError, match="validation clips must be at least 2, got none"):
        stream(read_config(TrainConfig, config), model)
    with pytest.raises(ValueError, match="validation clips must be at least 1, got none"):
        stream(read_config(TrainConfig, config, ["run.validate_every=0", "run.sample_every=1"]), model)
    whole = stream(read_config(TrainConfig, config, ["run.validate_every=0"]), model)
    assert len(whole.loader.source) == 15  # all scenes are trained on


def test_text_is_what_the_pipeline_makes_of_it(tiny_files: Path, model: Model) -> None:
    encoder = FrameEncoder(model)
    for caption in ("a street at night", "", "rain " * 300):
        text = Text(caption, None, None, None)
        model.pipeline._guidance_scale = 1.0
        with torch.no_grad():
            generated_with = model.pipeline._embedded(text, 1, max_sequence_length=inference_tokens()).positive
        assert torch.equal(encoder.text(caption), generated_with[0])
    (part,) = islice(stream(file_config(tiny_files, tiny_files / "out"), model).step(0), 1)
    assert torch.equal(part.no_text, encoder.text(""))
    assert not torch.equal(part.text[0], part.no_text)


def test_a_model_of_pixels_trains_on_files_without_text(tiny_files: Path, tmp_path: Path) -> None:
    data = file_config(tiny_files, tmp_path).data
    config = tiny_config(tmp_path, "run.steps=1", "objective.prefix_frames=2", "run.batch_size=2")
    pixels = TrainConfig(**{**vars(config), "data": data})
    train(pixels)
    assert (tmp_path / "trained" / "transformer").is_dir()


def write_videos(root: Path) -> None:
    """Two videos with their poses, as lists for `videos` and for `panshot`."""
    rows, samples = [], []
    for number in range(2):
        write_video(video(9, seed=number), root / f"{number}.mp4", fps=12.0)
        poses = curved_drive(9, step_m=0.4 + number)
        times_s = torch.arange(9, dtype=torch.float64) / 12
        write(Trajectory(poses, True, "made for a test", times_s, LENS, name=str(number)), root / f"{number}.json")
        np.save(root / f"pan-{number}-0-a_0.npy", poses[:, :3].numpy())
        rows.append({"id": str(number), "video": f"{number}.mp4", "poses": f"{number}.json", "caption": "rain"})
        lens = {"x_fov": 90.0 + 60 * number, "xi": 1.2 * number}
        samples.append({"pose_path": f"pan-{number}-0-a_0.npy", "video_path": f"{number}.mp4", **lens})
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "samples.json").write_text(json.dumps(samples))


@pytest.mark.parametrize(
    "data",
    [
        'kind = "videos"\nmanifest = "{0}/rows.jsonl"\nvalidation_manifest = "{0}/rows.jsonl"',
        'kind = "panshot"\nsamples = "{0}/samples.json"\nvalidation_samples = "{0}/samples.json"',
    ],
    ids=["videos", "panshot"],
)
def test_videos_are_trained_on_and_validated_with(tiny_files: Path, tmp_path: Path, data: str) -> None:
    write_videos(tmp_path)
    text = (tiny_files / "tiny.toml").read_text()
    start, end = text.index("[data]"), text.index("[objective]")
    size = f'root = "{tmp_path}"\nframes = 9\nheight = {LENS.height}\nwidth = {LENS.width}\nworkers = 0\n'
    file = tmp_path / "videos.toml"
    file.write_text(f"{text[:start]}[data]\n{data.format(tmp_path)}\n{size}{text[end:]}")
    train(read_config(TrainConfig, file, [f"run.out={tmp_path / 'out'}", "run.micro_batch=2"]))
    assert "validation_loss" in (tmp_path / "out" / "log.jsonl").read_text()


def test_a_run_does_not_go_on_with_other_clips(tiny_files: Path, tmp_path: Path) -> None:
    """As many clips under other names, or in another order, would be another sequence under the same numbers."""
    write_videos(tmp_path)
    text = (tiny_files / "tiny.toml").read_text()
    start, end = text.index("[data]"), text.index("[objective]")
    size = f'root = "{tmp_path}"\nframes = 9\nheight = {LENS.height}\nwidth = {LENS.width}\nworkers = 0\n'
    file = tmp_path / "videos.toml"
    file.write_text(f'{text[:start]}[data]\nkind = "videos"\nmanifest = "{tmp_path}/rows.jsonl"\n{size}{text[end:]}')
    changes = [f"run.out={tmp_path / 'out'}", "run.validation_clips=0"]
    train(read_config(TrainConfig, file, [*changes, "run.steps=1"]))
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(reversed(rows)))
    with pytest.raises(ValueError, match="clips of the data must be those of the run"):
        train(read_config(TrainConfig, file, [*changes, "run.steps=2"]))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    train(read_config(TrainConfig, file, [*changes, "run.steps=2"]))


def test_paths_that_are_not_in_metres_are_named_at_the_start(tmp_path: Path) -> None:
    """Training takes any numbers: a unit that is wrong is said before hours are spent on it."""
    write_videos(tmp_path)
    source = VideoSource(read_video_rows(tmp_path / "rows.jsonl"), tmp_path, 9, LENS.height, LENS.width)
    assert source.doubts() == []
    path = read(tmp_path / "0.json")
    millimetres = path.world_from_camera.clone()
    millimetres[:, :3, 3] *= 1000.0
    (tmp_path / "other").mkdir()
    write(replace(path, world_from_camera=millimetres), tmp_path / "other/0.json")
    write(replace(path, is_metric=False), tmp_path / "other/1.json")
    wrong, sfm = replace(source, root=tmp_path / "other").doubts()
    assert wrong.startswith("0.json: positions are not in metres")
    assert sfm.startswith("1.json is of arbitrary scale")
    assert replace(source, root=tmp_path / "nowhere").doubts() == []


def test_poses_of_another_video_are_named_at_the_start(tmp_path: Path) -> None:
    """Frame i gets pose i, whatever their times and sizes are."""
    write_videos(tmp_path)
    source = VideoSource(read_video_rows(tmp_path / "rows.jsonl"), tmp_path, 9, LENS.height, LENS.width)
    path = read(tmp_path / "0.json")
    assert path.timestamps_s is not None
    square = Pinhole(30.0, 30.0, 16.0, 16.0, 32, 32)
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "0.mp4", tmp_path / "other")
    write(replace(path, timestamps_s=3.0 * path.timestamps_s, lens=square), tmp_path / "other/0.json")
    slow, other = replace(source, root=tmp_path / "other").doubts()
    assert "poses a second" in slow
    assert other.startswith("0.json has a lens for 32×32")
