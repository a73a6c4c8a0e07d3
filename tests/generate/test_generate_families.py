"""`merope generate` with other base models: their own pipelines, cameras, and what a clip can begin with."""

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from adapters.family_pipelines import PIPELINES, PROMPT, SIZE, model, unipc, wan_vae
from adapters.wan_models import perturb, tiny_config
from family_folders import FOLDERS, write_folder
from generate_files import arguments
from tiny_pipelines import HEIGHT, WIDTH, tiny_text

import merope
from merope.cli import main
from merope.generate.base_video import BaseVideo
from merope.generate.own_pipeline import clean_prefix

SHORT = {"ltx": 17}
"""RGB frames of a clip; nine elsewhere."""

STEPS = {"a14b": 2}
"""Of denoising, one for each expert; one elsewhere."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, and branches of them that act."""
    root = tmp_path_factory.mktemp("families")
    for name in FOLDERS:
        write_folder(root, name)
        pipe = FOLDERS[name]()
        for branch in merope.attach(pipe, tiny_config()).values():
            perturb(branch, scale=1.0)
        branches = merope.detach(pipe)
        alone = branches["transformer"] if len(branches) == 1 else branches
        alone.save_pretrained(root / f"{name}-branch")
    return root


def command(files: Path, folders: Path, name: str, out: Path, **changes: Any) -> list[str]:
    own = {"model": folders / name, "branch": folders / f"{name}-branch", "frames": SHORT.get(name, 9), "prefix": None}
    return arguments(files, out, **{**own, **changes})


@pytest.mark.parametrize("name", ["a14b", "ltx", "hunyuan_15", "cog_15"])
def test_cameras_steer_the_clips_of_other_models(
    name: str,
    files: Path,
    folders: Path,
    tmp_path: Path,
    written: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(files, folders, name, tmp_path / "bend.mp4", steps=STEPS.get(name, 1))) == 0
    assert "text and cameras" in capsys.readouterr().err
    straight = {"trajectory": files / "straight.tum", "fov": 60, "steps": STEPS.get(name, 1)}
    assert main(command(files, folders, name, tmp_path / "straight.mp4", **straight)) == 0
    frames = SHORT.get(name, 9)
    assert written["bend"].shape == (frames, HEIGHT, WIDTH, 3)
    assert not torch.equal(written["bend"], written["straight"])
    record = json.loads((tmp_path / "bend.json").read_text())
    assert record["used"]["guidance"] is None
    assert (tmp_path / "bend.cameras.json").exists()


def test_a_prefix_changes_the_clip(
    files: Path,
    folders: Path,
    tmp_path: Path,
    written: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"prefix": files / "street.mp4", "prefix_frames": 9, "branch": "none", "steps": 1}
    assert main(command(files, folders, "ltx", tmp_path / "with.mp4", **given)) == 0
    assert "LTX-Video in LTXPipeline: 9 clean frames, text\n" in capsys.readouterr().err
    assert main(command(files, folders, "ltx", tmp_path / "without.mp4", **{**given, "prefix": None})) == 0
    assert (written["with"].float() - written["without"].float()).abs().mean() > 1


def test_an_image_to_video_model_begins_with_the_first_frame(
    files: Path, tmp_path: Path, written: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, text_encoder = tiny_text()
    transformer = model("wan", in_channels=12)
    pipe = diffusers.WanImageToVideoPipeline(tokenizer, text_encoder, wan_vae(), unipc(), transformer=transformer)
    pipe.save_pretrained(tmp_path / "i2v")
    merope.attach(transformer, tiny_config())
    merope.detach(transformer).save_pretrained(tmp_path / "i2v-branch")
    image = {"prefix": files / "street.mp4", "prefix_frames": 1, "steps": 1}
    assert main(command(files, tmp_path, "i2v", tmp_path / "clip.mp4", **image)) == 0
    assert "in WanImageToVideoPipeline: the first frame as an image, text and cameras" in capsys.readouterr().err
    assert written["clip"].shape == (9, HEIGHT, WIDTH, 3)
    for changes, message in (
        ({"prefix": None}, "given: it wants an image"),
        ({"prefix_frames": 5}, "must be 1, got 5"),
    ):
        assert main(command(files, tmp_path, "i2v", tmp_path / "clip.mp4", **{**image, **changes})) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a14b", "skyreels", "ltx_video", "ltx2"])
def test_clean_frames_stay_clean_at_time_zero(name: str) -> None:
    """In both experts of A14B, of which each has one of the two steps, and where guidance doubles a batch."""
    torch.manual_seed(0)
    pipe, call = (FOLDERS[name](), {**SIZE, **PROMPT}) if name in FOLDERS else PIPELINES[name]()
    pipe.set_progress_bar_config(disable=True)
    video, seen, kept = BaseVideo(pipe), [], []
    for transformer in video.transformers.values():
        transformer.register_forward_pre_hook(lambda _, a, kwargs: seen.append(kwargs), with_kwargs=True)
    clean = torch.randn(1, 4, 1, *video.strides.latent_size(call["height"], call["width"]))
    with clean_prefix(video, clean) as given:
        put_back = given["callback_on_step_end"]

        def keep(*args: Any) -> dict[str, torch.Tensor]:
            kept.append(put_back(*args)["latents"])
            return {"latents": kept[-1]}

        pipe(**call, num_inference_steps=2, output_type="latent", callback_on_step_end=keep)
    latents = video.family.video({**seen[-1], "hidden_states": kept[-1]})
    assert torch.equal(latents[:, :, :1], clean)
    assert not torch.equal(kept[0], kept[1])
    for arguments_given in seen:
        times = arguments_given["timestep"].unflatten(1, (3, -1))  # of three frames
        assert (times[:, 0] == 0).all()
        assert (times[:, 1:] > 0).all()
        assert (video.family.video(arguments_given)[:, :, :1] == clean).all()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cog", {"prefix": "street.mp4"}, "--prefix for CogVideoXPipeline must be left out"),
        ("hunyuan_15", {"prefix": "street.mp4"}, "one timestep for all frames, and its pipeline takes no image"),
        ("a14b", {"transformer": "a14b/transformer"}, "--transformer must be left out for a model of two"),
        ("ltx", {"branch": "cog-branch"}, "a CogVideoXTransformer3DModel there, a LTXVideoTransformer3DModel here"),
        ("a14b", {"branch": "ltx-branch"}, "branch must be a folder with config.json"),
        ("ltx", {"frames": 13}, r"--frames must be 8k \+ 1 frames, got 13"),
    ],
)
def test_what_is_refused_before_weights_are_read(
    name: str,
    changes: dict[str, Any],
    message: str,
    files: Path,
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("merope.generate.own_pipeline.load_own", pytest.fail)
    places = {"prefix": files, "transformer": folders, "branch": folders}
    changes = {key: places[key] / value if key in places else value for key, value in changes.items()}
    assert main(command(files, folders, name, tmp_path / "clip.mp4", **changes)) != 0
    assert re.search(message, capsys.readouterr().err)
