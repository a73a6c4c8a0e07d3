"""`merope generate`, from files to files."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters.wan_models import tiny_config, tiny_wan
from generate_files import FRAMES, arguments, path_of
from PIL import Image
from scenes import straight_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH, pixel_pipeline, video

from merope import formats
from merope.adapters.attachment import attach, detach
from merope.cli import main
from merope.formats.video import read_video, write_image, write_video
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.command import load_pipeline
from merope.generate.inputs import GenerateConfig, read_prefix
from merope.generate.preflight import outline_model
from merope.geometry.lenses import Pinhole
from merope.world.clips import WorldClips
from merope.world.clips_file import write_clips


def test_from_files_to_files_and_the_path_matters(
    files: Path, tmp_path: Path, written: dict[str, torch.Tensor]
) -> None:
    assert main(arguments(files, tmp_path / "bend.mp4")) == 0
    straight = {"trajectory": files / "straight.tum", "fov": 65.0}
    assert main(arguments(files, tmp_path / "straight.mp4", **straight)) == 0
    bend, other = written["bend"], written["straight"]
    assert bend.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert bend.dtype == torch.uint8
    assert torch.equal(bend[:9], other[:9])
    change = (bend[9:].int() - other[9:].int()).abs().amax(dim=(1, 2, 3))
    assert change.min() > 0
    assert change.max() > 8

    pipe = CameraVideoPipeline.from_pretrained(files / "model")
    prefix = read_video(files / "street.mp4", list(range(9)), HEIGHT, WIDTH)
    with torch.no_grad():
        decoded = pipe.decode_latents(pipe.encode_frames(prefix[None]))[0].permute(1, 2, 3, 0)
    assert (bend[:9].float() - (decoded.clamp(-1, 1) + 1) * 127.5).abs().max() < 0.51

    on_disk = read_video(tmp_path / "bend.mp4", list(range(FRAMES)), HEIGHT, WIDTH)
    luma = torch.tensor([0.299, 0.587, 0.114])  # the codec halves the resolution of colour, and these frames are noise
    assert ((on_disk.float() - bend.float()) @ luma).abs().mean() < 4
    ends = (".mp4", ".cameras.json", ".birdseye.png", ".json")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{clip}{end}" for clip in ("bend", "straight") for end in ends
    }


def test_cameras_and_record_say_what_was_used(files: Path, tmp_path: Path) -> None:
    options = {"trajectory": files / "straight.tum", "fov": 65.0, "prefix_frames": 5, "seed": 3, "guidance": 2.5}
    assert main(arguments(files, tmp_path / "clip.mp4", **options)) == 0
    used = formats.read(tmp_path / "clip.cameras.json")
    assert used.count == FRAMES
    assert used.is_metric
    assert used.timestamps_s is not None
    assert (used.timestamps_s - torch.arange(FRAMES, dtype=torch.float64) / 12.0).abs().max() < 1e-9
    expected_m = 0.4 * 10.0 * torch.arange(FRAMES, dtype=torch.float64) / 12.0  # 0.4 m per pose at 10 Hz, 12 fps
    assert (used.world_from_camera[:, 2, 3] - expected_m).abs().max() < 1e-9
    assert isinstance(used.lens, Pinhole)  # which PRoPE and RayRoPE ask for
    assert (used.lens.width, used.lens.height) == (WIDTH, HEIGHT)
    record = json.loads((tmp_path / "clip.json").read_text())
    assert record["settings"]["seed"] == 3
    assert record["settings"]["prompt"] == "a street at night"
    assert record["settings"]["prefix_frames"] == 5
    assert record["used"] == {
        "device": record["used"]["device"],
        "dtype": "float32",
        "guidance": 2.5,
        "scheduler": "UniPCMultistepScheduler",
    }
    assert abs(record["trajectory"]["length_m"] - float(expected_m[-1])) < 1e-9
    assert set(record["versions"]) == {"merope", "python", "torch", "diffusers", "transformers"}
    assert 0 < record["wall_s"]["generate"] < record["wall_s"]["all"]
    with Image.open(tmp_path / "clip.birdseye.png") as picture:
        assert np.asarray(picture).std() > 0


def test_trained_transformer_takes_the_place_of_the_models(
    files: Path, tmp_path: Path, written: dict[str, torch.Tensor]
) -> None:
    tiny_wan(num_layers=2, seed=1).save_pretrained(tmp_path / "trained")
    shutil.copytree(files / "model" / "transformer", tmp_path / "same")
    options = {"frames": 5, "prefix": None}
    for name, transformer in (("own", None), ("same", tmp_path / "same"), ("trained", tmp_path / "trained")):
        assert main(arguments(files, tmp_path / f"{name}.mp4", transformer=transformer, **options)) == 0
    assert torch.equal(written["own"], written["same"])
    assert (written["own"].int() - written["trained"].int()).abs().max() > 8


def test_a_model_without_a_branch(files: Path, tmp_path: Path, written: dict[str, torch.Tensor]) -> None:
    """The paper's first row: the path is what evaluation measures against, the model does not see it."""
    for name in ("bend.json", "straight.tum"):
        options = {"branch": "none", "trajectory": files / name, "fov": 65.0, "frames": 13}
        assert main(arguments(files, (tmp_path / name).with_suffix(".mp4"), **options)) == 0
    assert torch.equal(written["bend"], written["straight"])
    paths = [formats.read(tmp_path / f"{name}.cameras.json").world_from_camera for name in ("bend", "straight")]
    assert (paths[0] - paths[1]).abs().max() > 0.1


