"""Run by test_interpreted_kernels.py: gradients of tables, for encodings that learn a depth."""

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

from fused_kernel_checks import SMALL, _poisoned, two_cameras  # noqa: F401  # _poisoned: for every test here, too
from scenes import PINHOLE, random_content, random_poses, random_qkv

import merope
from merope import GTA, AttentionPlan, Cameras
from merope.attention import fused
from merope.attention.kernels import grouped, transforms
from merope.attention.kernels.prepared import PreparedPlan, prepared
from merope.attention.kernels.support import why_not_fused
from merope.attention.operators import Operator
from merope.encodings.rayrope import RayRoPE

RAYS = RayRoPE(head_dim=28)
"""One frequency of RayRoPE on 24 channels, 4 left alone, 4 more to fill up."""


def learning(plan: AttentionPlan, *sides: str) -> tuple[AttentionPlan, list[Tensor]]:
    """The plan with tables that require gradients on the given sides, and these tables."""
    tables: list[Tensor] = []

    def leaf(operator: Operator | None, side: str) -> Operator | None:
        if operator is None or side not in sides:
            return operator
        tables.append(operator.table.detach().clone().requires_grad_())
        return replace(operator, table=tables[-1])

    blocks = [replace(b, query=leaf(b.query, "query"), key=leaf(b.key, "key")) for b in plan.blocks]
    return replace(plan, blocks=tuple(blocks)), tables


def assert_learns(
    make: Callable[[], tuple[AttentionPlan, list[Tensor]]], heads: int = 1, batch: int = 1, **options: object
) -> None:
    """Output and gradients of q, k, v and of what `make` returns with its plan, against sdpa in float64."""
    plan, _ = make()
    inputs = random_qkv(max(batch, plan.batch), heads, plan.query_tokens, plan.head_dim, plan.key_tokens)
    weight = torch.randn_like(inputs[0])
    results = []
    for dtype, kwargs in ((torch.float64, {"backend": "sdpa"}), (torch.float32, {"backend": "fused", **options})):
        plan, learned = make()
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = merope.attend(*leaves, plan, **kwargs)  # type: ignore[arg-type]
        results.append((out.detach(), *torch.autograd.grad(out, [*leaves, *learned], weight.to(dtype))))
    for number, (right, got) in enumerate(zip(*results, strict=True)):
        assert got.shape == right.shape
        error = float((got - right).norm() / right.norm())
        assert error < 3e-6, f"{number}: {error}"


def rays_of(
    content: Tensor,  # [B, cameras + extra tokens, 2]
    extra: int = 0,
) -> AttentionPlan:
    cameras = Cameras(random_poses(content.shape[0], content.shape[1] - extra), PINHOLE)
    return RAYS.plan(cameras, (1, 1), content=content, extra_tokens=extra)


def rays_that_learn(batch: int, cameras: int) -> tuple[AttentionPlan, list[Tensor]]:
    """From predicted depths; those of the first and of the last camera are clamped, and get no gradient."""
    content = random_content(batch, cameras).requires_grad_()
    return rays_of(content), [content]


LEARNING: dict[str, Callable[[], AttentionPlan]] = {
    "rayrope": lambda: two_cameras(RAYS, content=random_content(1, 4)),
    "rayrope, extra token": lambda: rays_of(random_content(1, 3), extra=1),
    "rayrope, logits only": lambda: two_cameras(replace(RAYS, transform_values=False), content=random_content(1, 4)),
    "adjacent pairs": lambda: two_cameras(merope.encoding("crepe", head_dim=8), content=random_content(1, 4)),
    "matrices on many channels": lambda: GTA(head_dim=24).plan(Cameras(random_poses(2), PINHOLE), (1, 1)),
    "rows of cameras": lambda: two_cameras(replace(SMALL, disparity=False), extra_tokens=1),
    "heads of their own": lambda: two_cameras(merope.encoding("urope", head_dim=16)),
}


