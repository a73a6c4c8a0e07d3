"""`merope generate`, from files to files."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters.wan_models import perturb, tiny_config, tiny_wan
from diffusers import WanPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from scenes import curved_drive, straight_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH, pixel_pipeline, tiny_pipeline, video

from merope import formats
from merope.adapters.wan import attach, detach
from merope.cli import main
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_video, write_video
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.command import _loaded
from merope.generate.inputs import GenerateConfig, read_prefix
from merope.generate.preflight import outline_model
from merope.geometry.lenses import Pinhole
from merope.geometry.trajectories import driving_path

FRAMES = 17
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary Wan folder, a perturbed branch, two paths in two formats, and a video."""
    root = tmp_path_factory.mktemp("generate")
    pipe = tiny_pipeline(with_branch=False)
    WanPipeline(**pipe.components, expand_timesteps=True).save_pretrained(root / "model")
    perturb(attach(pipe.transformer, tiny_config()), scale=1.0)
    detach(pipe.transformer).save_pretrained(root / "branch")
    formats.write(path_of(straight_drive(60, step_m=0.4), rate_hz=10.0), root / "straight.tum", "tum")
    formats.write(path_of(curved_drive(60, step_m=0.4), lens=LENS), root / "bend.json")
    smooth = Image.effect_mandelbrot((WIDTH, HEIGHT), (-2, -1.5, 1, 1.5), 20)
    picture = torch.from_numpy(np.array(smooth.convert("RGB")))
    write_video(torch.stack([picture.roll(k, 1) for k in range(24)]), root / "street.mp4", 12.0)
    return root


def path_of(poses: torch.Tensor, rate_hz: float | None = None, **changes: Any) -> Trajectory:
    times_s = None if rate_hz is None else torch.arange(len(poses), dtype=torch.float64) / rate_hz
    return Trajectory(poses, is_metric=True, convention="a test", timestamps_s=times_s, **changes)


