"""`merope generate` with every other base model: their own pipelines, cameras, and what a clip can begin with."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from adapters.family_models import CASES
from adapters.family_pipelines import PIPELINES, PROMPT, SIZE
from family_folders import FOLDERS, OF_FRAMES
from generate_files import arguments
from tiny_pipelines import HEIGHT, WIDTH

from merope.adapters.families import FAMILIES
from merope.cli import main
from merope.formats.video import rate_and_size, read_video
from merope.generate.base_video import BaseVideo
from merope.generate.own_pipeline import clean_prefix

FRAMES = {"ltx": 17, "ltx_2": 17, "cosmos_1": 17, "cosmos_1_video": 17, "kandinsky_i2v": 17}
"""RGB frames of a clip where eight are one latent frame, or five latent ones are needed; nine elsewhere."""

STEPS = {"a14b": 2, "a14b_i2v": 2, "cosmos_1": 2, "cosmos_1_video": 2, "cosmos_2": 2}
"""Of denoising: one for each expert; two where a schedule has no single step; one elsewhere."""


def command(files: Path, folders: Any, name: str, out: Path, **changes: Any) -> list[str]:
    """Of a short clip along a bend. Models that want a first frame have one."""
    own = {
        "model": folders(name),
        "branch": folders(f"{name}-branch"),
        "frames": FRAMES.get(name, 9),
        "steps": STEPS.get(name, 1),
        "prefix": files / "street.mp4" if name in OF_FRAMES else None,
        "prefix_frames": 1,
    }
    return arguments(files, out, **{**own, **changes})


@pytest.mark.parametrize("name", FOLDERS)
def test_cameras_steer_the_clips_of_other_models(
    name: str,
    files: Path,
    folders: Any,
    tmp_path: Path,
    written: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(files, folders, name, tmp_path / "bend.mp4")) == 0
    first = "the first frame as an image, " if name in OF_FRAMES else ""
    assert f"Pipeline: {first}text and cameras\n" in capsys.readouterr().err
    straight = {"trajectory": files / "straight.tum", "lens": files / "bend.json"}  # the same lens
    assert main(command(files, folders, name, tmp_path / "straight.mp4", **straight)) == 0
    frames = FRAMES.get(name, 9)
    assert written["bend"].shape == (frames, HEIGHT, WIDTH, 3)
    assert not torch.equal(written["bend"], written["straight"])
    assert rate_and_size(tmp_path / "bend.mp4")[1:] == (WIDTH, HEIGHT)
    assert len(read_video(tmp_path / "bend.mp4", list(range(frames)), HEIGHT, WIDTH)) == frames
    record = json.loads((tmp_path / "bend.json").read_text())
    assert record["used"]["guidance"] is None
    assert (tmp_path / "bend.cameras.json").exists()


def test_every_family_is_run_or_refused(folders: Any) -> None:
    run = {json.loads((folders(name) / "model_index.json").read_text())["transformer"][1] for name in FOLDERS}
    assert run == {case.kind for case in CASES.values() if not FAMILIES[case.kind].not_generated}


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("a14b", 5, "5 clean frames"),
        ("skyreels", 5, "5 clean frames"),
        ("skyreels_df", 1, "1 clean frame"),
        ("ltx", 9, "9 clean frames"),
        ("ltx_2", 9, "9 clean frames"),
        ("cosmos_1_video", 9, "9 given frames"),
        ("cosmos_2", 5, "5 given frames"),
        ("cosmos_25", 5, "5 given frames"),
        ("i2v", 1, "the first frame as an image"),
    ],
)
def test_a_clip_begins_with_the_frames_that_are_given(
    name: str,
    count: int,
    first: str,
    files: Path,
    folders: Any,
    tmp_path: Path,
    written: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other frames, another clip; the command says before what there will be."""
    given = {"prefix": files / "street.mp4", "prefix_frames": count} | ({"branch": "none"} if name == "ltx" else {})
    assert main(command(files, folders, name, tmp_path / "day.mp4", **given)) == 0
    assert f"Pipeline: {first}, text{'' if name == 'ltx' else ' and cameras'}\n" in capsys.readouterr().err
    night = {**given, "prefix": files / "night.mp4"}
    assert main(command(files, folders, name, tmp_path / "night.mp4", **night)) == 0
    assert not torch.equal(written["day"], written["night"])


def test_a_pipeline_that_makes_other_frames_is_an_error(
    files: Path, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their cameras would be those of others."""
    decode = diffusers.CogVideoXPipeline.decode_latents
    monkeypatch.setattr(diffusers.CogVideoXPipeline, "decode_latents", lambda *given: decode(*given)[:, :, 4:])
    assert main(command(files, folders, "cog", tmp_path / "clip.mp4")) == 2
    assert "frames, height and width (9, 32, 64), got (5, 32, 64)" in capsys.readouterr().err
    assert not (tmp_path / "clip.mp4").exists()


def test_a_long_clip_of_diffusion_forcing_is_one_part(
    files: Path, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts would have the same cameras. Without a word, 97 frames would be one."""
    seen: list[tuple[int, int]] = []
    kind = diffusers.SkyReelsV2DiffusionForcingPipeline
    monkeypatch.setattr(kind, "check_inputs", lambda *given: seen.append(given[-2:]))
    assert main(command(files, folders, "skyreels_df", tmp_path / "clip.mp4")) == 0
    assert seen == [(9, 9)]


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
