"""`merope generate` with other base models: their own pipelines, cameras, and what a clip can begin with."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.family_pipelines import MASKS, PROMPT, SIZE, skyreels
from adapters.wan_models import perturb, tiny_config
from family_folders import FOLDERS, write_folder
from generate_files import arguments
from tiny_pipelines import HEIGHT, WIDTH

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


@pytest.mark.parametrize("name", ["ltx", "a14b", "skyreels"])
def test_clean_frames_stay_clean_at_time_zero(name: str) -> None:
    """In both experts of A14B, of which one has a step each, and where guidance doubles a batch."""
    torch.manual_seed(0)
    pipe = skyreels()[0] if name == "skyreels" else FOLDERS[name]()
    pipe.set_progress_bar_config(disable=True)
    video, call = BaseVideo(pipe), {**SIZE, **PROMPT, "width": 64}
    if name == "ltx":
        call |= {**MASKS, "num_frames": 17}
    seen: list[torch.Tensor] = []
    for transformer in video.transformers.values():
        transformer.register_forward_pre_hook(lambda _, a, k: seen.append(k["timestep"]), with_kwargs=True)
    clean = torch.randn(1, 4, 1, SIZE["height"] // video.strides.pixels, 64 // video.strides.pixels)
    dice = {"generator": torch.Generator().manual_seed(0), "num_inference_steps": 2, "output_type": "latent"}
    with clean_prefix(video, clean) as callback:
        latents = pipe(**call, **dice, **callback).frames
    if name == "ltx":
        latents = latents.mT.unflatten(2, (3, *clean.shape[3:]))
    assert torch.equal(latents[:, :, :1], clean)
    assert len({id(each) for each in seen}) >= 2
    for times in seen:
        of_frames = times.unflatten(1, (3, -1))
        assert (of_frames[:, 0] == 0).all()
        assert (of_frames[:, 1:] > 0).all()


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
