"""Run by test_interpreted_kernels.py: the fused backend against float64, outputs and gradients."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenes import (
    FISHEYE,
    PINHOLE,
    degenerate_cameras,
    mixed_cameras,
    random_poses,
    random_qkv,
)

import merope
from merope import GTA, AttentionPlan, Cameras, MeRoPE
from merope.attention import fused
from merope.attention.fused import make_ready
from merope.attention.kernels import transforms
from merope.attention.kernels.prepared import prepared
from tests.foreign_plans import FOREIGN

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_interpreted_kernels.py"
assert fused.__doc__  # importing it registers the operators

SMALL = MeRoPE(head_dim=32, partition=(18, 6, 6, 2), native_split=(2, 0, 0))
"""Every block of MeRoPE in a head of 32."""
LOGITS = replace(SMALL, transform_values=False)
DIRECTIONS = replace(SMALL, direction_scale=50.0)


def two_cameras(encoding: merope.encodings.protocol.Encoding, **options: object) -> AttentionPlan:
    return encoding.plan(Cameras(random_poses(2), PINHOLE), (1, 2), **options)  # type: ignore[arg-type]


def cross() -> AttentionPlan:
    key = Cameras(random_poses(2, 3, seed=4), FISHEYE)
    return SMALL.plan(Cameras(random_poses(2, 2), PINHOLE), (1, 1), key=key, key_grid=(1, 1), key_times=[7.0, 8.5, 9.0])


PLANS: dict[str, Callable[[], AttentionPlan]] = {
    "merope, 128": lambda: two_cameras(MeRoPE()),
    "merope, 192": lambda: MeRoPE(head_dim=192).plan(Cameras(random_poses(2), PINHOLE), (1, 1)),
    "a batch of clips and other keys": cross,
    "tokens without a camera": lambda: SMALL.plan(mixed_cameras(batch=True), (1, 1), extra_tokens=1),
    "logits only, extra token": lambda: two_cameras(LOGITS, extra_tokens=1),
    "phases of directions, extra token": lambda: two_cameras(DIRECTIONS, extra_tokens=1),
    "one camera": lambda: SMALL.plan(Cameras(random_poses(1), PINHOLE), (1, 2)),
    "gta": lambda: two_cameras(GTA(head_dim=16)),
    "ucpe, extra token": lambda: two_cameras(merope.encoding("ucpe", head_dim=16), extra_tokens=1),
    "raynova": lambda: two_cameras(merope.encoding("raynova", head_dim=16)),
    "urope": lambda: two_cameras(merope.encoding("urope", head_dim=16)),
    "none": lambda: two_cameras(merope.encoding("none", head_dim=20)),
    "straight drive": lambda: SMALL.plan(degenerate_cameras()["straight"], (1, 1)),
    "coincident cameras": lambda: SMALL.plan(degenerate_cameras()["coincident"], (1, 1)),
    **{
        f"foreign, {name}": FOREIGN[name]
        for name in ("translation by token", "native with one phase, split halves", "matrices of five")
    },
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN: what a kernel leaves unwritten shows."""
    new_empty, empty = Tensor.new_empty, torch.empty

    def poison(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() and x.device.type == "cpu" else x

    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))


def with_gradients(
    plan: AttentionPlan, inputs: tuple[Tensor, ...], weight: Tensor, **options: object
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = merope.attend(*leaves, plan, **options)  # type: ignore[arg-type]
    return out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype))


def assert_right(plan: AttentionPlan, heads: int, memory_budget: int) -> None:
    inputs = random_qkv(plan.batch, heads, plan.query_tokens, plan.head_dim, plan.key_tokens)
    weight = torch.randn_like(inputs[0])
    exact = with_gradients(plan, inputs, weight, backend="sdpa")
    single = tuple(x.float() for x in inputs)
    ours = with_gradients(plan, single, weight, backend="fused", memory_budget=memory_budget)
    for name, right, got in zip(("output", "q", "k", "v"), exact, ours, strict=True):
        assert got.dtype == torch.float32
        error = float((got - right).norm() / right.norm())
        assert error < 3e-6, f"{name}: {error}"


@pytest.mark.parametrize("name", PLANS)
def test_outputs_and_gradients(name: str) -> None:
    assert_right(PLANS[name](), heads=2, memory_budget=2**30)


def test_query_cameras_in_chunks() -> None:
    plan = SMALL.plan(Cameras(random_poses(2, 2), PINHOLE), (1, 1), extra_tokens=1)
    # Keys, values and their gradients: heads · tokens · carried channels · bytes.
    per_camera = 4 * (2 * plan.key_tokens * 64 * 4)
    assert_right(plan, heads=2, memory_budget=per_camera)
    with pytest.raises(ValueError, match=f"memory_budget must be at least {per_camera} bytes"):
        assert_right(plan, heads=2, memory_budget=per_camera - 1)


def test_more_heads_and_cameras_than_a_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "HEADS_PER_PROGRAM", 2)
    monkeypatch.setattr(transforms, "CAMERAS_AT_ONCE", 2)
    assert_right(SMALL.plan(Cameras(random_poses(3), PINHOLE), (1, 1)), heads=3, memory_budget=2**30)
    assert_right(two_cameras(merope.encoding("urope", head_dim=16)), heads=3, memory_budget=2**30)


