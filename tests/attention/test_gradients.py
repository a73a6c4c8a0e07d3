"""Gradients of attend: exact through q, k and v, finite in every degenerate case."""

import pytest
import torch
from scenes import PINHOLE, curved_drive, degenerate_cameras, random_poses, random_qkv

import merope
from merope import Cameras, MeRoPE

SMALL = MeRoPE(head_dim=24, partition=(6, 6, 6, 6), fractions=(0.3, 1.0), native_split=(2, 2, 2))
ANCHORS = {
    "minrot": MeRoPE(),
    "transport": MeRoPE(anchor_frame="transport"),
    "phases": MeRoPE(anchor_scale=12.5),
}


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("extra", [0, 1])
def test_gradcheck(backend: str, extra: int) -> None:
    plan = SMALL.plan(Cameras(random_poses(2), PINHOLE), (1, 1), extra_tokens=extra)
    inputs = [x.requires_grad_() for x in random_qkv(1, 1, plan.query_tokens, plan.head_dim)]
    assert torch.autograd.gradcheck(lambda q, k, v: merope.attend(q, k, v, plan, backend=backend), inputs)


def gradients(plan: merope.AttentionPlan, backend: str, budget: int = 2**30) -> list[torch.Tensor]:
    torch.manual_seed(1)
    inputs = [x.requires_grad_() for x in random_qkv(2, 2, plan.query_tokens, plan.head_dim)]
    out = merope.attend(*inputs, plan, backend=backend, memory_budget=budget)
    return list(torch.autograd.grad((out * torch.randn_like(out)).sum(), inputs))


@pytest.mark.parametrize("anchors", ANCHORS)
@pytest.mark.parametrize("name", degenerate_cameras())
def test_gradients_are_finite_and_equal_the_reference(name: str, anchors: str) -> None:
    plan = ANCHORS[anchors].plan(degenerate_cameras()[name], (1, 3))
    for ours, reference in zip(gradients(plan, "sdpa"), gradients(plan, "reference"), strict=True):
        assert ours.isfinite().all()
        assert (ours - reference).abs().max() < 1e-11


def test_gradients_do_not_depend_on_the_chunks() -> None:
    plan = MeRoPE().plan(Cameras(curved_drive(6), PINHOLE), (2, 3), extra_tokens=2)
    for small, large in zip(gradients(plan, "sdpa", 2 * 10**6), gradients(plan, "sdpa"), strict=True):
        assert (small - large).abs().max() < 1e-12


@pytest.mark.parametrize("anchors", ANCHORS)
@pytest.mark.parametrize("name", ["straight", "coincident", "opposite views", "1e-12 m", "fisheye straight"])
def test_gradients_with_respect_to_poses_are_finite(name: str, anchors: str) -> None:
    cameras = degenerate_cameras()[name]
    poses = cameras.world_from_camera.clone().requires_grad_()
    plan = ANCHORS[anchors].plan(Cameras(poses, cameras.lens), (3, 3))
    merope.attend(*random_qkv(1, 1, plan.query_tokens, 128), plan).square().sum().backward()
    assert poses.grad is not None
    assert poses.grad.isfinite().all()
