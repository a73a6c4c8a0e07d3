"""`merope train` on other base models: three steps on tiny ones, gone on with bit for bit, with their own noise."""

import json
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from adapters.family_models import CASES
from family_folders import TRAINABLE, write_folder
from safetensors.torch import load_file

import merope
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.families import FAMILIES
from merope.attention.visible_cameras import Visibility
from merope.train import loop
from merope.train.build import build_stream
from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.train.model import Model, build_model
from merope.train.parallel import Ranks
from merope.train.samples import decoded_views, denoised_latents
from tests.train.tiny_files import file_config

FRAMES = {"ltx": 9, "cog_15": 9}
"""RGB frames of a clip where five are no whole latent frames, or no whole tokens."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_folder(root, name) for name in TRAINABLE}


def config_of(files: Path, folder: Path, out: Path, *changes: str) -> TrainConfig:
    """Two clips a step, from noise."""
    frames = FRAMES.get(folder.name, 5)
    common = (f"model.pretrained={folder}", f"data.frames={frames}", "objective.prefix_frames=0", "run.steps=3")
    return file_config(files, out, *common, "run.validation_clips=0", *changes)


def rows(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def branches(out: Path) -> dict[str, torch.Tensor]:
    found = sorted((out / "trained" / "branch").rglob("*.safetensors"))
    return {f"{file.parent.name}.{name}": value for file in found for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", TRAINABLE)
def test_three_steps_and_going_on_change_nothing(
    name: str, folders: dict[str, Path], tiny_files: Path, tmp_path: Path
) -> None:
    whole = config_of(tiny_files, folders[name], tmp_path / "whole")
    train(whole)
    parts = replace(whole, run=replace(whole.run, out=tmp_path / "parts", steps=2))
    train(parts)
    train(replace(parts, run=replace(parts.run, steps=3)))
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    a, b = branches(tmp_path / "parts"), branches(tmp_path / "whole")
    assert a.keys() == b.keys()
    assert len({key.split(".")[0] for key in a}) == (2 if name == "a14b" else 1)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert all(bool(value.any()) for key, value in a.items() if key.endswith("cam_out.weight"))


def test_each_expert_learns_its_own_noise_levels(
    folders: dict[str, Path], tiny_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve clips with levels on both sides of 0.5: the first expert has the noisy ones, and an untouched base."""
    seen: dict[str, list[float]] = {"transformer": [], "transformer_2": []}
    config = config_of(tiny_files, folders["a14b"], tmp_path, "objective.shift=1.0", "run.steps=6")
    build = loop.build_model

    def watched(*args: object, **kwargs: object) -> Model:
        model = build(*args, **kwargs)  # type: ignore[arg-type]
        for name, expert in model.transformers.items():
            expert.register_forward_pre_hook(
                lambda _, a, kwargs, name=name: seen[name].append(float(kwargs["timestep"].max()) / 1000),
                with_kwargs=True,
            )
        return model

    monkeypatch.setattr(loop, "build_model", watched)
    train(config)
    assert len(seen["transformer"]) + len(seen["transformer_2"]) == 12
    assert 0 < max(seen["transformer_2"]) < 0.5 <= min(seen["transformer"])
    pipe = diffusers.WanPipeline.from_pretrained(folders["a14b"])
    loaded = merope.load_branch(pipe, tmp_path / "trained" / "branch")
    assert sorted(loaded) == ["transformer", "transformer_2"]
    first, second = (part.processors()[1].cam_qkv.weight for part in loaded.values())
    assert not torch.equal(first, second)


def test_a_clean_prefix_where_tokens_have_timesteps_of_their_own(
    folders: dict[str, Path], tiny_files: Path, tmp_path: Path
) -> None:
    """LTX-Video, with validation and a sample video on the way."""
    wanted = ("objective.prefix_frames=1", "run.validation_clips=1", "run.validate_every=1", "run.sample_every=1")
    config = config_of(tiny_files, folders["ltx"], tmp_path, *wanted, "run.steps=1", "run.sample_steps=2")
    train(config)
    row = json.loads((tmp_path / "log.jsonl").read_text())
    assert row["validation_loss"] > 0
    assert (tmp_path / "samples" / "step-00000001.mp4").exists()
    model = build_model(config, torch.device("cpu"), sharded=False)
    examples = build_stream(config, model, Ranks(0, 1, model.device)).example()
    seen: list[torch.Tensor] = []
    model.transformer.register_forward_pre_hook(lambda _, a, k: seen.append(k["timestep"]), with_kwargs=True)
    with torch.no_grad():
        made = denoised_latents(model, examples, steps=2)
    assert torch.equal(made[:, :, :1], examples.clean[:, :, :1])
    assert [times[0].tolist() for times in seen] == [[0.0] * 8 + [1000.0] * 8, [0.0] * 8 + [500.0] * 8]
    assert decoded_views(model, made, 9).shape == (1, 9, 32, 64, 3)