def test_no_table_is_read_beyond_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads with tables of their own in programs of two: the fourth has none."""
    plan = two_cameras(merope.encoding("urope", head_dim=16))
    maps = prepared(plan, torch.float32)
    count = maps.key_tables.grouped.numel()
    twice = torch.cat((maps.key_tables.grouped, torch.zeros(count)))
    read: list[np.ndarray] = []
    load = interpreter.InterpreterBuilder.create_masked_load

    def noted(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        read.append(ptrs.data[mask.data.astype(bool)].astype(np.int64))
        return load(self, ptrs, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", noted)
    tables = replace(maps.key_tables, grouped=twice[:count])
    out = torch.empty(1, maps.groups, plan.key_tokens, 3, 16)
    transforms.expand(torch.ones(1, 3, plan.key_tokens, 16), maps.key, tables, 0, range(maps.groups), out)
    entries = (np.concatenate(read) - twice.data_ptr()) / twice.element_size()
    assert ((entries >= 0) & (entries < count)).any()
    assert not ((entries >= count) & (entries < 2 * count)).any()


def test_all_cameras_in_one_program_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SMALL.plan(Cameras(random_poses(5), PINHOLE), (1, 1))
    monkeypatch.setattr(transforms, "PROGRAMS_TO_FILL_A_GPU", 1)
    monkeypatch.setattr(transforms, "TOKENS_PER_PROGRAM", 3)
    assert_right(plan, heads=1, memory_budget=2**30)
    monkeypatch.setattr(transforms, "PROGRAMS_TO_FILL_A_GPU", 4096)
    monkeypatch.setattr(transforms, "CAMERAS_AT_ONCE", 2)
    assert_right(plan, heads=1, memory_budget=2**30)


def test_error_in_half_precision_is_within_twice_that_of_plain_attention() -> None:
    plan = SMALL.plan(Cameras(random_poses(4), PINHOLE), (1, 3))
    half = tuple(x.half() for x in random_qkv(1, 2, plan.query_tokens, 32))
    inputs = tuple(x.double() for x in half)
    weight = torch.randn_like(half[0]).double()
    exact = with_gradients(plan, inputs, weight, backend="sdpa")
    ours = with_gradients(plan, half, weight, backend="fused")
    plain_inputs = tuple(x.detach().requires_grad_() for x in inputs)
    plain_half = tuple(x.detach().requires_grad_() for x in half)
    right, rounded = scaled_dot_product_attention(*plain_inputs), scaled_dot_product_attention(*plain_half)
    plain_right = (right, *torch.autograd.grad(right, plain_inputs, weight))
    plain = (rounded, *torch.autograd.grad(rounded, plain_half, weight.half()))
    for a, b, c, d in zip(ours, exact, plain, plain_right, strict=True):
        assert (a - b).norm() / b.norm() < 2 * (c - d).norm() / d.norm()


def test_views_of_one_projection_are_read_where_they_lie() -> None:
    plan = two_cameras(SMALL)
    qkv = torch.randn(1, 4, 3, 2, 32)
    views = [x.transpose(1, 2) for x in qkv.unbind(2)]
    out = merope.attend(*views, plan, backend="fused")
    assert out.transpose(1, 2).is_contiguous()
    dense = merope.attend(*(x.contiguous() for x in views), plan, backend="fused")
    assert torch.equal(out, dense)
    backwards = [x.flip(-1).mT.contiguous().mT for x in views]  # last dimension not dense
    exact = merope.attend(*(x.double() for x in backwards), plan, backend="sdpa")
    assert (merope.attend(*backwards, plan, backend="fused") - exact).abs().max() < 1e-5


def test_compiled_once_for_all_plans() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def scaled(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        return 2 * merope.attend(1.5 * q, k, v, plan, backend="fused")

    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    inputs = [x.float().requires_grad_() for x in random_qkv(1, 1, 2, 32)]
    for seed in (0, 3):
        plan = SMALL.plan(Cameras(random_poses(2, seed=seed), PINHOLE), (1, 1))
        make_ready(inputs[0], plan)  # a graph only finds what is made of a plan
        got, expected = compiled(*inputs, plan), scaled(*inputs, plan)
        assert torch.equal(expected, got)
        pairs = zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (expected, got)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_operators_are_what_they_are_registered_as() -> None:
    plan = SMALL.plan(Cameras(random_poses(2), PINHOLE), (1, 1))
    inputs = [x.float().requires_grad_() for x in random_qkv(1, 1, 2, 32)]
    tensors, numbers = prepared(plan, torch.float32).pack()
    torch.library.opcheck(torch.ops.merope.attend_forward.default, (*inputs, tensors, numbers, 2**30))


def test_a_plan_first_used_in_inference_mode_can_train() -> None:
    plan = two_cameras(SMALL)
    q, k, v = (x.float() for x in random_qkv(1, 1, 4, 32))
    with torch.inference_mode():
        merope.attend(q, k, v, plan, backend="fused")
    q.requires_grad_()
    merope.attend(q, k, v, plan, backend="fused").sum().backward()
    assert q.grad is not None


def test_kernels_are_launched_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which need not be the tensors'."""
    entered: list[torch.device] = []

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        entered.append(x.device)
        yield
        entered.pop()

    def guarded(*arguments: object) -> Tensor:
        assert entered, "launched on whatever device is current"
        return transforms.turn(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(fused, "turn", guarded)
    q, k, v = (x.float().requires_grad_() for x in random_qkv(1, 1, 4, 32))
    merope.attend(q, k, v, two_cameras(SMALL), backend="fused").sum().backward()
