"""What single families have of their own: sizes of branches, masks, arguments, and what they refuse."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from family_models import CASES, output, wan_like
from wan_models import cameras, perturb, tiny_config, tiny_wan

import merope
from merope.adapters.attachment import attach, detach, load_branch
from merope.adapters.branch_config import CameraBranchConfig
from merope.adapters.families import FAMILIES
from merope.attention.visible_cameras import Visibility
from merope.geometry.cameras import Cameras

PAGE = (Path(__file__).parents[2] / "docs" / "bases.md").read_text()
LITE = {"encoding_options": {"partition": (18, 18, 12, 16)}}
A14B = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}


@pytest.mark.parametrize(
    ("kind", "sizes", "config", "heads", "millions"),
    [
        ("WanTransformer3DModel", {}, {}, (10, 128), 524.5),
        ("WanVACETransformer3DModel", {}, {}, (10, 128), 524.5),
        ("WanAnimateTransformer3DModel", {}, {}, (10, 128), 524.5),
        ("SkyReelsV2Transformer3DModel", A14B, {}, (10, 128), 524.5),
        ("LTXVideoTransformer3DModel", {}, {}, (4, 128), 58.8),
        ("LTX2VideoTransformer3DModel", {}, {}, (8, 128), 402.8),
        ("HunyuanVideoTransformer3DModel", {}, {}, (6, 128), 94.4),
        ("HunyuanVideo15Transformer3DModel", {}, {}, (4, 128), 113.3),
        ("CogVideoXTransformer3DModel", {"num_attention_heads": 48, "num_layers": 42}, {}, (6, 128), 198.3),
        ("CogVideoXTransformer3DModel", {}, {"compression": 5}, (3, 128), 44.3),
        ("CosmosTransformer3DModel", {"num_attention_heads": 16}, {}, (4, 128), 58.8),
        ("Kandinsky5Transformer3DModel", {"model_dim": 1792}, LITE, (7, 64), 51.4),
    ],
)
def test_parameters_of_the_real_models(
    kind: str, sizes: dict[str, Any], config: dict[str, Any], heads: tuple[int, int], millions: float
) -> None:
    """As docs/bases.md lists them. Heads of 64 are counted in heads of 128, where they fill the branch."""
    with torch.device("meta"):
        branch = attach(getattr(diffusers, kind)(**sizes), CameraBranchConfig(**config))
    assert {(p.heads, p.encoding.head_dim) for p in branch.processors().values()} == {heads}
    count = round(sum(weight.numel() for weight in branch.parameters()) / 1e6, 1)
    assert count == millions
    assert any(f"`{kind}`" in line and f"{count} M" in line for line in PAGE.splitlines())


def test_skyreels_frames_see_no_later_block() -> None:
    """Two blocks of two frames. Pipelines change the size of blocks between two calls."""
    transformer, clip = CASES["skyreels"].model(), cameras(4)
    branch = perturb(attach(transformer, tiny_config()))
    moved = clip.world_from_camera.clone()
    moved[2:, 0, 3] += 1.0
    later = Cameras(moved, clip.lens)
    inputs = wan_like(1, lambda *shape: torch.linspace(-2, 2, torch.Size(shape).numel()).reshape(1, *shape), frames=4)
    with torch.no_grad():
        transformer._set_ar_attention(2)
        blocks = output(transformer, inputs, clip)
        changed = (output(transformer, inputs, later) - blocks).abs().amax((0, 1, 3, 4))
        assert (changed[:2] < 1e-6).all()
        assert (changed[2:] > 1e-2).all()
        ready = branch.prepare(clip, inputs["hidden_states"], sees=Visibility.block_causal(4, 2))
        assert torch.equal(output(transformer, inputs, ready), blocks)
        with pytest.raises(ValueError, match=r"cameras made ready must be for frames that see Visibility.*got None"):
            output(transformer, inputs, branch.prepare(clip, inputs["hidden_states"]))
        transformer._set_ar_attention(1)
        whole = output(transformer, inputs, clip)
        assert ((output(transformer, inputs, later) - whole).abs().amax((0, 1, 3, 4)) > 1e-2).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ltx_video", {"num_frames": 4}, r"hidden_states must be num_frames · height · width .*\(4, 2, 3\), got 18"),
        ("ltx_video", {"width": None}, "pass the three sizes"),
        ("ltx2", {"video_self_attention_mask": torch.ones(2, 18, 18)}, "video_self_attention_mask must be None"),
        ("kandinsky5", {"sparse_params": {"to_fractal": True}}, "sparse_params must be None with a camera branch"),
    ],
)
def test_calls_whose_tokens_are_not_those_of_cameras(name: str, change: dict[str, Any], message: str) -> None:
    transformer, inputs = CASES[name].model(), CASES[name].arguments()
    attach(transformer, tiny_config())
    with pytest.raises(ValueError, match=message):
        output(transformer, {**inputs, **change}, cameras())


@pytest.mark.parametrize("name", ["ltx_video", "ltx2", "cogvideox"])
def test_clips_for_a_batch_that_guidance_doubled(name: str) -> None:
    """Samples a and b lie as a b a b, but as a a b b where one prompt has two videos: only whole batches are taken."""
    transformer, inputs = CASES[name].model(), CASES[name].arguments(batch=4)
    attach(transformer, tiny_config())
    output(transformer, inputs, cameras(batch=4))
    output(transformer, inputs, cameras())
    with pytest.raises(ValueError, match=r"of one clip or of a batch 4 for this model, got 2; with guidance"):
        output(transformer, inputs, cameras(batch=2))


def test_arguments_by_place() -> None:
    """The rotary embedding of CogVideoX carries the cameras, also where it is no keyword."""
    case = CASES["cogvideox_15"]
    transformer, inputs = case.model(), case.arguments()
    perturb(attach(transformer, tiny_config()))
    first, rotary = ("hidden_states", "encoder_hidden_states", "timestep"), inputs["image_rotary_emb"]
    args = (*(inputs[name] for name in first), None, None, rotary)
    placed = transformer(*args, attention_kwargs={"cameras": cameras()}, return_dict=False)[0]
    assert torch.equal(placed, output(transformer, inputs, cameras()))


def example_below(heading: str) -> str:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


def test_the_page_shows_how_to_train_a_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an LTX whose branch has one head of 128. The branch learns, and the base stays."""
    case, clips = CASES["ltx_video"], cameras(batch=2)
    sizes = {"num_attention_heads": 8, "attention_head_dim": 64, "cross_attention_dim": 512}
    transformer = replace(case, config={**case.config, **sizes}).model()
    inputs, before = case.arguments(), {name: weight.clone() for name, weight in transformer.state_dict().items()}
    names = ("hidden_states", "encoder_hidden_states", "encoder_attention_mask")
    size = {name: inputs[name] for name in ("num_frames", "height", "width")}
    made = {"merope": merope, "torch": torch, "pipe": SimpleNamespace(transformer=transformer)}
    monkeypatch.chdir(tmp_path)
    exec(
        example_below("Train a branch of another base"),
        {**made, "batches": [(*(inputs[n] for n in names), size, clips)]},
    )
    trained = detach(transformer)
    assert all(torch.equal(weight, before[name]) for name, weight in transformer.state_dict().items())
    assert all(bool(processor.cam_out.weight.any()) for processor in trained.processors().values())
    loaded = load_branch(transformer, "my-ltx-branch")
    assert torch.equal(loaded.processors()[1].cam_out.weight, trained.processors()[1].cam_out.weight)


