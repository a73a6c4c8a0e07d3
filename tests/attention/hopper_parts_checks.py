"""Run by test_interpreted_kernels.py: the Hopper path where some tokens have no camera, with its kernels emulated."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from fused_kernel_checks import _poisoned, with_gradients  # noqa: F401  # memory is NaN in every test
from scenes import PINHOLE, random_poses, random_qkv

import merope
from merope import AttentionPlan, Cameras, MeRoPE, UnifiedCamera
from merope.attention import dispatch, fused
from merope.attention.kernels import hopper_parts, hopper_tables
from merope.attention.kernels.hopper_tables import make_tables, why_not_plan
from merope.attention.kernels.prepared import kept, prepared
from tests.attention import hopper_emulation
from tests.foreign_plans import like_ours

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_interpreted_kernels.py"

hopper_emulation.register()
PAPER, PHASES = MeRoPE(), MeRoPE(direction_scale=50.0)
RIMMED, RIM = UnifiedCamera(120.0, 120.0, 120.0, 72.0, 1.8, 256, 144), (3, 5)
"""A lens, and a grid of which it sees the middle, but no corner."""


def of_poses(*has_pose: bool, clips: int = 0) -> Cameras:
    shape = (clips, len(has_pose)) if clips else (len(has_pose),)
    poses, flags = random_poses(*shape), torch.tensor(has_pose).expand(shape)
    poses[~flags] = torch.nan
    return Cameras(poses, RIMMED, flags.clone())


def cross(encoding: MeRoPE) -> AttentionPlan:
    key = Cameras(random_poses(3, seed=4), RIMMED)
    options = {"key": key, "key_grid": (3, 4), "key_extra_tokens": 2}
    return encoding.plan(Cameras(random_poses(2), RIMMED), RIM, extra_tokens=1, **options)  # type: ignore[arg-type]


def keys_alone(encoding: MeRoPE) -> AttentionPlan:
    """Every query has a camera."""
    options = {"key": of_poses(True, False), "key_grid": (1, 2), "key_extra_tokens": 1}
    return encoding.plan(Cameras(random_poses(2), PINHOLE), (1, 2), **options)  # type: ignore[arg-type]


def queries_alone(encoding: MeRoPE) -> AttentionPlan:
    """Every key has a camera."""
    return encoding.plan(of_poses(True, False), (1, 2), extra_tokens=1, key=Cameras(random_poses(2), PINHOLE))


def foreign(*names: str) -> AttentionPlan:
    """Two cameras of three queries, two of two keys; some of each have no camera, and tables there are not numbers."""
    flags = [torch.ones(1, 6, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)]
    flags[0][0, 4], flags[1][0, 1] = False, False
    camera = {name: replace(block, camera=name != "native") for name, block in like_ours().items()}
    return AttentionPlan(128, tuple(camera[name] for name in names), 2, 3, *flags)


PLANS: dict[str, Callable[[MeRoPE], AttentionPlan]] = {
    "extra tokens": lambda e: e.plan(Cameras(random_poses(2), PINHOLE), (1, 2), extra_tokens=3),
    "one extra token": lambda e: e.plan(Cameras(random_poses(2), PINHOLE), (1, 2), extra_tokens=1),
    "a rim": lambda e: e.plan(Cameras(random_poses(2), RIMMED), RIM),
    "a rim and extra tokens, two clips": lambda e: e.plan(Cameras(random_poses(2, 2), RIMMED), RIM, extra_tokens=2),
    "a camera without a pose": lambda e: e.plan(of_poses(False, True, True), (1, 2)),
    "the same cameras without a pose in two clips": lambda e: e.plan(of_poses(True, False, clips=2), (1, 2)),
    "other keys": cross,
    "keys alone": keys_alone,
    "queries alone": queries_alone,
    "no disparity": lambda e: replace(e, disparity=False).plan(Cameras(random_poses(2), RIMMED), RIM, extra_tokens=1),
    "no rotation": lambda e: replace(e, rotation=False).plan(Cameras(random_poses(2), PINHOLE), (1, 2), extra_tokens=1),
    "no translation": lambda e: replace(e, translation=False).plan(of_poses(True, False), (1, 2)),
    "foreign": lambda _: foreign("disparity", "rotation", "translation", "native"),
    "foreign, none for all tokens": lambda _: foreign("disparity", "translation"),
}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that fit take the kernels; their tables are in float32, so that an error is one of the host's."""
    monkeypatch.setattr(Tensor, "half", Tensor.float)
    monkeypatch.setattr(hopper_tables, "_words", lambda numbers: numbers.contiguous().view(torch.int64))

    def tables(_q: Tensor, plan: AttentionPlan):  # type: ignore[no-untyped-def]
        return kept(plan, "hopper", lambda: make_tables(plan) if why_not_plan(plan) is None else None)

    monkeypatch.setattr(fused, "hopper_for", tables)
    hopper_emulation.calls.clear()