def arguments(files: Path, out: Path, **changes: object) -> list[str]:
    """The command line for a short clip; None leaves an option out, True gives it without a value."""
    options = {
        "model": files / "model",
        "branch": files / "branch",
        "trajectory": files / "bend.json",
        "prefix": files / "street.mp4",
        "prompt": "a street at night",
        "frames": FRAMES,
        "steps": 2,
        "size": (HEIGHT, WIDTH),
        "out": out,
        **changes,
    }
    line = ["generate"]
    for name, value in options.items():
        if value is not None:
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            line += [f"--{name.replace('_', '-')}", *map(str, values)]
    return line


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Frames by the name of the clip, before the codec changes them."""
    frames: dict[str, torch.Tensor] = {}

    def spy(clip: torch.Tensor, path: Path, fps: float) -> None:
        frames[path.name.split(".")[0]] = clip
        write_video(clip, path, fps)

    monkeypatch.setattr("merope.generate.command.write_video", spy)
    return frames


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


def test_half_precision_spares_the_vae(files: Path, tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "frames": 5, "prefix_frames": 1}
    assert main(arguments(files, tmp_path / "clip.mp4", **options)) == 0
    assert json.loads((tmp_path / "clip.json").read_text())["used"]["dtype"] == "bfloat16"
    folders = {"model": str(files / "model"), "branch": str(files / "branch")}
    pipe = _loaded(GenerateConfig(**folders, trajectory=Path(), out=Path("clip.mp4"), dtype="bfloat16"))
    assert (pipe.transformer.dtype, pipe.text_encoder.dtype, pipe.vae.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


def refusals(files: Path, scratch: Path) -> dict[str, tuple[dict[str, object], str]]:
    """What to change on a good command line, and what the message must say."""
    formats.write(path_of(straight_drive(60)), scratch / "poses.txt", "kitti")
    sfm = replace(path_of(straight_drive(60), lens=LENS), is_metric=False)
    formats.write(sfm, scratch / "sfm.json")
    drive = driving_path(60, 12.0, torch.Generator().manual_seed(1), prefix=9)
    inverted = path_of(torch.linalg.inv(drive), lens=LENS)
    formats.write(inverted, scratch / "inverted.json")
    (scratch / "empty").mkdir()
    (scratch / "taken.mp4").mkdir()
    (scratch / "record.json").mkdir()
    for name in ("no_weights", "no_shard", "two_transformers"):
        shutil.copytree(files / "model", scratch / name)
    (scratch / "no_weights" / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (scratch / "no_shard" / "vae" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    components = json.loads((scratch / "two_transformers" / "model_index.json").read_text())
    components["transformer_2"] = components["transformer"]
    (scratch / "two_transformers" / "model_index.json").write_text(json.dumps(components))
    other = tiny_wan(num_layers=3)
    other.save_pretrained(scratch / "other_transformer")
    attach(other, tiny_config())
    detach(other).save_pretrained(scratch / "other_branch")
    (scratch / "broken.mp4").write_bytes(b"no video")
    for name, text in (("list", "[]"), ("nested", "[" * 100_000)):
        (scratch / name).mkdir()
        (scratch / name / "model_index.json").write_text(text)
    shutil.copytree(files / "model", scratch / "no_index")
    (scratch / "no_index" / "transformer" / "model.safetensors.index.json").write_text("{}")
    pinholes_only = tiny_wan(num_layers=2)
    attach(pinholes_only, tiny_config(encoding="prope", encoding_options={}))
    detach(pinholes_only).save_pretrained(scratch / "prope")
    return {
        "no metres": ({"trajectory": scratch / "sfm.json"}, "--assume-metric"),
        "world-to-camera": ({"trajectory": scratch / "inverted.json"}, "invert them"),
        "no lens": ({"trajectory": scratch / "poses.txt"}, "--fov"),
        "no lens in file": ({"lens": scratch / "poses.txt"}, "poses only"),
        "too short": ({"frames": 61}, "61 frames long at 12 fps, got 60"),
        "missing trajectory": ({"trajectory": scratch / "nowhere.txt"}, "nowhere.txt"),
        "frames": ({"frames": 16}, "--frames must be 4k + 1 frames, got 16; use 13 or 17"),
        "size": ({"size": (40, 64)}, "use 32 or 64"),
        "missing model": ({"model": scratch / "nowhere"}, "model folder"),
        "no model": ({"model": scratch / "empty"}, "model_index.json"),
        "no weights": ({"model": scratch / "no_weights"}, "weights are missing"),
        "no shard": ({"model": scratch / "no_shard"}, "part-1.safetensors are missing, 2 of 2"),
        "two transformers": ({"model": scratch / "two_transformers"}, "one transformer"),
        "missing branch": ({"branch": "./nowhere"}, "branch folder"),
        "no branch": ({"branch": scratch / "empty"}, "config.json"),
        "other base": ({"branch": scratch / "other_branch"}, "3 there, 2 here"),
        "missing transformer": ({"transformer": "./nowhere"}, "transformer folder"),
        "other transformer": ({"transformer": scratch / "other_transformer"}, "2 there, 3 here"),
        "no prompt": ({"prompt": None}, '--prompt "" is no text'),
        "prefix too long": ({"prefix_frames": 17}, "shorter than the clip"),
        "prefix not 4k + 1": ({"prefix_frames": 8}, "use 5 or 9"),
        "missing prefix": ({"prefix": scratch / "nowhere.mp4"}, "--prefix must be a file or folder that exists"),
        "broken prefix": ({"prefix": scratch / "broken.mp4"}, "cannot be decoded"),
        "slow prefix": ({"fps": 24.0}, "--fps 12"),
        "offload": ({"offload": True, "device": "cpu"}, "GPU"),
        "out": ({"out": scratch / "clip.gif"}, ".mp4"),
        "xi": ({"xi": 1.5}, "--fov"),
        "lens": ({"branch": scratch / "prope", "fov": 120.0, "xi": 1.5}, "lens must be a Pinhole for PRoPE"),
        "steps": ({"steps": 0}, "steps must be at least 1"),
        "negative frames": ({"frames": -3}, "frames must be at least 1"),
        "fps": ({"fps": 0.0}, "fps must be positive"),
        "device": ({"device": "abacus"}, "one of torch's"),
        "a device that holds nothing": ({"device": "meta"}, "one of torch's"),
        "guidance": ({"guidance": float("nan")}, "guidance must be finite"),
        "a list for a model": ({"model": scratch / "list"}, "config of model must be a JSON object"),
        "a nested model": ({"model": scratch / "nested"}, "nested too deeply"),
        "a damaged index": ({"model": scratch / "no_index"}, "must be an index of weights"),
        "a folder": ({"out": scratch / "taken.mp4"}, "taken.mp4, a folder"),
        "a folder beside": ({"out": scratch / "record.mp4"}, "record.json, a folder"),
        "unwritable": ({"out": scratch / "broken.mp4" / "clip.mp4"}, "broken.mp4"),
    }


def test_refused_before_weights_are_read(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_weights(*_: object, **__: object) -> None:
        raise AssertionError("weights were read before the input was checked")

    cases = refusals(files, tmp_path)
    monkeypatch.setattr(CameraVideoPipeline, "from_pretrained", read_weights)
    for name, (changes, message) in cases.items():
        out = tmp_path / "out" / "clip.mp4"
        assert main(arguments(files, **{"out": out, **changes})) == 2, name
        assert message in capsys.readouterr().err, name
        assert not out.parent.exists(), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "rain"}, "--prompt must be left out for a model without a text encoder"),
        ({"negative_prompt": "rain"}, "--negative-prompt must be left out"),
        ({"guidance": 3.0}, "--guidance must be at most 1"),
    ],
)
def test_text_for_a_model_without_text(
    tmp_path: Path, changes: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = pixel_pipeline()
    detach(pipe.transformer).save_pretrained(tmp_path / "branch")
    pipe.save_pretrained(tmp_path / "model")
    formats.write(path_of(straight_drive(6), lens=LENS), tmp_path / "bend.json")
    options = {"prefix": None, "prompt": None, "frames": 6, **changes}
    assert main(arguments(tmp_path, tmp_path / "clip.mp4", **options)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("package", ["av", "ftfy"])
def test_missing_package_is_named_before_weights_are_read(
    files: Path, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(CameraVideoPipeline, "from_pretrained", None)  # calling it would be another error
    assert main(arguments(files, tmp_path / "clip.mp4", prefix=None)) == 2
    assert f"{package} is not installed: pip install 'merope[" in capsys.readouterr().err


def test_weights_that_are_not_numbers(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One NaN makes every frame black: it is refused by its name in a branch, and by what came out elsewhere."""
    shutil.copytree(files / "branch", tmp_path / "branch")
    shutil.copytree(files / "model", tmp_path / "model")
    for folder, name in (
        (tmp_path / "branch", "camera_blocks.1.cam_out.bias"),
        (tmp_path / "model" / "transformer", "proj_out.bias"),
        (tmp_path / "model" / "vae", "decoder.conv_out.bias"),
    ):
        good = load_file(folder / WEIGHTS)
        save_file({**good, name: torch.full_like(good[name], torch.nan)}, folder / WEIGHTS, {"format": "pt"})
        branch = tmp_path / "branch" if folder.name == "branch" else files / "branch"
        model = files / "model" if folder.name == "branch" else tmp_path / "model"
        out = tmp_path / "out" / "clip.mp4"
        assert main(arguments(files, out, model=model, branch=branch, frames=5, prefix=None)) == 2
        said = capsys.readouterr().err
        expected = {"branch": name, "transformer": "the sampled latents", "vae": "the decoded frames"}[folder.name]
        assert f"{expected} must be finite, got NaN or inf" in said
        assert not out.parent.exists()
        save_file(good, folder / WEIGHTS, {"format": "pt"})


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
