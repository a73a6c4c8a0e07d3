"""torch.compile(fullgraph=True) sees one graph for every camera batch."""

import copy
from collections.abc import Iterator

import diffusers
import pytest
import torch
from family_models import CASES, output
from torch._dynamo.utils import counters
from wan_models import cameras, perturb, run, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.attachment import attach, attached_branch
from merope.adapters.camera_attention import CameraAttention
from merope.adapters.conditioning import CameraCondition
from merope.adapters.families import FAMILIES
from merope.adapters.told_ways import OWN_FEATURES, TOLD_PROCESSORS
from merope.attention.plan import AttentionPlan


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def test_the_whole_model_over_ten_camera_batches() -> None:
    """Cameras are made ready outside the graph; their plan is a tensor input of it."""
    transformer = tiny_wan(num_layers=2)
    branch = perturb(attach(transformer, tiny_config()))
    compiled = torch.compile(transformer, fullgraph=True, backend="eager")
    outputs = []
    with torch.no_grad():
        for seed in range(10):
            inputs, clips = tiny_inputs(seed=seed), cameras(batch=2, seed=seed)
            ready = branch.prepare(clips, inputs["hidden_states"])
            outputs.append(compiled(**inputs, attention_kwargs={"cameras": ready})[0])
            assert (outputs[-1] - run(transformer, clips, **inputs)).abs().max() < 1e-5
    assert counters["stats"]["unique_graphs"] == 1
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2


def test_training_the_whole_model() -> None:
    transformer = tiny_wan(num_layers=2).train()
    branch = perturb(attach(transformer, tiny_config()))
    compiled = torch.compile(transformer, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        inputs, clips = tiny_inputs(seed=seed), cameras(batch=2, seed=seed)
        gradients = []
        for model in (compiled, transformer):
            ready = branch.prepare(clips, inputs["hidden_states"])
            loss = model(**inputs, attention_kwargs={"cameras": ready})[0].square().sum()
            gradients.append(torch.autograd.grad(loss, list(branch.parameters())))
        for ours, eager in zip(*gradients, strict=True):
            assert (ours - eager).abs().max() <= 1e-4 * eager.abs().max()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if FAMILIES[case.kind].compiles_blocks])
def test_blocks_of_other_models_compile_one_by_one(name: str) -> None:
    """LTX-2 in pieces, as without a branch."""
    transformer, inputs = CASES[name].model(), CASES[name].arguments()
    for perturbing in ("spatio_temporal_guidance_blocks", "perturbation_mask"):  # they make blocks of LTX-2 differ
        inputs.pop(perturbing, None)
    perturb(attach(transformer, tiny_config(blocks="every")))
    with torch.no_grad():
        expected = output(transformer, inputs, cameras())
        transformer.compile_repeated_blocks(fullgraph=name != "ltx2", backend="eager")
        torch.testing.assert_close(output(transformer, inputs, cameras()), expected)


def test_families_whose_blocks_diffusers_cannot_compile_are_known() -> None:
    for case in CASES.values():
        assert FAMILIES[case.kind].compiles_blocks == bool(getattr(diffusers, case.kind)._repeated_blocks), case.kind


def test_blocks_compiled_one_by_one_take_plain_cameras() -> None:
    transformer = tiny_wan()
    perturb(attach(transformer, tiny_config()))
    eager = copy.deepcopy(transformer)
    transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=False):
        for seed in range(10):  # a block with a branch and one without are two graphs
            clips = cameras(batch=2, seed=seed)
            assert (run(transformer, clips) - run(eager, clips)).abs().max() < 1e-5
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("way", [*TOLD_PROCESSORS, "ucpe_clamped"])
def test_blocks_of_every_integration_train_compiled(way: str) -> None:
    """As `merope train` compiles them: one by one, each as a whole graph."""
    own = OWN_FEATURES.get(way, "plucker")
    told = {"encoding": way} if way == "ucpe_clamped" else {"integration": way, "encoding": own}
    transformer = tiny_wan(num_layers=1).train()
    branch = perturb(attach(transformer, tiny_config(encoding_options={}, blocks="every", **told)), scale=0.1)
    eager = copy.deepcopy(transformer)
    transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    for model in (transformer, eager):
        run(model, cameras(batch=2)).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    for ours, theirs in zip(branch.parameters(), attached_branch(eager).parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-3 * theirs.grad.abs().max() + 1e-6


def test_plain_cameras_in_a_whole_graph_are_refused() -> None:
    transformer = tiny_wan(num_layers=2)
    attach(transformer, tiny_config())
    compiled = torch.compile(transformer, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"branch.prepare\(cameras, latents\)"):
        run(compiled, cameras(), **tiny_inputs())


def test_blocks_that_make_their_own_plans_make_them_outside_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = tiny_wan().train()
    branch = perturb(attach(transformer, tiny_config(encoding="rayrope", encoding_options={})))
    eager = copy.deepcopy(transformer)
    plan, traced = CameraAttention.plan, []

    def noted(self: CameraAttention, x: torch.Tensor, condition: CameraCondition) -> AttentionPlan:
        traced.append(torch.compiler.is_compiling())
        return plan(self, x, condition)

    monkeypatch.setattr(CameraAttention, "plan", noted)
    transformer.compile_repeated_blocks(backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        for seed in range(2):
            clips = cameras(batch=2, seed=seed)
            outs = [run(model, clips) for model in (transformer, eager)]
            assert (outs[0] - outs[1]).abs().max() < 1e-5
    ours = torch.autograd.grad(outs[0].square().sum(), list(branch.parameters()))
    theirs = torch.autograd.grad(outs[1].square().sum(), list(attached_branch(eager).parameters()))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()
    assert traced
    assert not any(traced)
