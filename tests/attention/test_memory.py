"""The sdpa backend keeps its extra memory under the budget, whatever the number of cameras."""

import re

import pytest
import torch
from scenes import PINHOLE, curved_drive, random_poses
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import merope
from merope import AttentionPlan, Cameras, MeRoPE, Visibility
from merope.encodings.protocol import Encoding
from merope.encodings.urope import URoPE

MIB = 2**20
measures_memory = pytest.mark.usual_sums("terms in another order are copies, which count as memory")


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


def smallest_budget(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> int:
    """Bytes that one head of one sample needs."""
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes") as refusal:
        merope.attend(q, k, v, plan, backend="sdpa", memory_budget=1)
    return int(re.findall(r"\d+", str(refusal.value))[0])


@pytest.fixture(scope="module")
def long_clip() -> AttentionPlan:
    """64 cameras × 24 tokens with float32 tables."""
    return MeRoPE().plan(Cameras(curved_drive(64).float(), PINHOLE), (3, 8))


@measures_memory
@pytest.mark.parametrize("budget_mib", [27, 171])
def test_forward_of_64_cameras_stays_under_the_budget(long_clip: AttentionPlan, budget_mib: int) -> None:
    q, k, v = inputs(long_clip, 2, torch.float32)
    peak = peak_bytes(lambda: merope.attend(q, k, v, long_clip, backend="sdpa", memory_budget=budget_mib * MIB))
    assert peak - q.nbytes < budget_mib * MIB  # the output itself does not count
    assert peak > 0.6 * min(budget_mib, 167) * MIB  # and the budget is put to use


@measures_memory
@pytest.mark.parametrize("extra_tokens", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_forward_and_backward_stay_under_the_budget(extra_tokens: int, dtype: torch.dtype) -> None:
    plan = MeRoPE().plan(Cameras(curved_drive(16).float(), PINHOLE), (3, 8), extra_tokens=extra_tokens)
    q, k, v = (x.requires_grad_() for x in inputs(plan, 2, dtype))

    def step() -> tuple[Tensor, ...]:
        out = merope.attend(q, k, v, plan, backend="sdpa", memory_budget=16 * MIB)
        return torch.autograd.grad(out.sum(), (q, k, v))

    results = q.nbytes * 5  # output and its gradient, and the three gradients returned
    assert peak_bytes(step) - results < 16 * MIB


def training_peak(plan: AttentionPlan, batch: int, budget_mib: int, wanted: str) -> int:
    """Peak bytes of a training step beyond its results, where only the `wanted` of q, k and v need gradients."""
    named = {name: torch.randn(batch, 2, plan.query_tokens, 128) for name in "qkv"}
    leaves = [named[name].requires_grad_() for name in wanted]

    def step() -> tuple[Tensor, ...]:
        out = merope.attend(*named.values(), plan, backend="sdpa", memory_budget=budget_mib * MIB)
        return torch.autograd.grad(out.sum(), leaves)

    return peak_bytes(step) - named["q"].nbytes * (2 + len(leaves))


@measures_memory
@pytest.mark.parametrize("extra_tokens", [0, 5])
@pytest.mark.parametrize("name", ["merope", "ucpe", "cape"])
def test_budget_holds_where_every_camera_sees_other_keys(name: str, extra_tokens: int) -> None:
    """What the backward pass needs of the keys of each camera does not add up."""
    sees = Visibility.block_causal(24, 1, last=20, sink=2)
    cameras = Cameras(curved_drive(24).float(), PINHOLE)
    plan = merope.encoding(name, head_dim=128).plan(cameras, (3, 8), extra_tokens=extra_tokens, sees=sees)
    q, k, v = (x.requires_grad_() for x in inputs(plan, 2, torch.float32))
    smallest = smallest_budget(q[:, :1], k[:, :1], v[:, :1], plan)

    def step() -> tuple[Tensor, ...]:
        out = merope.attend(q, k, v, plan, backend="sdpa", memory_budget=2 * smallest)
        return torch.autograd.grad(out.sum(), (q, k, v))

    assert peak_bytes(step) - q.nbytes * 5 < 2 * smallest


@measures_memory
def test_budget_holds_when_only_values_need_gradients() -> None:
    plan = MeRoPE().plan(Cameras(curved_drive(16).float(), PINHOLE), (3, 8))
    assert training_peak(plan, batch=1, budget_mib=16, wanted="v") < 16 * MIB


@measures_memory
def test_budget_holds_in_training_when_the_batch_is_split() -> None:
    plan = MeRoPE().plan(Cameras(curved_drive(6).float(), PINHOLE), (3, 6))
    output_bytes = 32 * 2 * plan.query_tokens * 128 * 4  # once more, to put the parts together
    assert training_peak(plan, batch=32, budget_mib=4, wanted="qkv") - output_bytes < 4 * MIB


@measures_memory
def test_budget_holds_for_logits_only_with_tokens_without_a_camera() -> None:
    plan = MeRoPE(transform_values=False).plan(Cameras(curved_drive(16).float(), PINHOLE), (3, 8), extra_tokens=3)
    q, k, v = inputs(plan, 2, torch.float32)
    peak = peak_bytes(lambda: merope.attend(q, k, v, plan, backend="sdpa", memory_budget=16 * MIB))
    assert peak - q.nbytes < 16 * MIB


@measures_memory
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("heads", [3, 7, 16])
@pytest.mark.parametrize("budget_mib", [2, 8])
def test_budget_holds_where_tables_are_laid_out_by_head(heads: int, budget_mib: int, training: bool) -> None:
    """URoPE's four groups of heads do not divide these: every head gets a table of its own."""
    plan = URoPE(32).plan(Cameras(curved_drive(12).float(), PINHOLE), (3, 12))
    q, k, v = (torch.randn(1, heads, plan.query_tokens, 32, requires_grad=training) for _ in range(3))

    def step() -> tuple[Tensor, ...]:
        out = merope.attend(q, k, v, plan, backend="sdpa", memory_budget=budget_mib * MIB)
        return torch.autograd.grad(out.sum(), (q, k, v)) if training else (out,)

    # What is not counted: the output, again where parts are put together, its gradient, and the gradients returned.
    assert peak_bytes(step) - q.nbytes * (6 if training else 2) < budget_mib * MIB


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


@pytest.mark.parametrize("encoding", [MeRoPE(), URoPE(32)], ids=["merope", "urope"])
def test_samples_and_heads_that_are_taken_apart_keep_their_own_operators(encoding: Encoding) -> None:
    """Clips of different cameras, some without a pose; URoPE's heads differ too."""
    has_pose = torch.tensor([[True, True, True], [True, False, True], [False, True, True]])
    plan = encoding.plan(Cameras(random_poses(3, 3), PINHOLE, has_pose), (2, 3))
    q, k, v = (torch.randn(3, 4, plan.query_tokens, encoding.head_dim, dtype=torch.float64) for _ in range(3))
    whole, apart = (
        merope.attend(q, k, v, plan, backend="sdpa", memory_budget=budget)
        for budget in (1024 * MIB, smallest_budget(q, k, v, plan))
    )
    assert (apart - whole).abs().max() < 1e-12


def test_a_budget_that_cannot_be_met_is_refused() -> None:
    plan = MeRoPE().plan(Cameras(curved_drive(3), PINHOLE), (3, 4))
    q, k, v = (torch.randn(1, 1, plan.query_tokens, 128) for _ in range(3))
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes"):
        merope.attend(q, k, v, plan, memory_budget=1000)
