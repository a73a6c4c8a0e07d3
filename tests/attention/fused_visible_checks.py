"""Run by test_interpreted_kernels.py: the fused backend where each query camera sees some key cameras."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fused_kernel_checks import DIRECTIONS, LOGITS, SMALL, _poisoned, assert_right  # noqa: F401  # for every test
from fused_learning_checks import RAYS, assert_learns, learning
from scenes import FISHEYE, PINHOLE, mixed_cameras, random_content, random_poses, random_qkv

import merope
from merope import AttentionPlan, Cameras, Visibility
from merope.attention.fused import make_ready
from merope.attention.kernels import grouped, interval_calls, merged_parts
from merope.attention.kernels.prepared import PreparedPlan, prepared
from merope.encodings.protocol import Encoding
from tests.attention.far_apart_intervals import errors_far_apart, rotary
from tests.gpu.errors import assert_accurate, errors_of

CAUSAL = Visibility.block_causal(3, 2)
WINDOW = Visibility.block_causal(3, 1, last=1, sink=1)
SINK = Visibility.block_causal(5, 1, last=1, sink=1)
UCPE = merope.encoding("ucpe", head_dim=16)


def seeing(encoding: Encoding, sees: Visibility, **options: object) -> AttentionPlan:
    cameras = Cameras(random_poses(len(sees.intervals)), PINHOLE)
    return encoding.plan(cameras, (1, 1), sees=sees, **options)  # type: ignore[arg-type]


def of_a_block(encoding: Encoding, clips: int) -> AttentionPlan:
    """Two cameras of a stream, which see some of the three that are kept, and themselves."""
    key = Cameras(random_poses(clips, 5, seed=4), FISHEYE)
    sees = Visibility.block_causal(2, 1, last=2, sink=1, cached=3)
    return encoding.plan(Cameras(random_poses(clips, 2), PINHOLE), (1, 2), key=key, key_grid=(1, 1), sees=sees)


def with_some_poses() -> AttentionPlan:
    cameras = mixed_cameras(batch=False)
    return SMALL.plan(cameras, (1, 1), extra_tokens=1, sees=Visibility.block_causal(cameras.count, 1))


PLANS: dict[str, Callable[[], AttentionPlan]] = {
    "window and sink, extra tokens": lambda: seeing(SMALL, WINDOW, extra_tokens=1),
    "clean and noisy": lambda: seeing(DIRECTIONS, Visibility.teacher_forcing(2, 1)),
    "keys that nobody sees": lambda: seeing(LOGITS, Visibility([[(0, 1)], [(2, 3)], [(0, 1), (2, 3)]])),
    "keys that nobody sees, all cameras alike": lambda: seeing(SMALL, Visibility([[(0, 2)]] * 3)),
    "tokens without a camera": with_some_poses,
    "ucpe, causal, extra tokens": lambda: seeing(UCPE, CAUSAL, extra_tokens=1),
    "ucpe, three intervals": lambda: seeing(UCPE, Visibility.teacher_forcing(3, 1), extra_tokens=2),
    "rotary, keys that nobody sees": lambda: rotary(
        Visibility([[(0, 2)], [(3, 4)], [(0, 2), (3, 4)], [(0, 2)], [(3, 4)]])
    ),
    "ucpe, three runs see one sink": lambda: seeing(UCPE, SINK),
    "rotary, a short last block": lambda: rotary(Visibility.teacher_forcing(5, 2), batch=2),
    "rotary, given frames": lambda: rotary(Visibility.teacher_forcing(5, 2, given=2)),
    "ucpe, a block and its past": lambda: of_a_block(UCPE, clips=1),
    "none": lambda: seeing(merope.encoding("none", head_dim=20), WINDOW, extra_tokens=1),
}


@pytest.mark.parametrize("name", PLANS)
def test_outputs_and_gradients(name: str) -> None:
    plan = PLANS[name]()
    assert plan.visible_keys is not None
    assert_right(plan, heads=1, memory_budget=2**30)


def test_one_query_camera_at_a_time() -> None:
    plan = of_a_block(SMALL, clips=2)
    width = prepared(plan, torch.float32).width
    assert_right(plan, heads=1, memory_budget=4 * (plan.key_tokens * width * 4))


@pytest.mark.parametrize(
    "name", ["rotary, a short last block", "ucpe, three intervals", "rotary, keys that nobody sees"]
)
def test_gradients_of_a_few_calls_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval_calls, "MOST_HELD", 0)
    monkeypatch.setattr(interval_calls, "HELD_BESIDE_SUMS", 1)
    plan = PLANS[name]()
    calls = interval_calls.interval_calls(plan.runs)
    assert 1 < len(list(interval_calls.held_together(calls, plan.key_tokens))) < len(calls)
    assert_right(plan, heads=2, memory_budget=2**30)


def test_one_sample_at_a_time() -> None:
    """The least budget: keys turned, and the gradients of keys and values of every call."""
    plan = rotary(Visibility.teacher_forcing(3, 1), batch=2)
    seen = interval_calls.keys_of(interval_calls.interval_calls(plan.runs))
    least = 2 * 16 * 4 * (plan.key_tokens + 2 * seen)
    assert_right(plan, heads=2, memory_budget=least)
    with pytest.raises(ValueError, match=f"memory_budget must be at least {least} bytes"):
        assert_right(plan, heads=2, memory_budget=least - 1)


@pytest.mark.parametrize("name", ["two copies", "given frames", "sink", "extra tokens"])
def test_error_in_half_precision_is_within_twice_that_of_plain_attention(name: str) -> None:
    plan = {
        "two copies": lambda: rotary(Visibility.teacher_forcing(5, 2), (2, 3)),
        "given frames": lambda: rotary(Visibility.teacher_forcing(5, 2, given=2), (2, 3)),
        "sink": lambda: rotary(SINK, (2, 3)),
        "extra tokens": lambda: seeing(UCPE, Visibility.teacher_forcing(4, 2), extra_tokens=2),
    }[name]()
    assert_accurate(errors_of(plan, torch.float16))


@pytest.mark.parametrize("second_is_higher", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_of_one_interval_are_far_above_those_of_the_other(dtype: torch.dtype, second_is_higher: bool) -> None:
    both = errors_far_apart(rotary(Visibility.teacher_forcing(4, 2), (1, 3)), dtype, second_is_higher)
    for ours, plain in zip(*both, strict=True):
        assert ours <= 2 * plain


@pytest.mark.parametrize("start", [0, 1])
def test_values_that_are_not_turned_are_read_where_they_lie(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they lie at odd places."""
    plan, expanded, expand = PLANS["rotary, given frames"](), [], grouped.expand

    def noted(x, *rest, out):  # type: ignore[no-untyped-def]
        expanded.append(x)
        expand(x, *rest, out=out)

    monkeypatch.setattr(grouped, "expand", noted)
    q, k, v = (x.float() for x in random_qkv(1, 2, plan.query_tokens, 16, plan.key_tokens))
    held = torch.zeros(v.numel() + start)[start:].view_as(v).copy_(v)
    out = merope.attend(q, k, held, plan, backend="fused")
    assert len(expanded) == 1 + start
    exact = merope.attend(*(x.double() for x in (q, k, v)), plan, backend="sdpa")
    assert (out - exact).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["window and sink, extra tokens", "ucpe, causal, extra tokens"])
