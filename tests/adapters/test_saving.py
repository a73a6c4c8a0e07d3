"""Adapter-only folders: what they record, what they hold, and what refuses them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from wan_models import TINY_MEROPE, cameras, perturb, run, tiny_config, tiny_wan

import merope
from merope.adapters.attachment import attach, attached_branch, load_branch
from merope.adapters.camera_branch import CameraBranch

WEIGHTS = "diffusion_pytorch_model.safetensors"
VARIANTS: dict[str, dict[str, Any]] = {
    "merope": {},
    "merope in some blocks, with norms": {"blocks": [0, 3], "qk_norm": "rms", "compression": 1},
    "merope_phases": {"encoding": "merope_phases"},
    "ucpe": {"encoding": "ucpe", "encoding_options": {}, "translation_scale": 0.03},
    "ucpe_clamped": {"encoding": "ucpe_clamped", "encoding_options": {}, "qk_norm": "rms", "translation_scale": 0.03},
    "rayrope": {"encoding": "rayrope", "encoding_options": {}},
    "additive": {"integration": "additive", "encoding": "plucker", "encoding_options": {"samples": 2}},
    "recammaster": {"integration": "recammaster", "encoding": "extrinsics", "encoding_options": {}},
    "motionctrl": {"integration": "motionctrl", "encoding": "extrinsics", "encoding_options": {}},
    "modulation": {"integration": "modulation", "encoding": "plucker", "encoding_options": {"samples": 2}},
    "epipolar": {"integration": "epipolar", "encoding": "camco", "encoding_options": {"samples": 2, "reach": 0.7}},
    "raype": {"integration": "raype", "encoding": "raype", "encoding_options": {}, "translation_scale": 0.1},
    "roce": {"integration": "roce", "encoding": "plucker", "encoding_options": {"samples": 2}},
    "rerope": {
        "integration": "rerope",
        "carve": (8, 4, 6),
        "encoding_options": {"partition": (6, 6, 6, 0), "fractions": (0.0, 1.0)},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_save_and_load_give_identical_outputs(tmp_path: Path, variant: str, dtype: torch.dtype) -> None:
    transformer = tiny_wan(dtype)
    branch = perturb(attach(transformer, tiny_config(**VARIANTS[variant])))
    branch.save_pretrained(tmp_path)
    other = tiny_wan(dtype)
    loaded = load_branch(other, tmp_path)
    assert attached_branch(other) is loaded
    assert torch.equal(run(other, cameras()), run(transformer, cameras()))
    assert {name: p.dtype for name, p in loaded.named_parameters()} == {n: dtype for n, _ in branch.named_parameters()}
    assert not any(p.is_meta for p in other.parameters())


def test_a_branch_of_before_the_name_is_that_of_the_name(tmp_path: Path) -> None:
    """Branches were saved as "merope" with direction_scale 50, the one in the package too."""
    spelt = {"encoding_options": TINY_MEROPE | {"direction_scale": 50.0}}
    for folder, options in (("spelt", spelt), ("named", VARIANTS["merope_phases"])):
        perturb(attach(tiny_wan(), tiny_config(**options))).save_pretrained(tmp_path / folder)
    models = {folder: tiny_wan() for folder in ("spelt", "named")}
    branches = {folder: load_branch(model, tmp_path / folder) for folder, model in models.items()}
    assert (branches["spelt"].config["encoding"], branches["named"].config["encoding"]) == ("merope", "merope_phases")
    torch.testing.assert_close(run(models["spelt"], cameras()), run(models["named"], cameras()), rtol=0, atol=1e-6)


def test_the_folder_holds_the_branch_alone_and_says_what_it_is(tmp_path: Path) -> None:
    transformer = tiny_wan()
    branch = attach(transformer, tiny_config(**VARIANTS["ucpe"], base_model="Wan-AI/Wan2.2-TI2V-5B-Diffusers"))
    branch.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    recorded = {
        "_class_name": "CameraBranch",
        "base_model": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "encoding": "ucpe",
        "integration": "parallel",
        "compression": 2,
        "blocks": [1, 3],
        "translation_scale": 0.03,
        "latent_stride": 4,
        "merope_version": merope.__version__,
    }
    assert config.items() >= recorded.items()
    assert config["base"]["num_layers"] == 4
    assert "camera-to-world" in config["pose_convention"]
    assert "metres" in config["pose_convention"]
    weights = load_file(tmp_path / WEIGHTS)
    assert weights.keys() == {
        f"camera_blocks.{i}.cam_{n}.{p}" for i in (1, 3) for n in ("qkv", "out") for p in ("weight", "bias")
    }


def test_where_the_base_model_came_from_is_recorded(tmp_path: Path) -> None:
    tiny_wan().save_pretrained(tmp_path / "base")
    transformer = type(tiny_wan()).from_pretrained(tmp_path / "base")
    assert attach(transformer, tiny_config()).config.base_model == str(tmp_path / "base")


def test_another_base_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    transformer = tiny_wan()
    attach(transformer, tiny_config(base_model="the-right/model")).save_pretrained(tmp_path)
    other = tiny_wan(num_layers=6, in_channels=8, num_attention_heads=4)
    before = list(other.state_dict())
    with pytest.raises(ValueError, match="the-right/model") as refused:
        load_branch(other, tmp_path)
    for difference in ("num_layers 4 there, 6 here", "in_channels 4 there, 8", "num_attention_heads 2 there, 4"):
        assert difference in str(refused.value)
    assert "ffn_dim" not in str(refused.value)
    assert attached_branch(other) is None
    assert list(other.state_dict()) == before


@pytest.mark.parametrize("damage", ["missing", "unexpected"])
def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path: Path, damage: str) -> None:
    attach(tiny_wan(), tiny_config()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    if damage == "missing":
        del weights["camera_blocks.3.cam_out.weight"]
    else:
        weights["camera_blocks.2.cam_out.weight"] = torch.zeros(2)
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=rf"{damage}_keys.*cam_out.weight"):
        load_branch(tiny_wan(), tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_numbers_are_named(tmp_path: Path, value: float) -> None:
    attach(tiny_wan(), tiny_config()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    weights["camera_blocks.3.cam_qkv.weight"][5, 7] = value
    save_file(weights, tmp_path / WEIGHTS)
    for load in (lambda: load_branch(tiny_wan(), tmp_path), lambda: CameraBranch.from_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=r"weight camera_blocks\.3\.cam_qkv\.weight must be finite"):
            load()


def test_what_is_no_branch(tmp_path: Path) -> None:
    transformer = tiny_wan()
    with pytest.raises(ValueError, match="existing folder"):
        load_branch(transformer, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_branch(transformer, tmp_path)
    transformer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="camera branch, got one of WanTransformer3DModel"):
        load_branch(transformer, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compression": "2"}, "compression must be int, got '2'"),
        ({"compression": 0}, "compression must be an int ≥ 1, got 0"),
        ({"blocks": {"a": 1}}, "blocks must be .*, got {'a': 1}"),
        ({"blocks": ["1"]}, r"blocks must be .*, got \['1'\]"),
        ({"blocks": 3}, "blocks must be .*, got 3"),
    ],
    ids=str,
)
def test_an_edited_config_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    attach(tiny_wan(), tiny_config()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=words):
        load_branch(tiny_wan(), tmp_path)


def test_options_survive_json(tmp_path: Path) -> None:
    attach(tiny_wan(), tiny_config()).save_pretrained(tmp_path)
    loaded = load_branch(tiny_wan(), tmp_path)
    assert {name: getattr(loaded.encoding, name) for name in TINY_MEROPE} == TINY_MEROPE


def test_a_hub_id(tmp_path: Path) -> None:
    """A repository as the hub's client keeps it on disk, read without a network."""
    transformer = tiny_wan()
    branch = perturb(attach(transformer, tiny_config()))
    repository = tmp_path / "models--someone--branch"
    branch.save_pretrained(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    other = tiny_wan()
    load_branch(other, "someone/branch", cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(run(other, cameras()), run(transformer, cameras()))


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_weights_keep_the_precision_that_is_asked_for(tmp_path: Path, name: str) -> None:
    """Float32 weights on a half-precision model go on being trained where they were."""
    branch = perturb(attach(tiny_wan(), tiny_config()))
    branch.save_pretrained(tmp_path / "camera")
    loaded = load_branch(tiny_wan(torch.bfloat16), tmp_path, subfolder="camera", **{name: torch.float32})
    for one, other in zip(branch.parameters(), loaded.parameters(), strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one, other)


def test_a_model_of_pixels_has_a_camera_for_every_frame(tmp_path: Path) -> None:
    transformer = tiny_wan(in_channels=3, out_channels=3)
    branch = attach(transformer, tiny_config())
    branch.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["latent_stride"] == 1
    with pytest.raises(ValueError, match=r"cameras .* 3, got 9; in a model of pixels every frame has a camera"):
        branch.prepare(cameras(9), torch.zeros(1, 3, 3, 4, 6))
