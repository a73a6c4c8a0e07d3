"""Weights that a training starts from: saved models and branches, those that do not fit, and those that have none."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from merope.adapters.camera_branch import CameraBranch
from merope.generate.camera_video import CameraVideoPipeline
from merope.train.config import ModelSection
from merope.train.loop import train
from merope.train.model import build_model
from tests.train.tiny_runs import tiny_config


def test_training_goes_on_from_a_saved_model_and_branch(tmp_path: Path) -> None:
    train(tiny_config(tmp_path / "first", "run.steps=2"))
    trained = tmp_path / "first" / "trained"
    before = tiny_config(tmp_path / "second", "run.steps=1")
    model = ModelSection(pretrained=str(trained), pretrained_branch=trained / "branch", trainable="all")
    config = replace(before, model=replace(model, precision="fp32", gradient_checkpointing=False))
    built = build_model(config, torch.device("cpu"), sharded=False).transformer.state_dict()
    for file in trained.rglob("*.safetensors"):
        for name, value in load_file(file).items():
            index, _, rest = name.removeprefix("camera_blocks.").partition(".")
            name = f"blocks.{index}.attn1.processor.{rest}" if file.parent.name == "branch" else name
            assert torch.equal(built[name], value), name
    train(config)
    assert (tmp_path / "second" / "trained" / "branch").is_dir()
    assert CameraVideoPipeline.from_pretrained(tmp_path / "second" / "trained").vae is None  # a whole model of pixels
    sized = replace(config, model=replace(config.model, architecture=before.model.architecture))
    build_model(sized, torch.device("cpu"), sharded=False)
    architecture = {**before.model.architecture, "num_layers": 7}
    with pytest.raises(ValueError, match=r"model.pretrained must be a transformer with num_layers = 7"):
        build_model(
            replace(config, model=replace(config.model, architecture=architecture)), torch.device("cpu"), sharded=False
        )
    other = replace(config, branch=replace(config.branch, encoding="ucpe", encoding_options={}))
    with pytest.raises(ValueError, match=r"pretrained_branch.*encoding = merope"):
        build_model(other, torch.device("cpu"), sharded=False)
    scaled = CameraBranch.for_transformer(
        WanTransformer3DModel.from_pretrained(trained / "transformer"), replace(other.branch, translation_scale=0.5)
    )
    scaled.save_pretrained(tmp_path / "scaled")
    other = replace(other, model=replace(config.model, pretrained_branch=tmp_path / "scaled"))
    with pytest.raises(ValueError, match=r"pretrained_branch.*translation_scale = 0.5"):
        build_model(other, torch.device("cpu"), sharded=False)
    with pytest.raises(ValueError, match=r"pretrained_branch.*without \[branch\]"):
        replace(config, branch="none")
    missing = replace(config, model=replace(config.model, pretrained_branch=tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"pretrained_branch.*folder of a saved branch"):
        build_model(missing, torch.device("cpu"), sharded=False)


def test_a_saved_branch_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    train(tiny_config(tmp_path / "first", "run.steps=1"))
    folder = tmp_path / "first" / "trained" / "branch"
    config = tiny_config(tmp_path / "second", f"model.pretrained_branch={folder}")
    file = folder / "diffusion_pytorch_model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "cam_qkv.weight" not in name}
    save_file(kept, file)
    with pytest.raises(ValueError, match=r"branch's weights must be .*missing_keys.*cam_qkv\.weight"):
        build_model(config, torch.device("cpu"), sharded=False)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"a folder with config\.json"):
        build_model(config, torch.device("cpu"), sharded=False)


def test_training_goes_on_from_a_branch_without_weights(tmp_path: Path) -> None:
    """ReRoPE's folder holds its config alone."""
    options = "{partition=[12,12,12,0], native_split=[0,0,0], fractions=[0.0,1.0]}"
    rerope = ("branch.integration=rerope", "branch.carve=[12,12,12]", f"branch.encoding_options={options}")
    train(tiny_config(tmp_path / "first", "run.steps=1", *rerope))
    trained = tmp_path / "first" / "trained"
    goes_on = (f"model.pretrained={trained}", f"model.pretrained_branch={trained / 'branch'}")
    train(tiny_config(tmp_path / "second", "run.steps=1", *rerope, *goes_on))
    assert (tmp_path / "second" / "trained" / "branch" / "config.json").is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("patch_size=[1,0,8]", r"patch_size must be at least 1, got \[1, 0, 8\]"),
        ("patch_size=5", r"patch_size must be tuple\[int, \.\.\.\], got 5"),
        ("num_attention_heads=0", "num_attention_heads must be at least 1, got 0"),
        ("text_dim=-4", "text_dim must be at least 1, got -4"),
        ("text_dim='wide'", "text_dim must be int, got 'wide'"),
        ("attention_head_dim=47", " must be sizes of a WanTransformer3DModel"),
        ("depth=3", "depth must be an argument of WanTransformer3DModel, got 3; known are patch_size"),
    ],
)
def test_sizes_that_no_model_has_are_refused(tmp_path: Path, change: str, words: str) -> None:
    config = tiny_config(tmp_path, f"model.architecture.{change}")
    with pytest.raises(ValueError, match=rf"model\.architecture.*{words}"):
        build_model(config, torch.device("cpu"), sharded=False)
