"""Retrieved history: references act through their own path alone, are dropped from the output, and share the world."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import WanTransformer3DModel
from history_models import PATHS, references, run_with, same_tables, wan_with
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import FISHEYE, PINHOLE, ZOOM, random_poses
from torch import Tensor
from torch._dynamo.utils import counters
from wan_models import WAN22_5B, cameras, meta_wan, perturb, run, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.attachment import attach, attached_branch, detach, load_branch
from merope.adapters.branch_config import CameraBranchConfig
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.history import HistoryReferences, joined
from merope.geometry.cameras import Cameras

WORLD_ENCODINGS = ("merope", "raynova", "ucpe_clamped")
"""The last two depend on the frame that they are given."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_cross_attention_changes_no_bit(dtype: torch.dtype) -> None:
    base = tiny_wan(dtype, num_layers=2)
    plain = run(base)
    attach(base, tiny_config(history="ca"))
    assert torch.equal(run_with(base, references()), plain)
    assert torch.equal(run_with(base, None), plain)


def test_parameters_on_the_real_model() -> None:
    transformer = meta_wan(WAN22_5B)
    counts = {}
    for path in (None, *PATHS):
        branch = attach(transformer, CameraBranchConfig(history=path))
        counts[path] = sum(parameter.numel() for parameter in branch.parameters())
        detach(transformer)
    assert counts["sa"] == counts[None]
    assert round((counts["ca"] - counts[None]) / 1e6, 1) == 141.6


@pytest.mark.parametrize("path", PATHS)
def test_references_matter_and_are_dropped(path: str) -> None:
    transformer = wan_with(path)
    one, other, none = (run_with(transformer, h) for h in (references(0), references(1), None))
    assert one.shape == other.shape == none.shape == tiny_inputs()["hidden_states"].shape
    assert (one - other).abs().max() > 1e-4
    assert (one - none).abs().max() > 1e-4
    with_fields = transformer(
        **{**tiny_inputs(), "return_dict": True}, attention_kwargs={"cameras": cameras(), "history": references(0)}
    )
    assert torch.equal(with_fields.sample, one)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("change", ["latents", "cameras", "times"])
def test_every_part_of_a_reference_matters(path: str, change: str) -> None:
    transformer, before, other = wan_with(path), references(0), references(1, times=(104.0, 109.0))
    parts = {"latents": before.latents, "cameras": before.cameras, "times": before.times}
    after = HistoryReferences(**{**parts, change: getattr(other, change)})
    assert (run_with(transformer, before) - run_with(transformer, after)).abs().max() > 1e-6


def test_cross_attention_is_the_only_way_in_for_ca() -> None:
    transformer = wan_with("ca")
    with torch.no_grad():
        for block in transformer.blocks[1::2]:
            block.attn1.processor.cam_history.ref_out.weight.zero_()
            block.attn1.processor.cam_history.ref_out.bias.zero_()
    assert torch.equal(run_with(transformer, references(0)), run_with(transformer, None))


def test_self_attention_is_the_only_way_in_for_sa() -> None:
    transformer = wan_with("sa")
    with torch.no_grad():
        for block in transformer.blocks:
            block.attn1.to_out[0].weight.zero_()
        transformer.blocks[1].attn1.processor.cam_out.weight.zero_()
    assert torch.equal(run_with(transformer, references(0)), run_with(transformer, references(1)))


def test_appended_references_are_frames_at_noise_level_zero() -> None:
    """With times that go on where the video ends, history "sa" is the base model on a longer clip, bit by bit."""
    transformer, base = wan_with("sa", perturbed=False), tiny_wan(num_layers=2)
    inputs, history = tiny_inputs(), references(times=(3.0, 4.0))
    longer = torch.cat((inputs["hidden_states"], history.latents.expand(2, -1, -1, -1, -1)), dim=2)
    levels = torch.cat((torch.full((2, 3 * 6), 500), torch.zeros(2, 2 * 6, dtype=torch.int64)), dim=1)
    expected = base(**{**inputs, "hidden_states": longer, "timestep": levels})[0][:, :, :3]
    assert torch.equal(run_with(transformer, history), expected)
    per_token = run_with(transformer, history, timestep=torch.full((2, 3 * 6), 500))
    assert torch.equal(per_token, expected)
    text = inputs["encoder_hidden_states"]
    positional = transformer(
        inputs["hidden_states"],
        inputs["timestep"],
        text,
        return_dict=False,
        attention_kwargs={"cameras": cameras(), "history": history},
    )[0]
    assert torch.equal(positional, expected)