def test_a_branch_of_skyreels_is_trained_under_the_visibility_of_its_base(
    folders: dict[str, Path], tiny_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seen = config_of(tiny_files, folders["skyreels"], tmp_path), []
    model = build_model(config, torch.device("cpu"), sharded=False)
    model.transformer._set_ar_attention(2)
    prepare = CameraBranch.prepare
    monkeypatch.setattr(CameraBranch, "prepare", lambda *a, **k: seen.append(k["sees"]) or prepare(*a, **k))
    with torch.no_grad():
        denoised_latents(model, build_stream(config, model, Ranks(0, 1, model.device)).example(), steps=1)
    assert seen == [Visibility.block_causal(2, 2)]


def test_padded_latents_are_not_decoded(folders: dict[str, Path], tiny_files: Path, tmp_path: Path) -> None:
    """CogVideoX 1.5: nine frames are three latent ones; the first comes twice, to fill tokens."""
    config = config_of(tiny_files, folders["cog_15"], tmp_path)
    model = build_model(config, torch.device("cpu"), sharded=False)
    frames = torch.randint(0, 256, (1, 9, 32, 64, 3), dtype=torch.uint8)
    latents = model.pipeline.encode_frames(frames)
    assert latents.shape == (1, 4, 4, 4, 8)
    assert torch.equal(latents[:, :, 0], latents[:, :, 1])
    assert decoded_views(model, latents, 9).shape == (1, 9, 32, 64, 3)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("cog", "objective.prefix_frames=1", r"prefix_frames for CogVideoX .* must be 0, got 1; .*one timestep"),
        ("hunyuan_15", "objective.prefix_frames=1", r"prefix_frames for HunyuanVideo-1.5 must be 0"),
        ("a14b", "run.micro_batch=2", r"run.micro_batch for a model of two transformers must be 1"),
        ("ltx", "parallel.context=2", r"parallel.context for LTX-Video must be 1, got 2; .*cannot be split by frames"),
        ("skyreels", "parallel.context=2", r"parallel.context for SkyReels V2 must be 1, got 2; .*cannot be split"),
        ("hunyuan", "parallel.context=2", r"parallel.context for HunyuanVideo must be 1, got 2; .*cannot be split"),
        ("hunyuan_15", "parallel.context=2", r"parallel.context for HunyuanVideo-1.5 must be 1, got 2; .*cannot be"),
        ("cog_15", "parallel.context=2", r"parallel.context for CogVideoX .* must be 1, got 2; .*cannot be split"),
        ("ltx", "objective.causal_block_frames=1", r"causal_block_frames for LTX-Video must be left out"),
        ("cog", "model.compile=true", r"model.compile for CogVideoX .* must be false"),
    ],
)
def test_what_a_family_does_not_take(
    name: str, change: str, message: str, folders: dict[str, Path], tiny_files: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_files, folders[name], tmp_path, change)
    with pytest.raises(ValueError, match=message):
        build_model(config, torch.device("cpu"), sharded=False)


def test_several_ranks_have_no_two_experts(folders: dict[str, Path], tiny_files: Path, tmp_path: Path) -> None:
    config = config_of(tiny_files, folders["a14b"], tmp_path)
    with pytest.raises(ValueError, match="ranks for a model of two transformers must be one"):
        build_model(config, torch.device("cpu"), sharded=True)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if FAMILIES[case.kind].not_trained])
def test_families_without_a_recipe_are_refused_before_weights_are_read(
    name: str, tiny_files: Path, tmp_path: Path
) -> None:
    index = {"_class_name": "DiffusionPipeline", "transformer": ["diffusers", CASES[name].kind]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    config = config_of(tiny_files, tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match=r"must be a family that can be trained, got .*; its? "):
        build_model(config, torch.device("cpu"), sharded=False)


def test_models_of_images_are_refused_before_weights_are_read(tiny_files: Path, tmp_path: Path) -> None:
    kind = CASES["wan"].kind
    index = {"_class_name": "WanImageToVideoPipeline", "transformer": ["diffusers", kind]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    sizes = {**CASES["wan"].config, "in_channels": 12}
    getattr(diffusers, kind)(**sizes).save_config(tmp_path / "transformer")
    config = config_of(tiny_files, tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="must be a model of text alone, got one that is given an image"):
        build_model(config, torch.device("cpu"), sharded=False)


def test_an_unknown_transformer_gets_the_list(tiny_files: Path, tmp_path: Path) -> None:
    index = {"_class_name": "MochiPipeline", "transformer": ["diffusers", "MochiTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    config = config_of(tiny_files, tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match=r"one of WanTransformer3DModel, .*LTXVideo.*docs/bases.md"):
        build_model(config, torch.device("cpu"), sharded=False)
