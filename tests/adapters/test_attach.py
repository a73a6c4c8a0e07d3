"""attach, detach, and what a forward with cameras does."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import MochiTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from hypothesis import given
from hypothesis import strategies as st
from scenes import PINHOLE, random_poses
from torch import Tensor
from wan_models import (
    LATENTS,
    TINY_MEROPE,
    WAN21_1_3B,
    WAN22_5B,
    cameras,
    meta_wan,
    perturb,
    run,
    tiny_config,
    tiny_inputs,
    tiny_wan,
)

from merope.adapters.attachment import attach, attached_branch, detach
from merope.adapters.branch_config import CameraBranchConfig, block_indices, branch_heads
from merope.adapters.camera_attention import CameraAttention
from merope.adapters.camera_branch import CameraBranch
from merope.attention.dispatch import attend
from merope.encodings import ENCODINGS
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import rigid

HALF_PRECISION = torch.bfloat16


def count(branch: CameraBranch) -> int:
    return sum(parameter.numel() for parameter in branch.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, HALF_PRECISION])
def test_a_fresh_branch_changes_no_bit_and_detach_leaves_no_trace(dtype: torch.dtype) -> None:
    transformer = tiny_wan(dtype)
    keys, base = list(transformer.state_dict()), run(transformer)
    branch = attach(transformer, tiny_config())
    assert torch.equal(run(transformer, cameras()), base)
    assert set(transformer.state_dict()) - set(keys) == {
        f"blocks.{block}.attn1.processor.cam_{layer}.{kind}"
        for block in (1, 3)
        for layer in ("qkv", "out")
        for kind in ("weight", "bias")
    }
    perturb(branch)
    assert not torch.equal(run(transformer, cameras()), base)
    assert detach(transformer) is branch
    assert torch.equal(run(transformer), base)
    assert list(transformer.state_dict()) == keys
    assert not transformer._forward_pre_hooks
    assert not transformer.rope._forward_hooks


def test_the_branch_is_the_papers_attention_beside_self_attention() -> None:
    transformer = tiny_wan(torch.float64)
    branch = perturb(attach(transformer, tiny_config(blocks=[0])))
    seen: dict[str, Tensor] = {}
    attn = transformer.blocks[0].attn1
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out, rotary=args[3].native))
    run(transformer, cameras())
    processor = attn.processor
    x, plan = seen["x"], branch.prepare(cameras(), tiny_inputs(torch.float64)["hidden_states"]).plan
    assert plan is not None
    q, k, v = (part.unflatten(2, (1, 24)).transpose(1, 2) for part in processor.cam_qkv(x).split(24, dim=-1))
    added = processor.cam_out(attend(q, k, v, plan, backend="reference").transpose(1, 2).flatten(2))
    own = processor.base(attn, x, None, None, seen["rotary"])
    assert (seen["out"] - (own + added)).abs().max() < 1e-12
    assert added.abs().max() > 1e-3


def test_queries_keys_and_values_are_views_of_one_product() -> None:
    """No copy stands between the projection and attention; norms, where asked for, act on q and on k alone."""
    x = torch.randn(2, 18, 48, dtype=torch.float64)
    (plain,), (normed,) = (
        attach(tiny_wan(torch.float64), tiny_config(blocks=[0], qk_norm=norm)).processors().values()
        for norm in (None, "rms")
    )
    assert plain.cam_qkv.weight.abs().max() <= 48**-0.5  # each part as a layer of its own would begin
    q, k, v = plain.projected(x)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert q.untyped_storage().nbytes() == 3 * q.numel() * q.element_size()
    normed.load_state_dict(plain.state_dict(), strict=False)
    for ours, expected in zip(normed.projected(x), (_unit_rms(q), _unit_rms(k), v), strict=True):
        assert (ours - expected).abs().max() < 1e-4  # of the norm's epsilon


def test_autocast_makes_no_float32_copy_of_the_input() -> None:
    """A float32 branch in training on a half-precision model: casting up, for autocast to cast down, changes no bit."""
    branch = perturb(attach(tiny_wan(), tiny_config(blocks=[0])))
    (processor,) = branch.processors().values()
    ready, seen = branch.prepare(cameras(), tiny_inputs()["hidden_states"]), []
    processor.cam_qkv.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    hidden = torch.randn(2, 18, 48).to(HALF_PRECISION)
    with torch.autocast("cpu", HALF_PRECISION):
        added, from_copy = processor.camera_output(hidden, ready), processor.camera_output(hidden.float(), ready)
    assert seen[0] is hidden
    assert torch.equal(added.float(), from_copy)


def _unit_rms(x: Tensor) -> Tensor:  # [B, 1, N, d] -> [B, 1, N, d]
    return x / x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize(
    ("compression", "blocks", "millions"),
    [
        (4, "alternating", 141.6),
        (2, "alternating", 283.2),
        (8, "alternating", 70.8),
        (4, "every", 283.3),
        (4, "peak", 18.9),
    ],
)
def test_parameter_counts_of_the_paper(compression: int, blocks: str, millions: float) -> None:
    transformer = meta_wan(WAN22_5B)
    branch = attach(transformer, CameraBranchConfig(compression=compression, blocks=blocks))
    assert round(count(branch) / 1e6, 1) == millions
    if (compression, blocks) == (4, "alternating"):
        assert count(branch) == 141_638_400
        assert sorted(branch.processors()) == list(range(1, 30, 2))
        assert round(sum(p.numel() for p in transformer.parameters()) / 1e9, 2) == 5.14
    heads = {processor.heads for processor in branch.processors().values()}
    assert heads == {24 // compression}
    assert branch.encoding.head_dim == 128


def test_the_small_model_with_one_head_of_192() -> None:
    branch = attach(meta_wan(WAN21_1_3B), CameraBranchConfig(compression=8))
    assert {(p.heads, p.encoding.head_dim) for p in branch.processors().values()} == {(1, 192)}
    assert branch.encoding.channels == (54, 54, 36, 48)


@given(st.integers(1, 40), st.sampled_from([64, 128]), st.integers(1, 40))
def test_heads_fill_the_compressed_width_or_the_compression_is_refused(heads: int, head_dim: int, c: int) -> None:
    width = heads * head_dim
    if width % (c * max(heads // c, 1)):
        with pytest.raises(
            ValueError, match=f"compression must be a divisor of the width {width} that leaves whole heads"
        ):
            branch_heads(heads, head_dim, c)
    else:
        count, dim = branch_heads(heads, head_dim, c)
        assert count * dim * c == width
        assert count == max(heads // c, 1)


def test_injection_schedules() -> None:
    assert block_indices("alternating", 30) == list(range(1, 30, 2))
    assert block_indices("every", 3) == [0, 1, 2]
    assert block_indices("peak", 30) == [11, 13]
    assert block_indices((4, 2), 5) == [2, 4]
    for bad in ("peak", [], [1, 1], [5], [-1], "odd"):
        with pytest.raises(ValueError, match="blocks must be"):
            block_indices(bad, 5)


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_every_encoding_starts_at_the_base_model_and_learns(name: str) -> None:
    options = TINY_MEROPE if name.startswith("merope") else {}
    heads = {} if options else {"num_attention_heads": 2, "attention_head_dim": 48}
    transformer = tiny_wan(num_layers=2, **heads)
    base = run(transformer)
    branch = attach(transformer, tiny_config(encoding=name, encoding_options=options, qk_norm="rms"))
    assert torch.equal(run(transformer, cameras(batch=2)), base)
    perturb(branch)
    out = run(transformer, cameras(batch=2))
    out.square().sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in branch.parameters())
    changed = (run(transformer, cameras(batch=2, seed=5)) - out).abs().max()
    assert (changed == 0) if name == "none" else (changed > 1e-4)


@pytest.mark.parametrize(
    ("encoding", "options"),
    [("merope", TINY_MEROPE), ("merope_phases", TINY_MEROPE), ("raynova", {}), ("ucpe_clamped", {})],
)
def test_the_world_frame_has_no_effect(encoding: str, options: dict[str, object]) -> None:
    """Not even on RayNova, whose phases are of the world, nor on a clamp: maps have origins of their own."""
    transformer = tiny_wan(torch.float64, attention_head_dim=24 if options else 32)
    perturb(attach(transformer, tiny_config(encoding=encoding, encoding_options=options)))
    poses = random_poses(2, 3)
    moved = rigid(torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0], 1e3 * torch.randn(3).double())
    moved[:3, :3] *= torch.linalg.det(moved[:3, :3])
    here, there = (run(transformer, Cameras(p, PINHOLE)) for p in (poses, moved @ poses))
    assert (here - there).abs().max() < 1e-8
    further = poses.clone()
    further[:, 1, :3, 3] += 1.0
    assert (run(transformer, Cameras(further, PINHOLE)) - here).abs().max() > 1e-4


def test_clips_and_samples_of_a_batch() -> None:
    """Two clips for four latents serve two neighbours each; one clip serves all; times and lenses go along."""
    transformer = tiny_wan()
    perturb(attach(transformer, tiny_config()))
    inputs = tiny_inputs(shape=(4, *LATENTS[1:]))
    focal = torch.tensor([[90.0], [130.0]])  # px, of each clip
    has_pose = torch.tensor([[True, True, True], [True, False, True]])
    two = Cameras(random_poses(2, 3), Pinhole(focal, focal, 128.0, 72.0, 256, 144), has_pose)
    times = torch.tensor([[0.0, 1.0, 100.0], [0.0, 50.0, 2.0]])
    together = transformer(**inputs, attention_kwargs={"cameras": two, "times": times})[0]
    for sample in range(4):
        clip = sample // 2
        lens = Pinhole(focal[clip, 0], focal[clip, 0], 128.0, 72.0, 256, 144)
        one = Cameras(two.world_from_camera[clip], lens, has_pose[clip])
        single = {k: v[sample : sample + 1] if isinstance(v, Tensor) else v for k, v in inputs.items()}
        alone = transformer(**single, attention_kwargs={"cameras": one, "times": times[clip]})[0]
        assert (together[sample] - alone[0]).abs().max() < 1e-5
    default = transformer(**inputs, attention_kwargs={"cameras": two})[0]
    assert (default - together).abs().max() > 1e-4
    explicit = transformer(**inputs, attention_kwargs={"cameras": two, "times": [0.0, 1.0, 2.0]})[0]
    assert torch.equal(explicit, default)


def test_forgotten_or_unfitting_cameras_are_refused() -> None:
    transformer = tiny_wan()
    attach(transformer, tiny_config())
    with pytest.raises(ValueError, match=r'attention_kwargs\["cameras"\] must be merope.Cameras.*got None'):
        run(transformer)
    with pytest.raises(ValueError, match=r'attention_kwargs\["cameras"\] must be merope.Cameras.*got None'):
        transformer(**tiny_inputs(), attention_kwargs={"scale": 1.0})
    with pytest.raises(ValueError, match=r'attention_kwargs\["cameras"\] must be merope.Cameras.*got Tensor; pass'):
        run(transformer, cameras().world_from_camera)
    with pytest.raises(ValueError, match=r"one per latent frame, 3, got 9.*Clip.latent_cameras"):
        run(transformer, cameras(9))
    with pytest.raises(ValueError, match=r"one per latent frame, 3, got 4; latent frame n"):
        run(transformer, cameras(4))
    with pytest.raises(ValueError, match="batch that divides the latents' 2, got 3"):
        run(transformer, cameras(batch=3))
    positional = [tiny_inputs()[name] for name in ("hidden_states", "timestep", "encoder_hidden_states")]
    with pytest.raises(ValueError, match="keyword argument"):
        transformer(*positional, None, False, {"cameras": cameras()})
    prepared = attached_branch(transformer).prepare(cameras(4), torch.zeros(2, 4, 4, 4, 6))
    with pytest.raises(ValueError, match="tokens"):
        run(transformer, prepared)
    with pytest.raises(ValueError, match=r"pass times to branch\.prepare"):
        transformer(**tiny_inputs(), attention_kwargs={"cameras": prepared, "times": [0.0, 1.0, 2.0]})
    for misspelt, meant in (("time", "times"), ("histories", "history"), ("camera", "cameras")):
        with pytest.raises(ValueError, match=rf"{misspelt}.*did you mean '{meant}'"):
            transformer(**tiny_inputs(), attention_kwargs={"cameras": cameras(), misspelt: [0.0, 1.0, 2.0]})
    transformer(**tiny_inputs(), attention_kwargs={"cameras": cameras(), "scale": 1.0})


def test_a_branch_that_finds_no_memory_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, moved, to = tiny_wan(), [], CameraAttention.to
    base = run(transformer)

    def no_more(processor: CameraAttention, *args: Any) -> CameraAttention:
        moved.append(processor)
        if len(moved) == 2:
            raise torch.OutOfMemoryError
        return to(processor, *args)

    with monkeypatch.context() as patch:
        patch.setattr(CameraAttention, "to", no_more)
        with pytest.raises(torch.OutOfMemoryError):
            attach(transformer, tiny_config())
    assert torch.equal(run(transformer), base)
    attach(transformer, tiny_config())
    assert torch.equal(run(transformer, cameras()), base)


def test_a_branch_whose_place_was_taken_is_missed() -> None:
    transformer = tiny_wan()
    base = run(transformer)
    attach(transformer, tiny_config())
    transformer.set_attn_processor(WanAttnProcessor())
    with pytest.raises(ValueError, match=r"processor of block \d must be that of the camera branch, got WanAttnProc"):
        run(transformer, cameras())
    detach(transformer)
    assert torch.equal(run(transformer), base)


def test_what_can_be_attached_to() -> None:
    with pytest.raises(ValueError, match=r"WanTransformer3DModel.*got Linear; pass the transformer itself"):
        attach(torch.nn.Linear(2, 2), tiny_config())
    with torch.device("meta"):
        another = MochiTransformer3DModel(num_layers=1)
    with pytest.raises(
        ValueError, match=r"one of WanTransformer3DModel.*got Mochi.*\"Add a base model\" in docs/bases\.md"
    ):
        attach(another, tiny_config())
    with pytest.raises(ValueError, match=r"got SimpleNamespace; pass pipe\.transformer$"):
        attach(SimpleNamespace(transformer=tiny_wan()), tiny_config())
    transformer = tiny_wan()
    with pytest.raises(ValueError, match="with a camera branch"):
        detach(transformer)
    assert attached_branch(transformer) is None
    with pytest.raises(ValueError, match="translation_scale must be 1 for merope"):
        attach(transformer, tiny_config(translation_scale=0.1))
    branch = attach(transformer, tiny_config())
    assert attached_branch(transformer) is branch
    with pytest.raises(ValueError, match="without a camera branch"):
        attach(transformer, tiny_config())
    with pytest.raises(ValueError, match=r"config must be a .*Config, got dict"):
        attach(tiny_wan(), {"encoding": "merope"})
    detach(transformer)
    transformer.blocks[3].attn1.set_processor(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="processor of block 3 must be one without weights, got Linear"):
        attach(transformer, tiny_config())
    attach(transformer, tiny_config(blocks=[1]))


@pytest.mark.parametrize(
    "bad",
    [
        {"encoding": "rope"},
        {"compression": 0},
        {"qk_norm": "layer"},
        {"qk_norm": "rms", "integration": "rerope"},
        {"carve": (28, 34, 34)},
        {"integration": "no"},
        {"encoding_options": {"wavelength_m": (1.0, 2.0)}},
        {"encoding_options": {"translation_scale": 0.1}, "encoding": "gta"},
        {"encoding_options": {"rays": 8}, "encoding": "plucker", "integration": "additive"},
    ],
)
def test_configs_that_mean_nothing(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        CameraBranchConfig(**bad)


def test_copies_are_independent() -> None:
    transformer = tiny_wan()
    branch = perturb(attach(transformer, tiny_config()))
    out = run(transformer, cameras())
    twin = copy.deepcopy(transformer)
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter.zero_()
    assert torch.equal(run(twin, cameras()), out)
    assert attached_branch(twin) is not branch
    assert {id(p) for p in attached_branch(twin).parameters()} <= {id(p) for p in twin.parameters()}
    detach(twin)
    assert not any(isinstance(block.attn1.processor, CameraAttention) for block in twin.blocks)
    assert isinstance(transformer.blocks[1].attn1.processor, CameraAttention)


def test_a_float32_branch_on_a_half_precision_model() -> None:
    transformer = tiny_wan(HALF_PRECISION)
    branch = perturb(attach(transformer, tiny_config(qk_norm="rms")))
    half = run(transformer, cameras())
    branch.to(torch.float32)
    full = run(transformer, cameras())
    assert half.dtype == full.dtype == HALF_PRECISION
    assert 0 < (half.float() - full.float()).abs().max() < 0.1 * full.float().abs().max()
    with torch.autocast("cpu", HALF_PRECISION):
        assert run(transformer, cameras()).isfinite().all()