def test_one_timestep_serves_all_samples() -> None:
    transformer = wan_with("sa")
    one = run_with(transformer, references(), timestep=torch.tensor([500]))
    assert torch.equal(one, run_with(transformer, references(), timestep=torch.tensor([500, 500])))


def test_the_backbone_sees_the_tag() -> None:
    """Wan's own rotary embedding at frames 0, 1, 2, 101, 102."""
    transformer, base = wan_with("sa", perturbed=False), tiny_wan(num_layers=2)
    inputs, history = tiny_inputs(), references()
    longer = torch.cat((inputs["hidden_states"], history.latents.expand(2, -1, -1, -1, -1)), dim=2)
    levels = torch.cat((torch.full((2, 3 * 6), 500), torch.zeros(2, 2 * 6, dtype=torch.int64)), dim=1)
    of_all, frames = base.rope.forward, torch.tensor([0, 1, 2, 101, 102])

    def at_frames(latents: Tensor) -> tuple[Tensor, Tensor]:
        tables = of_all(latents[:, :, :1].expand(-1, -1, 103, -1, -1))
        return tuple(table.unflatten(1, (103, 6))[:, frames].flatten(1, 2) for table in tables)

    base.rope.forward = at_frames  # type: ignore[method-assign]
    expected = base(**{**inputs, "hidden_states": longer, "timestep": levels})[0][:, :, :3]
    assert torch.equal(run_with(transformer, history), expected)


def test_the_branch_sees_the_tag_and_the_cameras_of_appended_references() -> None:
    branch = attach(tiny_wan(num_layers=2), tiny_config(history="sa"))
    latents, history = tiny_inputs()["hidden_states"], references()
    ready = branch.prepare(cameras(), latents, history=history)
    together = Cameras(torch.cat((cameras().world_from_camera, history.posed.world_from_camera)), PINHOLE)
    assert branch.encoding is not None
    assert ready.plan is not None
    plan = branch.encoding.plan(together, (2, 3), times=[0, 1, 2, 101, 102])
    assert same_tables(ready.plan, plan)


def test_cross_attention_takes_the_encodings_plan_of_both_sides() -> None:
    branch = attach(tiny_wan(num_layers=2), tiny_config(history="ca"))
    history = references()
    ready = branch.prepare(cameras(), tiny_inputs()["hidden_states"], history=history)
    assert branch.encoding is not None
    assert ready.history_plan is not None
    plan = branch.encoding.plan(cameras(), (2, 3), key=history.posed, key_times=[101, 102])
    assert same_tables(ready.history_plan, plan)
    assert ready.plan is not None
    assert ready.plan.key_tokens == 18


@pytest.mark.parametrize("encoding", WORLD_ENCODINGS)
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), metres=st.sampled_from([0.0, 10.0, 1e4]))
def test_moving_the_whole_world_changes_nothing(path: str, encoding: str, seed: int, metres: float) -> None:
    transformer = world_models[path, encoding]
    move = random_poses(1, seed=seed, spread_m=1.0)[0]
    move[:3, 3] *= metres
    video, history = cameras(), references()
    moved = HistoryReferences(history.latents, Cameras(move @ history.posed.world_from_camera, PINHOLE), history.times)
    with torch.no_grad():
        here = run_with(transformer, history, video)
        there = run_with(transformer, moved, Cameras(move @ video.world_from_camera, PINHOLE))
        torn = run_with(transformer, moved, video)
    assert (here - there).abs().max() < 1e-6  # tables are float32: a rounding may fall on the other side
    assert (here - torn).abs().max() > 1e-4


def world_model(path: str, encoding: str) -> WanTransformer3DModel:
    if encoding == "merope":
        return wan_with(path, dtype=torch.float64)
    transformer = tiny_wan(torch.float64, num_layers=2, attention_head_dim=32)
    perturb(attach(transformer, tiny_config(history=path, encoding=encoding, encoding_options={})))
    return transformer


world_models = {(path, encoding): world_model(path, encoding) for path in PATHS for encoding in WORLD_ENCODINGS}