def test_seed_and_text_decide(files: Path, tmp_path: Path, written: dict[str, torch.Tensor]) -> None:
    others: dict[str, dict[str, object]] = {
        "seed": {"seed": 1},
        "prompt": {"prompt": "rain"},
        "negative": {"negative_prompt": "rain"},
        "guidance": {"guidance": 1.0},
    }
    for name, changes in {"first": {}, "again": {}, **others}.items():
        assert main(arguments(files, tmp_path / f"{name}.mp4", prefix=None, frames=5, **changes)) == 0
    assert torch.equal(written["first"], written["again"])
    for name in others:
        assert not torch.equal(written["first"], written[name]), name


def test_pixel_model_without_text(tmp_path: Path) -> None:
    pipe = pixel_pipeline()
    detach(pipe.transformer).save_pretrained(tmp_path / "branch")
    pipe.save_pretrained(tmp_path / "model")
    formats.write(path_of(straight_drive(6)), tmp_path / "path.txt", "kitti")
    options = {
        "prefix": None,
        "prompt": None,
        "frames": 6,
        "fov": 195.0,
        "xi": 2.1,
        "trajectory": tmp_path / "path.txt",
    }
    assert main(arguments(tmp_path, tmp_path / "clip.mp4", **options)) == 0
    assert read_video(tmp_path / "clip.mp4", list(range(6)), HEIGHT, WIDTH).shape == (6, HEIGHT, WIDTH, 3)
    record = json.loads((tmp_path / "clip.json").read_text())
    assert record["used"]["guidance"] == 1.0


def test_a_model_says_what_its_clips_are_like(tmp_path: Path) -> None:
    pipe = pixel_pipeline()
    detach(pipe.transformer).save_pretrained(tmp_path / "branch")
    pipe.save_pretrained(tmp_path / "model")
    write_clips(tmp_path / "model", WorldClips(5, HEIGHT, WIDTH, frame_rate_hz=4.0, prefix_frames=2), steps=3)
    formats.write(path_of(straight_drive(6), lens=LENS), tmp_path / "bend.json")
    silent = dict.fromkeys(("prefix", "prompt", "size", "frames", "steps"))
    assert main(arguments(tmp_path, tmp_path / "clip.mp4", **silent)) == 0
    told = json.loads((tmp_path / "clip.json").read_text())["settings"]
    assert [told[name] for name in ("height", "width", "frames", "fps")] == [HEIGHT, WIDTH, 5, 4.0]
    assert (told["steps"], told["prefix_frames"]) == (3, 2)
    assert main(arguments(tmp_path, tmp_path / "clip.mp4", **silent | {"steps": 1, "frames": 4, "fps": 8})) == 0
    told = json.loads((tmp_path / "clip.json").read_text())["settings"]
    assert [told[name] for name in ("height", "frames", "fps", "steps")] == [HEIGHT, 4, 8.0, 1]


