"""Encodings that learn a depth: tables made by kernels, and gradients of tables, against PyTorch's own operations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import merope
from merope.attention.plan import AttentionPlan
from merope.encodings import expected_phasors, rayrope
from merope.encodings.crepe import CRePE
from merope.encodings.gta import GTA
from merope.encodings.merope import MeRoPE
from merope.encodings.protocol import Encoding
from merope.encodings.rayrope import RayRoPE
from merope.encodings.urope import URoPE
from merope.geometry.cameras import Cameras
from tests.gpu.errors import DEVICE, HALF, driving_cameras, random_inputs, relative_errors
from tests.scenes import PINHOLE, ZOOM, mixed_cameras, random_content, random_poses, straight_drive

pytestmark = pytest.mark.usefixtures("_poisoned")
Making = Callable[[], tuple[AttentionPlan, list[Tensor]]]
"""Makes a plan, and names what is to get gradients through its tables."""
LEARNING: dict[str, Encoding] = {"rayrope": RayRoPE(), "crepe": CRePE()}
SCENES: dict[str, Callable[[], Cameras]] = {
    "two clips": lambda: Cameras(random_poses(2, 3), PINHOLE),
    "a lens for each camera": lambda: Cameras(random_poses(2, 3), ZOOM),
    "some without a pose": lambda: mixed_cameras(batch=True, lens=PINHOLE),
    "straight ahead": lambda: Cameras(straight_drive(3).repeat(2, 1, 1, 1), PINHOLE),
    "far away": lambda: Cameras(random_poses(2, 3, spread_m=1e4), PINHOLE),
}


def tables_and_gradient(encoding: Encoding, cameras: Cameras, dtype: torch.dtype) -> list[Tensor]:
    """The tables of a plan and what they give the content."""
    cameras = Cameras(cameras.world_from_camera, cameras.lens, cameras.has_pose, plan_dtype=dtype).to(DEVICE)
    content = random_content(2, 14).to(DEVICE).requires_grad_()
    plan = encoding.plan(cameras, (2, 2), content=content, extra_tokens=2)
    tables = [operator.table for operator in plan.blocks[0].operators]
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t) for t in tables]
    return [*(t.detach() for t in tables), *torch.autograd.grad(tables, content, upstream)]


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tables_made_by_kernels(monkeypatch: pytest.MonkeyPatch, name: str, scene: str, dtype: torch.dtype) -> None:
    ours = tables_and_gradient(LEARNING[name], SCENES[scene](), dtype)
    for module in (expected_phasors, rayrope):
        monkeypatch.setattr(module, "kernels_run_on", lambda _: False)
    exact = tables_and_gradient(LEARNING[name], SCENES[scene](), torch.float64)
    for got, right in zip(ours, exact, strict=True):
        assert got.isfinite().all()
        largest = right.abs().max().clamp_min(1.0)
        assert (got - right).abs().max() <= (2e-6 if dtype == torch.float32 else 1e-9) * largest


def learned_results(make: Making, backend: str, rounded: torch.dtype, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of inputs that the first dtype holds, computed in the second."""
    plan, learned = make()
    *inputs, gradient = (x.to(dtype) for x in random_inputs(plan, rounded, heads=3))
    leaves = [x.requires_grad_() for x in inputs]
    out = merope.attend(*leaves, plan, backend)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *learned], gradient)]


def assert_learns(make: Making) -> None:
    """Output and gradients of q, k, v and of what learns, beside those of PyTorch's operations in the same dtype."""
    for dtype in (torch.float32, HALF):
        exact = learned_results(make, "sdpa", dtype, torch.float64)
        ours, theirs = (
            relative_errors(learned_results(make, backend, dtype, dtype), exact) for backend in ("fused", "sdpa")
        )
        assert all(a <= max(2 * b, 3e-6) for a, b in zip(ours, theirs, strict=True)), (dtype, ours, theirs)


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("extra_tokens", [0, 2])
def test_gradients_of_predicted_depths(name: str, extra_tokens: int) -> None:
    def make() -> tuple[AttentionPlan, list[Tensor]]:
        content = random_content(2, 3 * 8 + extra_tokens).to(DEVICE).requires_grad_()
        cameras = driving_cameras(2, 3)
        return LEARNING[name].plan(cameras, (2, 4), content=content, extra_tokens=extra_tokens), [content]

    assert_learns(make)


TABLES: dict[str, Encoding] = {
    "matrices on many channels": GTA(head_dim=24),
    "rows of cameras": MeRoPE(disparity=False),
    "heads of their own": URoPE(head_dim=64),
}


@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_tables_of_every_kind(name: str) -> None:
    """Tables of poses that are moved: matrices, rows that tokens share, and tables by head."""

    def make() -> tuple[AttentionPlan, list[Tensor]]:
        poses = random_poses(2, 3).to(DEVICE)
        shift_m = torch.zeros(2, 3, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
        moved = torch.cat((poses[..., :3, :3], (poses[..., :3, 3] + shift_m)[..., None]), dim=-1)
        cameras = Cameras(torch.cat((moved, poses[..., 3:, :]), dim=-2), PINHOLE).to(DEVICE)
        return TABLES[name].plan(cameras, (2, 4)), [shift_m]

    assert_learns(make)