@pytest.mark.parametrize("path", PATHS)
def test_every_sample_has_its_own_history(path: str) -> None:
    transformer = wan_with(path)
    both = references(batch=2, times=((101.0, 102.0), (100.0, 102.0)))
    out = run_with(transformer, both, cameras(batch=2))
    for sample in range(2):
        one = slice(sample, sample + 1)
        alone = HistoryReferences(
            both.latents[one], Cameras(both.posed.world_from_camera[sample], PINHOLE), both.moments[sample]
        )
        inputs = tiny_inputs()
        picked = {name: inputs[name][one] for name in ("hidden_states", "timestep", "encoder_hidden_states")}
        video = Cameras(cameras(batch=2).world_from_camera[sample], PINHOLE)
        assert (run_with(transformer, alone, video, **picked) - out[one]).abs().max() < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_one_set_of_references_serves_neighbours(path: str) -> None:
    transformer = wan_with(path)
    twice = {name: value.repeat_interleave(2, 0) for name, value in tiny_inputs().items() if name != "return_dict"}
    history = references(batch=2)
    out = run_with(transformer, history, cameras(batch=2), **twice)
    assert (out[::2] - run_with(transformer, history, cameras(batch=2))).abs().max() < 1e-5
    assert (out[1::2] - out[::2]).abs().max() < 1e-6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("times", [(101.0, 102.0), ((101.0, 102.0),)])
def test_a_batch_of_one_history_serves_every_sample(path: str, times: Any) -> None:
    transformer, history = wan_with(path), references(batch=1, times=times)
    alone = HistoryReferences(history.latents, Cameras(history.posed.world_from_camera[0], PINHOLE), (101.0, 102.0))
    for video in (cameras(), cameras(batch=2)):
        assert torch.equal(run_with(transformer, history, video), run_with(transformer, alone, video))


@pytest.mark.parametrize("path", PATHS)
def test_no_references_is_no_history(path: str) -> None:
    transformer = wan_with(path)
    nothing = HistoryReferences(torch.zeros(1, 4, 0, 4, 6), None, ())
    assert torch.equal(run_with(transformer, nothing), run(transformer, cameras()))


