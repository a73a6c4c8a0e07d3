"""The sdpa backend keeps its extra memory under the budget, whatever the number of cameras."""

import pytest
import torch
from scenes import PINHOLE, curved_drive
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import merope
from merope import AttentionPlan, Cameras, MeRoPE

MIB = 2**20


def peak_bytes(run: object) -> int:
    """Most bytes alive at once that `run()` itself allocated, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()  # type: ignore[operator]
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert peak > 0
    del result
    return peak


def inputs(plan: AttentionPlan, heads: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, heads, plan.query_tokens, 128, dtype=dtype) for _ in range(3)]


@pytest.fixture(scope="module")
def long_clip() -> AttentionPlan:
    """64 cameras × 144 tokens with float32 tables."""
    return MeRoPE().plan(Cameras(curved_drive(64).float(), PINHOLE), (9, 16))


@pytest.mark.parametrize("budget_mib", [160, 1024])
def test_forward_of_64_cameras_stays_under_the_budget(long_clip: AttentionPlan, budget_mib: int) -> None:
    q, k, v = inputs(long_clip, 2, torch.float32)
    peak = peak_bytes(lambda: merope.attend(q, k, v, long_clip, backend="sdpa", memory_budget=budget_mib * MIB))
    assert peak - q.nbytes < budget_mib * MIB  # the output itself does not count
    assert peak > 0.6 * min(budget_mib, 1000) * MIB  # and the budget is put to use


@pytest.mark.parametrize("extra_tokens", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_forward_and_backward_stay_under_the_budget(extra_tokens: int, dtype: torch.dtype) -> None:
    plan = MeRoPE().plan(Cameras(curved_drive(16).float(), PINHOLE), (9, 16), extra_tokens=extra_tokens)
    q, k, v = (x.requires_grad_() for x in inputs(plan, 2, dtype))

    def step() -> tuple[Tensor, ...]:
        out = merope.attend(q, k, v, plan, backend="sdpa", memory_budget=96 * MIB)
        return torch.autograd.grad(out.sum(), (q, k, v))

    results = q.nbytes * 5  # output and its gradient, and the three gradients returned
    assert peak_bytes(step) - results < 96 * MIB


def test_the_result_does_not_depend_on_the_budget() -> None:
    plan = MeRoPE().plan(Cameras(curved_drive(7), PINHOLE), (3, 4), extra_tokens=1)
    q, k, v = (torch.randn(2, 3, plan.query_tokens, 128, dtype=torch.float64) for _ in range(3))
    whole = merope.attend(q, k, v, plan)
    for budget in (
        16 * MIB,
        4 * MIB,
        int(1.2 * MIB),
    ):  # a few cameras at a time; one sample at a time; one head at a time
        assert (merope.attend(q, k, v, plan, memory_budget=budget) - whole).abs().max() < 1e-12


def test_a_budget_that_cannot_be_met_is_refused() -> None:
    plan = MeRoPE().plan(Cameras(curved_drive(3), PINHOLE), (3, 4))
    q, k, v = (torch.randn(1, 1, plan.query_tokens, 128) for _ in range(3))
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes"):
        merope.attend(q, k, v, plan, memory_budget=1000)
