"""torch.compile on the GPU: one graph for all plans, and a camera branch that trains."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import merope
from merope.attention.dispatch import make_ready
from merope.attention.plan import AttentionPlan
from merope.encodings.merope import MeRoPE
from merope.geometry.cameras import Cameras
from tests.gpu.errors import DEVICE, LENS
from tests.scenes import random_poses

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="compiled code calls kernels that need a GPU")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def paper(seed: int) -> AttentionPlan:
    return MeRoPE().plan(Cameras(random_poses(2, seed=seed), LENS).to(DEVICE), (3, 5))


def expanded(seed: int) -> AttentionPlan:
    cameras = Cameras(random_poses(2, seed=seed), LENS).to(DEVICE)
    return MeRoPE(anchor_frame="transport").plan(cameras, (3, 5), extra_tokens=1)


def apart(seed: int) -> AttentionPlan:
    """On a Hopper GPU, the extra token is attended to apart."""
    return MeRoPE().plan(Cameras(random_poses(2, seed=seed), LENS).to(DEVICE), (3, 5), extra_tokens=1)


@pytest.mark.parametrize("make", [paper, expanded, apart])
def test_one_graph_for_all_plans(make: Callable[[int], AttentionPlan]) -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        return 2 * merope.attend(1.5 * q, k, v, plan)

    compiled = torch.compile(scaled, fullgraph=True)
    for seed in (0, 3, 4):
        plan = make(seed)
        make_ready(plan, torch.bfloat16)
        shape = (1, 2, plan.query_tokens, 128)
        inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        pairs = []
        for run in (compiled, scaled):
            out = run(*inputs, plan)
            pairs.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
        for got, eager in zip(*pairs, strict=True):
            assert (got - eager).double().norm() <= 0.02 * eager.double().norm()
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_branch_trains() -> None:
    """A Wan of two blocks with heads of 128, in bfloat16: what the paper's branch runs."""
    pytest.importorskip("diffusers", reason="a camera branch needs diffusers")
    from merope.adapters.attachment import attach
    from tests.adapters.wan_models import cameras, perturb, tiny_config, tiny_inputs, tiny_wan

    transformer = tiny_wan(torch.bfloat16, num_layers=2, attention_head_dim=128).train()
    branch = perturb(attach(transformer, tiny_config(encoding_options={})), scale=0.05)
    transformer.to(DEVICE)
    compiled = torch.compile(transformer, fullgraph=True)
    for seed in range(2):
        inputs = {
            name: x.to(DEVICE) if isinstance(x, Tensor) else x
            for name, x in tiny_inputs(torch.bfloat16, seed=seed).items()
        }
        clips = cameras(batch=2, seed=seed).to(DEVICE)
        gradients = []
        for model in (compiled, transformer):
            ready = branch.prepare(clips, inputs["hidden_states"])
            out = model(**inputs, attention_kwargs={"cameras": ready})[0]
            assert out.isfinite().all()
            gradients.append(torch.autograd.grad(out.float().square().sum(), list(branch.parameters())))
        for ours, eager in zip(*gradients, strict=True):
            assert ours.isfinite().all()
            assert (ours - eager).double().norm() <= 0.05 * eager.double().norm()
    assert counters["stats"]["unique_graphs"] == 1