def test_the_page_shows_how_to_add_a_base_model() -> None:
    """Its example, ConsisID, on a tiny model."""
    case = replace(CASES["cogvideox"], kind="ConsisIDTransformer3DModel")
    transformer, inputs = case.model(), case.arguments()
    base = output(transformer, inputs)
    try:
        exec(example_below("Add a base model"), {})
        branch = attach(transformer, tiny_config())
        assert torch.equal(output(transformer, inputs, cameras()), base)
        perturb(branch)
        assert (output(transformer, inputs, cameras()) - output(transformer, inputs, cameras(seed=1))).abs().max() > 0.1
        detach(transformer)
        assert torch.equal(output(transformer, inputs), base)
    finally:
        FAMILIES.pop("ConsisIDTransformer3DModel", None)


def test_what_only_wan_takes() -> None:
    for change in ({"integration": "rerope", "carve": (2, 2, 2)}, {"integration": "additive", "encoding": "plucker"}):
        with pytest.raises(ValueError, match=r"integration must be one of \['parallel'\] for LTXVideo"):
            attach(CASES["ltx_video"].model(), CameraBranchConfig(**change))
    with pytest.raises(ValueError, match="history must be None for LTXVideo"):
        attach(CASES["ltx_video"].model(), tiny_config(history="sa"))


def test_vace_takes_branches_of_wan(tmp_path: Path) -> None:
    """It has Wan's blocks with Wan's weights. Nothing can be trained on VACE itself."""
    case, wan = CASES["wan_vace"], tiny_wan(num_layers=2)
    perturb(attach(wan, tiny_config())).save_pretrained(tmp_path)
    transformer, inputs = case.model(), case.arguments()
    base = output(transformer, inputs)
    loaded = load_branch(transformer, tmp_path)
    first, second = (output(transformer, inputs, cameras(batch=2, seed=seed)) for seed in (0, 4))
    assert (first - base).abs().max() > 0.1
    assert (first - second).abs().max() > 0.1
    assert detach(transformer) is loaded
    assert torch.equal(output(transformer, inputs), base)


def test_sparse_attention_takes_no_branch() -> None:
    """Kandinsky's models of 10 s are refused at once, not in the first forward."""
    case = CASES["kandinsky5"]
    sparse = replace(case, config={**case.config, "attention_type": "nabla"}).model()
    with pytest.raises(ValueError, match=r"attention_type must be regular .* got 'nabla'; use a model with regular"):
        attach(sparse, tiny_config())


def test_a_branch_of_another_family_is_refused(tmp_path: Path) -> None:
    """Wan and SkyReels have the same sizes and names."""
    wan = tiny_wan(num_layers=2)
    attach(wan, tiny_config()).save_pretrained(tmp_path / "wan")
    skyreels = CASES["skyreels"].model()
    with pytest.raises(ValueError, match=r"a WanTransformer3DModel there, a SkyReelsV2Transformer3DModel here"):
        load_branch(skyreels, tmp_path / "wan")
    attach(skyreels, tiny_config()).save_pretrained(tmp_path / "skyreels")
    detach(wan)
    with pytest.raises(ValueError, match=r"a SkyReelsV2Transformer3DModel there, a WanTransformer3DModel here"):
        load_branch(wan, tmp_path / "skyreels")