def assert_right(plan: AttentionPlan, factor: float = 1.0, values: Tensor | None = None) -> None:
    """Output and gradients are those of the reference; the kernels had keys with a camera and no others."""
    assert why_not_plan(plan) is None
    assert not bool(plan.query_has_camera.all() and plan.key_has_camera.all())
    q, k, v = random_qkv(plan.batch, 2, plan.query_tokens, 128, plan.key_tokens)
    inputs = (factor * q, k, v if values is None else values * v)
    weight = torch.randn_like(q)
    exact = with_gradients(plan, inputs, weight, backend="reference")
    ours = with_gradients(plan, tuple(x.float() for x in inputs), weight, backend="fused")
    for name, right, got in zip(("output", "q", "k", "v"), exact, ours, strict=True):
        error = float((got - right).norm() / right.norm())
        assert error < (1e-5 if factor == 1 else 1e-4), f"{name}: {error}"
    keys = int(plan.key_has_camera[0].sum())
    assert hopper_emulation.calls == [(plan.query_cameras * plan.tokens_per_camera, keys)]


@pytest.mark.parametrize("encoding", [PAPER, PHASES], ids=["rotation", "directions"])
@pytest.mark.parametrize("name", PLANS)
def test_outputs_and_gradients(name: str, encoding: MeRoPE) -> None:
    assert_right(PLANS[name](encoding))


@pytest.mark.parametrize("name", ["extra tokens", "a rim", "foreign"])
def test_peaked_attention(name: str) -> None:
    """Queries of the rim have their largest scores in either part, or apart: weights of no part are above 1."""
    assert_right(PLANS[name](PAPER), factor=30.0)


def test_large_values_without_a_camera() -> None:
    plan = PLANS["extra tokens"](PAPER)
    assert_right(plan, values=torch.where(plan.key_has_camera[0, :, None], 1.0, 1000.0).double())


def test_the_output_is_token_major_and_views_are_read_as_they_lie() -> None:
    plan = PLANS["a rim"](PAPER)
    qkv = torch.randn(1, plan.query_tokens, 3, 2, 128)
    views = [x.transpose(1, 2) for x in qkv.unbind(2)]
    out = merope.attend(*views, plan, backend="fused")
    assert out.transpose(1, 2).is_contiguous()
    dense = merope.attend(*(x.contiguous() for x in views), plan, backend="fused")
    torch.testing.assert_close(out, dense)


@pytest.mark.parametrize("name", ["a camera without a pose", "keys alone"])
def test_the_memory_budget_is_that_of_what_is_expanded(name: str) -> None:
    plan = PLANS[name](PAPER)
    expanded = plan.key_tokens if plan.cameraless_queries.numel() else int((~plan.key_has_camera).sum())
    needed = 2 * 128 * 4 * 2 * 2 * expanded  # heads, channels, bytes, keys and values, and their gradients
    q, k, v = (x.float().requires_grad_() for x in random_qkv(1, 2, plan.query_tokens, 128, plan.key_tokens))
    with pytest.raises(ValueError, match=f"memory_budget must be at least {needed} bytes"):
        merope.attend(q, k, v, plan, "fused", needed - 1)
    merope.attend(q, k, v, plan, "fused", needed).sum().backward()
    assert not dispatch._fits(q, k, plan, needed - 1)
    assert dispatch._fits(q, k, plan, needed)


def test_what_is_kept_is_made_ready_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS["a rim"](PAPER)
    q, k, v = (x.float() for x in random_qkv(1, 1, plan.query_tokens, 128))
    fused.make_ready(q, plan)
    before = dict(plan.kept)
    monkeypatch.setattr(fused, "keys_apart", None)
    merope.attend(q, k, v, plan, backend="fused")
    assert all(plan.kept[name] is made for name, made in before.items())
    assert plan.kept.keys() == before.keys()


def test_compiled_graphs_know_the_results() -> None:
    plan = PLANS["other keys"](PAPER)
    q, k, v = (x.float() for x in random_qkv(1, 2, plan.query_tokens, 128, plan.key_tokens))
    tables, apart = make_tables(plan), fused._keys_apart(plan)
    assert apart.rest is not None
    queries = plan.query_cameras * plan.tokens_per_camera
    given = (tables.tensors(), apart.order, *prepared(apart.rest, torch.float32).pack())
    kinds = ("test_schema", "test_faketensor")
    sizes = (plan.query_cameras, queries, apart.with_camera, 2**30)
    arguments = (q, k, v, *given, *sizes)
    torch.library.opcheck(torch.ops.merope.attend_hopper_parts, arguments, test_utils=kinds)
    out, lse = hopper_parts.attend_hopper_parts(*arguments)
    arguments = (torch.randn_like(out), q, k, v, out, lse, *given, plan.query_cameras, apart.with_camera, 2**30)
    torch.library.opcheck(torch.ops.merope.attend_hopper_parts_backward, arguments, test_utils=kinds)