@pytest.mark.parametrize("path", PATHS)
def test_steps_and_guidance_passes_share_one_condition(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, made = wan_with(path), []
    prepare = CameraBranch.prepare
    monkeypatch.setattr(CameraBranch, "prepare", lambda *a, **k: made.append(1) or prepare(*a, **k))
    video, history = cameras(), references()
    for _ in range(3):
        run_with(transformer, history, video)
    assert len(made) == 1
    before = run_with(transformer, history, video)
    history.latents.mul_(2.0)
    assert (run_with(transformer, history, video) - before).abs().max() > 1e-6
    assert len(made) == 2
    run_with(transformer, None, video)
    assert len(made) == 3


@pytest.mark.parametrize("path", PATHS)
def test_gradient_checkpointing_is_exact_with_two_histories_in_flight(path: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        transformer = wan_with(path, dtype=torch.float64, blocks="every").train()
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        first, second = (run_with(transformer, references(seed)) for seed in (0, 1))
        third = run_with(transformer, None)
        (first.square().sum() + 3 * second.square().sum() + third.square().sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in transformer.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())
    assert all(bool(gradient.abs().sum() > 0) for name, gradient in gradients[0].items() if "processor" in name)


@pytest.mark.parametrize("path", PATHS)
def test_gradients_reach_the_references(path: str) -> None:
    """And so the base model's patch embedding, through them."""
    transformer, history = wan_with(path).train(), references()
    history.latents.requires_grad_(True)
    for _ in range(2):  # a graph serves one backward: nothing of it is kept
        run_with(transformer, history).square().sum().backward()
    assert history.latents.grad is not None
    assert float(history.latents.grad.abs().sum()) > 0


def test_parameters_have_gradients_also_without_references() -> None:
    """Sharded ranks add up the same gradients, whichever of them found a history."""
    transformer = wan_with("ca").train()
    run_with(transformer, None).sum().backward()
    names = {name for name, p in transformer.named_parameters() if "ref_" in name and p.grad is not None}
    assert len(names) == 6
    assert all(bool((p.grad == 0).all()) for name, p in transformer.named_parameters() if name in names)


@pytest.mark.parametrize(("path", "graphs"), [("sa", 3), ("ca", 1)])
def test_a_compiled_model_is_compiled_once(path: str, graphs: int) -> None:
    """Hooks around the model that compute are graphs of their own: references in and their frames out ("sa")."""
    torch._dynamo.reset()
    counters.clear()
    transformer = wan_with(path)
    branch = attached_branch(transformer)
    assert branch is not None
    compiled = torch.compile(transformer, fullgraph=True, backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            inputs, clips, history = tiny_inputs(seed=seed), cameras(seed=seed), references(seed)
            ready = branch.prepare(clips, inputs["hidden_states"], history=history)
            out = compiled(**inputs, attention_kwargs={"cameras": ready})[0]
            assert (out - run_with(transformer, history, clips, **inputs)).abs().max() < 1e-5
            assert counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("path", PATHS)
def test_saved_and_loaded_it_is_the_same(path: str, tmp_path: Path) -> None:
    transformer = wan_with(path)
    out = run_with(transformer, references())
    branch = detach(transformer)
    branch.save_pretrained(tmp_path)
    loaded = load_branch(transformer, tmp_path)
    assert loaded.config["history"] == path
    assert torch.equal(run_with(transformer, references()), out)
    assert loaded.state_dict().keys() == branch.state_dict().keys()
    assert any("ref_q" in name for name in branch.state_dict()) == (path == "ca")


def test_a_copied_model_keeps_its_own_history() -> None:
    transformer = wan_with("sa")
    twin = copy.deepcopy(transformer)
    assert torch.equal(run_with(twin, references()), run_with(transformer, references()))


@pytest.mark.parametrize(
    "config",
    [
        {"integration": "rerope", "carve": (4, 0, 4), "encoding": "gta"},
        {"integration": "additive", "encoding": "plucker"},
        {"integration": "recammaster", "encoding": "extrinsics"},
        {"integration": "motionctrl", "encoding": "extrinsics"},
        {"integration": "modulation", "encoding": "plucker"},
        {"integration": "epipolar", "encoding": "camco"},
        {"integration": "raype", "encoding": "raype"},
        {"integration": "roce", "encoding": "plucker"},
        {"encoding": "rayrope"},
    ],
)
def test_appended_references_work_with_every_integration(config: dict[str, Any]) -> None:
    transformer = wan_with("sa", encoding_options={}, **config)
    one, other = (run_with(transformer, references(seed)) for seed in (0, 1))
    assert (one - other).abs().max() > 1e-5


def test_references_may_have_lenses_of_their_own() -> None:
    history = references(count=3, times=(100.0, 101.0, 102.0))
    zoomed = HistoryReferences(history.latents, Cameras(history.posed.world_from_camera, ZOOM), history.times)
    for path in PATHS:
        transformer = wan_with(path)
        assert (run_with(transformer, zoomed) - run_with(transformer, history)).abs().max() > 1e-6
    fisheye = HistoryReferences(history.latents, Cameras(history.posed.world_from_camera, FISHEYE), history.times)
    run_with(wan_with("ca"), fisheye)
    with pytest.raises(ValueError, match=r"history.cameras.lens.*Pinhole.*UnifiedCamera"):
        run_with(wan_with("sa"), fisheye)


def test_joined_cameras_keep_what_is_unknown() -> None:
    poses = random_poses(2, 3)
    some = Cameras(poses, PINHOLE, has_pose=torch.tensor([[True, False, True], [True, True, True]]))
    both = joined(some, Cameras(poses[0, :2].float(), PINHOLE))
    assert both.world_from_camera.shape == (2, 5, 4, 4)
    assert both.has_pose is not None
    assert both.has_pose.tolist() == [[True, False, True, True, True], [True] * 5]
    assert both.given_dtype == torch.float32
    assert both.dtype == torch.float64


class _Parked(ModelHook):
    """As accelerate's offloading does it: weights are ready only while `forward` runs. Here a dtype is the place."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.float32)
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.float64)
        return output


@pytest.mark.parametrize("path", PATHS)
def test_offloaded_weights(path: str) -> None:
    transformer = wan_with(path)
    expected = run_with(transformer, references())
    hook = _Parked()
    hook.post_forward(transformer, None)
    add_hook_to_module(transformer, hook)
    assert torch.equal(
        transformer(**tiny_inputs(), attention_kwargs={"cameras": cameras(), "history": references()})[0], expected
    )
