"""What `merope generate` refuses, and that it does so before it reads weights."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapters.wan_models import tiny_config, tiny_wan
from generate_files import WEIGHTS, arguments, path_of
from safetensors.torch import load_file, save_file
from scenes import straight_drive
from tiny_pipelines import LENS, pixel_pipeline

from merope import formats
from merope.adapters.attachment import attach, detach
from merope.cli import main
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.trajectories import driving_path


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
    for name in ("no_weights", "no_shard", "two_transformers", "mochi"):
        shutil.copytree(files / "model", scratch / name)
    (scratch / "no_weights" / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (scratch / "no_shard" / "vae" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    components = json.loads((scratch / "two_transformers" / "model_index.json").read_text())
    components["transformer_2"] = components["transformer"]
    (scratch / "two_transformers" / "model_index.json").write_text(json.dumps(components))
    components = json.loads((scratch / "mochi" / "model_index.json").read_text())
    components["transformer"][1] = "MochiTransformer3DModel"
    (scratch / "mochi" / "model_index.json").write_text(json.dumps(components))
    other = tiny_wan(num_layers=3)
    other.save_pretrained(scratch / "other_transformer")
    attach(other, tiny_config())
    detach(other).save_pretrained(scratch / "other_branch")
    (scratch / "broken.mp4").write_bytes(b"no video")
    for name, text in (("list", "[]"), ("nested", "[" * 100_000), ("cut_off", '{"vae": ')):
        (scratch / name).mkdir()
        (scratch / name / "model_index.json").write_text(text)
    shutil.copytree(files / "model", scratch / "no_index")
    (scratch / "no_index" / "transformer" / "model.safetensors.index.json").write_text("{}")
    pinholes_only = tiny_wan(num_layers=2)
    attach(pinholes_only, tiny_config(encoding="prope", encoding_options={}))
    detach(pinholes_only).save_pretrained(scratch / "prope")
    shutil.copytree(files / "model", scratch / "run" / "trained")
    return {
        "no model, and a short path": ({"model": scratch / "nowhere", "frames": 61}, "model folder"),
        "a run": ({"model": scratch / "run", "frames": 61}, f"pass {scratch / 'run' / 'trained'}, which the run wrote"),
        "swapped": ({"model": files / "branch", "branch": files / "model"}, "a camera branch: pass it as --branch"),
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
        "two transformers": ({"model": scratch / "two_transformers"}, "transformer_2/config.json is missing; complete"),
        "another model": ({"model": scratch / "mochi"}, 'got MochiTransformer3DModel; see "Add a base model" in docs/'),
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
        "short prefix": ({"fps": 1.0}, "street.mp4 must be at least 97 frames, for 9 at 1 frames per second, got "),
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
        "a model that is cut off": (
            {"model": scratch / "cut_off"},
            f"{scratch / 'cut_off' / 'model_index.json'} must be JSON that can be read, got Expecting value",
        ),
        "a nested model": ({"model": scratch / "nested"}, "nested too deeply"),
        "a damaged index": ({"model": scratch / "no_index"}, "must be an index of weights"),
        "a folder": ({"out": scratch / "taken.mp4"}, "taken.mp4, a folder"),
        "a folder beside": ({"out": scratch / "record.mp4"}, "record.json, a folder"),
        "a folder that cannot be made": ({"out": Path("/proc/nope/clip.mp4")}, "--out must be in a folder that can"),
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


@pytest.mark.parametrize("part", ["branch", "transformer", "model"])
def test_a_mistyped_folder_is_refused_before_the_hub_is_asked(
    files: Path, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CameraVideoPipeline, "load_config", ask)
    changes = {"model": "somebody/something", part: "outputs/nope"}
    assert main(arguments(files, tmp_path / "clip.mp4", **changes)) == 2
    said = f"{part} folder must be there, or a hub id (owner/name), got outputs/nope, which is none; check the path"
    assert said in capsys.readouterr().err


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