def test_only_seen_pairs_are_attended_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only seen keys are expanded, where they differ between cameras."""
    plan, pairs, expanded = PLANS[name](), [], []
    attend, expand = grouped.attention_forward, grouped.expand

    def counted(q, k, v, scale):  # type: ignore[no-untyped-def]
        pairs.append(q.shape[0] * q.shape[2] * k.shape[2])
        return attend(q, k, v, scale)

    def noted(*arguments, out):  # type: ignore[no-untyped-def]
        expanded.append(out.shape[1] * out.shape[2])
        expand(*arguments, out=out)

    for module in (grouped, merged_parts):
        monkeypatch.setattr(module, "attention_forward", counted)
    monkeypatch.setattr(grouped, "expand", noted)
    merope.attend(*(x.float() for x in random_qkv(1, 1, plan.query_tokens, plan.head_dim)), plan, backend="fused")
    seen = [int(plan.seen_by(token).sum()) for token in range(plan.query_tokens)]
    cameraless = plan.cameraless_queries.tolist()
    with_camera = seen if plan.groups == 1 else [n for token, n in enumerate(seen) if token not in cameraless]
    assert sum(pairs) == sum(with_camera) + sum(seen[token] for token in cameraless)
    each = seen[: plan.query_cameras * plan.tokens_per_camera : plan.tokens_per_camera]
    shared = (1 + (plan.groups == 1)) * plan.key_tokens  # of the cameraless queries, and of all
    assert sum(expanded) == 2 * (shared + (sum(each) if plan.groups > 1 else 0))


def test_gradients_of_tables() -> None:
    cameras, content = Cameras(random_poses(1, 3), PINHOLE), random_content(1, 3)
    assert_learns(lambda: learning(RAYS.plan(cameras, (1, 1), content=content, sees=WINDOW), "query", "key"))


def test_what_is_seen_survives_packing() -> None:
    maps = prepared(PLANS["window and sink, extra tokens"](), torch.float32)
    again = PreparedPlan.unpack(*maps.pack())
    assert [(run.cameras, run.queries, run.keys) for run in again.runs] == [
        (run.cameras, run.queries, run.keys) for run in maps.runs
    ]


@pytest.mark.parametrize("make", [lambda: seeing(UCPE, CAUSAL), lambda: rotary(CAUSAL)], ids=["ucpe", "rotary"])
def test_the_operators_lay_their_results_as_they_are_registered(make: Callable[[], AttentionPlan]) -> None:
    """Keys that all cameras share are attended to in parts: what is merged must lie as what is not."""
    plan = make()
    inputs = [x.float().requires_grad_() for x in random_qkv(1, 2, 3, 16)]
    tensors, numbers = prepared(plan, torch.float32).pack()
    torch.library.opcheck(torch.ops.merope.attend_forward.default, (*inputs, tensors, numbers, 2**30))


def test_one_graph_of_torch_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(merope.attend, backend="aot_eager", fullgraph=True)
    plan = rotary(Visibility.teacher_forcing(3, 1))
    inputs = [x.float().requires_grad_() for x in random_qkv(1, 2, plan.query_tokens, 16, plan.key_tokens)]
    make_ready(inputs[0], plan)  # a graph only finds what is made of a plan
    both = [attend(*inputs, plan, backend="fused") for attend in (compiled, merope.attend)]
    for got, expected in zip(*(torch.autograd.grad(x.sum(), inputs) for x in both), strict=True):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*both)