@pytest.mark.parametrize("name", LEARNING)
def test_gradients_of_all_tables(name: str) -> None:
    assert_learns(lambda: learning(LEARNING[name](), "query", "key"), heads=3 if name == "heads of their own" else 1)


@pytest.mark.parametrize("side", ["query", "key"])
def test_gradients_of_the_tables_of_one_side(side: str) -> None:
    assert_learns(lambda: learning(rays_of(random_content(1, 2)), side))


def test_gradients_of_predicted_depths_of_two_clips() -> None:
    assert_learns(lambda: rays_that_learn(2, 3))


def test_gradients_of_one_clips_depths_for_two_samples() -> None:
    assert_learns(lambda: rays_that_learn(1, 3), batch=2)


def test_gradients_of_tables_in_chunks_of_cameras_and_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "HEADS_PER_PROGRAM", 2)

    def make() -> tuple[AttentionPlan, list[Tensor]]:
        return learning(rays_of(random_content(2, 2)), "query", "key")

    per_camera = 4 * (3 * 2 * 32 * 4)
    assert_learns(make, heads=3, memory_budget=per_camera)
    with pytest.raises(ValueError, match=f"memory_budget must be at least {per_camera} bytes"):
        merope.attend(*(x.float() for x in random_qkv(2, 3, 2, 28)), make()[0], "fused", per_camera - 1)


def test_only_plans_that_learn_call_the_kernel_of_table_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    for module in (grouped, fused):
        monkeypatch.setattr(module, "add_uses", lambda *_, **__: calls.append(None))
    q, k, v = (x.float().requires_grad_() for x in random_qkv(1, 1, 2, 28))
    plan, _ = learning(rays_of(random_content(1, 2)), "query", "key")
    with torch.no_grad():
        merope.attend(q, k, v, plan, backend="fused")
    merope.attend(q, k, v, rays_of(random_content(1, 2)), backend="fused").sum().backward()
    assert not calls
    merope.attend(q, k, v, plan, backend="fused").sum().backward()
    assert len(calls) == 4  # of turned queries, keys, values and output


def test_small_gradients_of_tables_kept_in_float16_do_not_vanish() -> None:
    plan, tables = learning(rays_of(random_content(1, 2)), "query", "key")
    assert prepared(plan, torch.bfloat16).key_tables.grouped.dtype == torch.float16
    inputs = [x.bfloat16() for x in random_qkv(1, 1, 2, 28)]
    ours = merope.attend(*inputs, plan, backend="fused")
    exact = merope.attend(*(x.double() for x in inputs), plan, backend="sdpa")
    for got, right in zip(*(torch.autograd.grad(1e-12 * x.sum(), tables) for x in (ours, exact)), strict=True):
        assert (got - right).norm() / right.norm() < 0.02


def test_checkpointed_blocks_keep_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []

    def noted(plan: AttentionPlan, dtype: torch.dtype) -> PreparedPlan:
        maps = prepared(plan, dtype)
        made.append(weakref.ref(maps.key_tables.grouped))
        return maps

    monkeypatch.setattr(fused, "prepared", noted)
    q, k, v = (x.float().requires_grad_() for x in random_qkv(1, 1, 3, 28))
    content = random_content(1, 3).requires_grad_()

    def block(content: Tensor) -> Tensor:
        return merope.attend(q, k, v, rays_of(content), backend="fused")

    out = checkpoint(block, content, use_reentrant=False)
    assert made[0]() is None
    wanted = torch.autograd.grad(block(content).square().sum(), (q, content))
    for got, right in zip(torch.autograd.grad(out.square().sum(), (q, content)), wanted, strict=True):
        assert torch.equal(got, right)


def test_fused_takes_what_learns_a_depth() -> None:
    plan, _ = rays_that_learn(1, 2)
    q = torch.zeros(1, 1, 2, 28)
    assert why_not_fused(q, plan) is None
    moving = SMALL.plan(Cameras(random_poses(2).requires_grad_(), PINHOLE), (1, 1))
    assert "tables of quaternions" in str(why_not_fused(q, moving))