def test_half_precision_spares_the_vae(files: Path, tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "frames": 5, "prefix_frames": 1}
    assert main(arguments(files, tmp_path / "clip.mp4", **options)) == 0
    assert json.loads((tmp_path / "clip.json").read_text())["used"]["dtype"] == "bfloat16"
    folders = {"model": str(files / "model"), "branch": str(files / "branch")}
    pipe = load_pipeline(GenerateConfig(**folders, trajectory=Path(), out=Path("clip.mp4"), dtype="bfloat16"))
    assert (pipe.transformer.dtype, pipe.text_encoder.dtype, pipe.vae.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


def test_interrupted_run_leaves_nothing(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CameraVideoPipeline, "_denoise", stopped)
    assert main(arguments(files, tmp_path / "out" / "clip.mp4")) == 130
    assert not (tmp_path / "out").exists()


def test_options_reach_the_reader(files: Path, tmp_path: Path) -> None:
    lens = Pinhole(320.0, 320.0, 320.0, 160.0, 640, 320)  # the file holds 0.5 of the width and 1 of the height
    formats.write(path_of(straight_drive(9), lens=lens), tmp_path / "path.txt", "re10k")
    options: dict[str, Any] = {"trajectory": tmp_path / "path.txt", "trajectory_format": "re10k"}
    options |= {"trajectory_option": "image_size=[640,320]", "assume_metric": True, "frames": 5, "prefix": None}
    assert main(arguments(files, tmp_path / "clip.mp4", **options)) == 0
    used = formats.read(tmp_path / "clip.cameras.json")
    assert isinstance(used.lens, Pinhole)
    assert abs(float(used.lens.fx) - WIDTH / 2) < 1e-9
    assert abs(float(used.lens.fy) - HEIGHT) < 1e-9
    settings = json.loads((tmp_path / "clip.json").read_text())["settings"]
    assert settings["trajectory_options"] == {"image_size": [640, 320]}


def test_prefix_is_taken_at_the_clips_rate(files: Path, tmp_path: Path) -> None:
    write_video(video(20), tmp_path / "fast.mp4", 24.0)
    outline = outline_model(str(files / "model"))
    options: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "prefix_frames": 5, "prefix": tmp_path / "fast.mp4"}
    config = GenerateConfig("model", "branch", tmp_path / "path.txt", tmp_path / "clip.mp4", **options)
    every_second = read_video(tmp_path / "fast.mp4", [0, 2, 4, 6, 8], HEIGHT, WIDTH)
    assert torch.equal(read_prefix(config, outline), every_second)
    assert torch.equal(
        read_prefix(replace(config, fps=24.0), outline),
        read_video(tmp_path / "fast.mp4", [0, 1, 2, 3, 4], HEIGHT, WIDTH),
    )


def test_a_prefix_may_be_a_folder_of_images(files: Path, tmp_path: Path) -> None:
    images = video(7)
    for number, image in enumerate(images, start=6):
        write_image(image, tmp_path / "images" / f"frame_{number}.png")  # 6 to 12, not 10, 11, 12, 6
    (tmp_path / "images" / "._frame_1.png").write_bytes(b"of another system")
    outline = outline_model(str(files / "model"))
    options: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "prefix_frames": 5, "prefix": tmp_path / "images"}
    config = GenerateConfig("model", "branch", tmp_path / "path.txt", tmp_path / "clip.mp4", **options)
    assert torch.equal(read_prefix(config, outline), images[:5])
    with pytest.raises(ValueError, match=r"--prefix must be a folder of at least 9 images .*, got 7 in"):
        read_prefix(replace(config, prefix_frames=9), outline)


def test_every_option_is_documented_and_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = (Path(__file__).parents[2] / "docs" / "generate.md").read_text()
    assert set(re.findall(r"--[a-z][a-z-]+", page)) == options


def test_unreachable_hub_is_named(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(arguments(files, tmp_path / "clip.mp4", model="nobody/nothing")) == 2
    assert "model nobody/nothing is neither a folder here nor found on the hub" in capsys.readouterr().err
    assert main(arguments(files, tmp_path / "clip.mp4", branch="nobody/nothing")) == 2
    assert "branch nobody/nothing is neither a folder here nor found on the hub" in capsys.readouterr().err


def test_a_branch_without_weights_of_its_own(files: Path, tmp_path: Path) -> None:
    """ReRoPE's folder holds a config alone."""
    carved = {"integration": "rerope", "blocks": "every", "carve": (6, 6, 6)}
    options = {"partition": (6, 6, 6, 0), "fractions": (0.0, 1.0)}
    transformer = tiny_wan(num_layers=2)
    attach(transformer, tiny_config(**carved, encoding_options=options)).save_pretrained(tmp_path / "rerope")
    assert main(arguments(files, tmp_path / "clip.mp4", branch=tmp_path / "rerope")) == 0
    assert (tmp_path / "clip.mp4").is_file()


def test_stopped_while_writing_leaves_nothing(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(frames: torch.Tensor, path: Path, fps: float) -> None:
        path.write_bytes(b"half a clip")
        raise KeyboardInterrupt

    monkeypatch.setattr("merope.generate.command.write_video", stopped)
    assert main(arguments(files, tmp_path / "clip.mp4")) == 130
    assert not list(tmp_path.iterdir())
