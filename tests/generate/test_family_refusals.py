"""What `merope generate` refuses of other base models: with its reason, from small files alone.

The models here have no weights. Whatever is refused for another reason than that was refused before they are read.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters.family_pipelines import PIPELINES
from generate_files import arguments

from merope.cli import main

Folders = Callable[[str], Path]


@pytest.fixture
def refused(files: Path, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Why the command refuses a model of a family whose weights are missing; `edit` changes its folder."""

    def reason(name: str, edit: Callable[[Path], None] = lambda _: None, **changes: Any) -> str:
        shutil.copytree(folders(name), tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
        edit(tmp_path / name)
        own = {"model": tmp_path / name, "branch": folders(f"{name}-branch"), "frames": 9, "prefix": None}
        assert main(arguments(files, tmp_path / "out" / "clip.mp4", **{**own, **changes})) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return reason


def changed(part: str, **values: Any) -> Callable[[Path], None]:
    """Other values in a JSON of a model's folder."""

    def edit(folder: Path) -> None:
        file = folder / part
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return edit


def test_missing_weights_are_the_last_reason(refused: Callable[..., str]) -> None:
    assert "weights are missing: no *.safetensors in" in refused("vace")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("cog", {"prefix": "street.mp4"}, "--prefix for CogVideoXPipeline must be left out"),
        ("hunyuan_15", {"prefix": "street.mp4"}, "one timestep for all frames, and its pipeline takes no image"),
        ("hunyuan", {"prefix": "street.mp4"}, "--prefix for HunyuanVideoPipeline must be left out"),
        ("vace", {"prefix": "street.mp4"}, "--prefix for WanVACEPipeline must be left out"),
        ("kandinsky", {"prefix": "street.mp4"}, "--prefix for Kandinsky5T2VPipeline must be left out"),
        ("cosmos_1", {"prefix": "street.mp4"}, "--prefix for CosmosTextToWorldPipeline must be left out"),
        ("i2v", {}, "--prefix for WanImageToVideoPipeline must be given: it wants an image"),
        ("cosmos_2", {}, "--prefix for Cosmos2VideoToWorldPipeline must be given"),
        ("cosmos_1_video", {}, "--prefix for CosmosVideoToWorldPipeline must be given"),
        ("i2v", {"prefix": "street.mp4", "prefix_frames": 5}, "must be 1, got 5; pass --prefix-frames 1"),
        ("cosmos_25", {"prefix": "street.mp4"}, "must be at most 5, got 9; pass --prefix-frames 5"),
        ("a14b", {"transformer": "a14b/transformer"}, "--transformer must be left out for a model of two"),
        ("ltx", {"branch": "cog"}, "a CogVideoXTransformer3DModel there, a LTXVideoTransformer3DModel here"),
        ("a14b", {"branch": "ltx"}, "branch must be a folder with config.json"),
        ("ltx", {"frames": 13}, r"--frames must be 8k \+ 1 frames, got 13"),
        ("ltx", {"size": (40, 64)}, "height must be a multiple of 16"),
        ("ltx", {"prompt": None}, "--prompt must be given"),
        ("cog_i2v", {"prefix": "street.mp4", "prefix_frames": 1, "frames": 13}, "pass --frames 9 --size 32 64"),
        (
            "hunyuan_15_i2v",
            {"prefix": "street.mp4", "prefix_frames": 1, "size": (64, 64)},
            "--size must be 32 32, got 64 64; the pipeline makes clips of this size",
        ),
    ],
)
def test_what_a_model_does_not_take(
    name: str, changes: dict[str, Any], message: str, refused: Callable[..., str], files: Path, folders: Folders
) -> None:
    if "prefix" in changes:
        changes = {**changes, "prefix": files / changes["prefix"]}
    if "branch" in changes:
        changes = {**changes, "branch": folders(f"{changes['branch']}-branch")}
    if "transformer" in changes:
        changes = {**changes, "transformer": folders("a14b") / "transformer"}
    assert re.search(message, refused(name, **changes))


def test_animate_is_refused_with_its_reason(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PIPELINES["wan_animate"]()[0].save_pretrained(tmp_path / "animate")
    for file in (tmp_path / "animate").rglob("*.safetensors"):
        file.unlink()
    line = arguments(files, tmp_path / "clip.mp4", model=tmp_path / "animate", branch="none", prefix=None)
    assert main(line) == 2
    assert (
        "it needs videos of a pose and a face: run its own pipeline inside of merope.cameras" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("kandinsky", changed("transformer/config.json", attention_type="nabla"), "use a model with regular attention"),
        (
            "cosmos_25",
            changed("transformer/config.json", concat_padding_mask=True),
            "torchvision, which Cosmos .* needs, must be installed, got no such package; pip install torchvision",
        ),
        ("cosmos_25", changed("model_index.json", safety_checker=[None, None]), "pip install cosmos_guardrail"),
        (
            "hunyuan",
            changed("transformer/config.json", image_condition_type="latent_concat"),
            'whose pipeline returns the first four frames, too, got "latent_concat"',
        ),
        (
            "cosmos_2",
            changed("model_index.json", _class_name="Cosmos2TextToImagePipeline"),
            "Cosmos2TextToImagePipeline must be one that makes videos .*, got one without num_frames",
        ),
        (
            "skyreels_df",
            changed("model_index.json", _class_name="SkyReelsV2DiffusionForcingVideoToVideoPipeline"),
            "got one that needs video; use the model's pipeline for videos",
        ),
        (
            "vace",
            changed("model_index.json", _class_name="TomorrowsPipeline"),
            r"made of classes of diffusers .*, got one with a TomorrowsPipeline",
        ),
    ],
)
def test_what_a_folder_says_of_itself(
    name: str, edit: Callable[[Path], None], message: str, refused: Callable[..., str]
) -> None:
    assert re.search(message, refused(name, edit))
