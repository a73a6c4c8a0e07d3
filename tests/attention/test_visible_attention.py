"""Attention where each query camera sees some key cameras, against a dense mask."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import (
    FISHEYE,
    PINHOLE,
    assert_backends_agree,
    curved_drive,
    mixed_cameras,
    random_content,
    random_poses,
    random_qkv,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import merope
from merope import AttentionPlan, Cameras, MeRoPE, Visibility
from merope.encodings.protocol import Encoding
from merope.encodings.rayrope import RayRoPE
from tests.attention.test_memory import smallest_budget
from tests.attention.test_visible_cameras import seen_cameras

SMALL: dict[str, Any] = {
    "partition": (6, 6, 12, 8),
    "fractions": (0.3, 1.0),
    "native_split": (4, 2, 2),
}
ENCODINGS: dict[str, Encoding] = {
    "merope": MeRoPE(32, **SMALL),
    "merope, logits": MeRoPE(32, **SMALL, transform_values=False),
    "positions": MeRoPE(32, **SMALL, disparity=False, rotation=False, translation=False),
    "ucpe": merope.encoding("ucpe", head_dim=32),
    "cape": merope.encoding("cape", head_dim=32),
    "urope": merope.encoding("urope", head_dim=32),
    "rayrope": RayRoPE(28),
    "none": merope.encoding("none", head_dim=32),
}


def plan_of(sees: object, **options: object) -> Callable[[], object]:
    return lambda: MeRoPE().plan(Cameras(random_poses(3), PINHOLE), (1, 2), sees=sees, **options)  # type: ignore[arg-type]


PLAN_CASES: dict[str, tuple[Callable[[], object], str]] = {
    "kind": (plan_of("causal"), "sees must be a merope.Visibility, got str"),
    "query cameras": (plan_of(Visibility.block_causal(6)), "sees.*3 query cameras, got 6"),
    "key cameras": (plan_of(Visibility.block_causal(3, cached=2)), "sees.*3 key cameras, got a stop at 5.*cache"),
    "extra tokens": (
        plan_of(Visibility.block_causal(3), key=Cameras(random_poses(3), PINHOLE), extra_tokens=2),
        "extra_tokens must be 0.*extra tokens only.*got 2",
    ),
}


@pytest.mark.parametrize("name", PLAN_CASES)
def test_plans_refuse_what_does_not_fit_them(name: str) -> None:
    make, message = PLAN_CASES[name]
    with pytest.raises(ValueError, match=f"(?s){message}") as refused:
        make()
    assert re.search(r" must be .+, got .+; .+", str(refused.value))


@st.composite
def visibilities(draw: st.DrawFn, query_cameras: int, key_cameras: int) -> Visibility:
    """Intervals at random; neighbours may see the same."""
    rows: list[tuple[tuple[int, int], ...]] = []
    for _ in range(query_cameras):
        bounds = sorted(draw(st.lists(st.integers(0, key_cameras), min_size=4, max_size=4)))
        first, second = (bounds[0], bounds[1]), (bounds[2], bounds[3])
        seen = (first, second) if bounds[0] < bounds[1] or bounds[2] < bounds[3] else ((0, key_cameras),)
        rows.append(rows[-1] if rows and draw(st.booleans()) else seen)
    return Visibility(tuple(rows))


def dense_mask(sees: Visibility, plan: AttentionPlan, key_cameras: int, keys_per_camera: int) -> Tensor:
    """bool [query tokens, key tokens], built from the intervals alone."""
    mask = torch.zeros(plan.query_tokens, plan.key_tokens, dtype=torch.bool)
    after = plan.query_cameras * plan.tokens_per_camera
    for query, seen in enumerate(seen_cameras(sees, key_cameras)):
        for key in seen:
            rows = slice(query * plan.tokens_per_camera, (query + 1) * plan.tokens_per_camera)
            mask[rows, key * keys_per_camera : (key + 1) * keys_per_camera] = True
    mask[:, key_cameras * keys_per_camera :] = True
    mask[after:, : key_cameras * keys_per_camera] = False
    return mask


def masked_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, mask: Tensor) -> Tensor:
    """Every U written out, −∞ where a query does not see a key."""
    plan = plan.for_heads(q.shape[1])
    out = torch.empty_like(q)
    for b, h, a in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        u = plan.operators(a, b, h)
        logits = (u @ k[b, h, :, :, None]).squeeze(-1) @ q[b, h, a] / math.sqrt(q.shape[-1])
        weights = logits.masked_fill(~mask[a], -math.inf).softmax(-1)
        out[b, h, a] = weights @ ((u @ v[b, h, :, :, None]).squeeze(-1) if plan.transform_values else v[b, h])
    return out


def drawn_plan(data: st.DataObject, encoding: Encoding, queries: int, keys: int) -> tuple[AttentionPlan, Tensor]:
    """A cross-attention plan with a random visibility, and the mask that it means."""
    sees = data.draw(visibilities(queries, keys))
    extra = data.draw(st.integers(0, 2))
    query, key = Cameras(random_poses(queries), PINHOLE), Cameras(random_poses(keys, seed=7), PINHOLE)
    read: dict[str, Tensor] = {}
    if encoding.content_channels:
        read["content"] = random_content(1, 2 * queries + extra)
        read["key_content"] = random_content(1, 2 * keys + 2 * extra, seed=1)
    tokens = {"key_grid": (2, 1), "extra_tokens": extra, "key_extra_tokens": 2 * extra}
    plan = encoding.plan(query, (1, 2), key=key, **tokens, **read, sees=sees)  # type: ignore[arg-type]
    return plan, dense_mask(sees, plan, keys, 2)


@pytest.mark.parametrize("name", ENCODINGS)
@given(data=st.data(), queries=st.integers(1, 4), keys=st.integers(1, 5))
def test_every_backend_is_masked_attention(name: str, data: st.DataObject, queries: int, keys: int) -> None:
    plan, mask = drawn_plan(data, ENCODINGS[name], queries, keys)
    q, k, v = random_qkv(1, 2, plan.query_tokens, plan.head_dim, plan.key_tokens)
    exact = masked_attention(q, k, v, plan, mask)
    for backend in ("reference", "sdpa", "auto"):
        assert (merope.attend(q, k, v, plan, backend=backend) - exact).abs().max() < 1e-11


@pytest.mark.parametrize("name", ENCODINGS)
@given(data=st.data())
def test_gradients_are_those_of_the_reference(name: str, data: st.DataObject) -> None:
    """Keys that nobody sees get exactly none."""
    plan, mask = drawn_plan(data, ENCODINGS[name], 3, 3)
    inputs = [x.requires_grad_() for x in random_qkv(1, 2, plan.query_tokens, plan.head_dim, plan.key_tokens)]
    weights = torch.randn_like(inputs[0])
    gradients = [
        torch.autograd.grad((merope.attend(*inputs, plan, backend=backend) * weights).sum(), inputs)
        for backend in ("reference", "sdpa")
    ]
    for exact, ours in zip(*gradients, strict=True):
        assert (ours - exact).abs().max() < 1e-11
    for of_keys in gradients[1][1:]:
        assert (of_keys[:, :, ~mask.any(0)] == 0).all()


def test_gradients_of_tables_are_those_of_the_reference() -> None:
    content = torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True)
    sees = Visibility.teacher_forcing(3, 1)
    cameras = Cameras(random_poses(3).repeat(2, 1, 1), PINHOLE)
    plan = RayRoPE(28).plan(cameras, (1, 1), content=content, sees=sees)
    q, k, v = random_qkv(1, 2, 6, 28)
    exact, ours = (
        torch.autograd.grad(merope.attend(q, k, v, plan, backend=backend).square().sum(), content, retain_graph=True)
        for backend in ("reference", "sdpa")
    )
    assert (ours[0] - exact[0]).abs().max() < 1e-11
    assert (exact[0] != 0).any()


@pytest.mark.parametrize("name", ["merope", "ucpe", "positions"])
@pytest.mark.parametrize("batch", [False, True])
def test_cameras_without_a_pose_see_and_are_seen_like_others(name: str, batch: bool) -> None:
    plan = ENCODINGS[name].plan(mixed_cameras(batch), (3, 4), extra_tokens=2, sees=Visibility.block_causal(3, 1))
    assert_backends_agree(plan, batch=2)
    assert plan.seen_by(1 * 12).tolist() == [True] * 24 + [False] * 12 + [True] * 2
    assert plan.seen_by(3 * 12).tolist() == [False] * 36 + [True] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_within_twice_that_of_plain_masked_attention(dtype: torch.dtype) -> None:
    sees = Visibility.teacher_forcing(6)
    plan = MeRoPE().plan(Cameras(curved_drive(6).repeat(2, 1, 1), PINHOLE), (3, 5), sees=sees)
    mask = dense_mask(sees, plan, 12, 15)
    q, k, v = (x.to(dtype).double() for x in random_qkv(1, 2, plan.query_tokens, 128))
    rounded = [x.to(dtype) for x in (q, k, v)]

    def error(ours: Tensor, exact: Tensor) -> float:
        assert ours.dtype == dtype
        return float((ours.double() - exact).norm() / exact.norm())

    plain = error(
        scaled_dot_product_attention(*rounded, attn_mask=mask), scaled_dot_product_attention(q, k, v, attn_mask=mask)
    )
    assert error(merope.attend(*rounded, plan), merope.attend(q, k, v, plan)) < 2 * plain


@pytest.mark.parametrize("name", ["merope", "urope", "ucpe"])
def test_the_result_does_not_depend_on_the_budget(name: str) -> None:
    """A few cameras, one sample, one head at a time, with gradients; clips differ, and some cameras have no pose."""
    has_pose = torch.tensor([[True] * 6, [True, False] * 3])
    cameras = Cameras(random_poses(2, 6), PINHOLE, has_pose)
    plan = ENCODINGS[name].plan(cameras, (2, 3), sees=Visibility.block_causal(6, last=4, sink=1))
    inputs = [x.requires_grad_() for x in random_qkv(2, 4, plan.query_tokens, 32)]
    smallest = smallest_budget(*inputs, plan)
    outputs = [merope.attend(*inputs, plan, memory_budget=budget) for budget in (2**30, 3 * smallest, smallest)]
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in outputs]
    for out, of_inputs in zip(outputs[1:], gradients[1:], strict=True):
        assert (out - outputs[0]).abs().max() < 1e-12 * outputs[0].abs().max()  # UCPE's grow with the metres
        for gradient, expected in zip(of_inputs, gradients[0], strict=True):
            assert (gradient - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize("name", ["merope", "ucpe", "none"])
def test_a_stream_over_a_cache_is_the_whole_clip(name: str) -> None:
    """Blocks of 2 with a window of 4 and a sink of 1: the cache holds what is seen, or everything so far."""
    encoding, cameras = ENCODINGS[name], Cameras(curved_drive(8), FISHEYE)
    sees = Visibility.block_causal(8, 2, last=4, sink=1)
    q, k, v = random_qkv(1, 2, 8 * 6, 32)
    whole = merope.attend(q, k, v, encoding.plan(cameras, (2, 3), sees=sees))
    by_camera = [x.unflatten(2, (8, 6)) for x in (q, k, v, whole)]
    for start in range(0, 8, 2):
        stop = start + 2
        block = Visibility.block_causal(2, 2, last=4, sink=1, cached=start)
        kept = [i for i in range(stop) if i < 1 or i >= stop - 4]
        for held, visible in ((list(range(stop)), block), (kept, None)):
            plan = encoding.plan(
                *(cameras.at(slice(start, stop)), (2, 3)),
                key=Cameras(cameras.world_from_camera[held], FISHEYE),
                times=list(range(start, stop)),
                key_times=held,
                sees=visible,
            )
            queries, out = (by_camera[i][:, :, start:stop].flatten(2, 3) for i in (0, 3))
            keys, values = (x[:, :, held].flatten(2, 3) for x in by_camera[1:3])
            assert (merope.attend(queries, keys, values, plan) - out).abs().max() < 1e-11


def test_the_share_of_a_rank_is_the_rows_of_its_cameras() -> None:
    cameras, sees = Cameras(curved_drive(6), PINHOLE), Visibility.block_causal(6, 2)
    q, k, v = random_qkv(1, 2, 6 * 2, 32)
    whole = merope.attend(q, k, v, ENCODINGS["merope"].plan(cameras, (1, 2), sees=sees))
    own = slice(3, 6)
    times = {"times": list(range(3, 6)), "key": cameras}
    share = ENCODINGS["merope"].plan(cameras.at(own), (1, 2), **times, sees=Visibility(sees.intervals[own]))
    assert (merope.attend(q[:, :, 6:], k, v, share) - whole[:, :, 6:]).abs().max() < 1e-12


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_what_is_not_seen_may_be_anything(backend: Any) -> None:
    plan = MeRoPE().plan(Cameras(curved_drive(4), PINHOLE), (1, 2), sees=Visibility.block_causal(4, 2))
    q, k, v = random_qkv(1, 1, 8, 128)
    before = merope.attend(q, k, v, plan, backend=backend)[:, :, :4]
    k[:, :, 4:], v[:, :, 4:] = math.nan, math.inf
    torch.testing.assert_close(merope.attend(q, k, v, plan, backend=backend)[:, :, :4], before)


def test_the_operators_do_not_depend_on_what_is_seen() -> None:
    cameras, sees = Cameras(curved_drive(4), PINHOLE), Visibility.block_causal(4, 2)
    plain, seeing = MeRoPE().plan(cameras, (1, 2)), MeRoPE().plan(cameras, (1, 2), sees=sees)
    assert torch.equal(plain.operators(0), seeing.operators(0))
    assert seeing.to(dtype=torch.float32).runs == seeing.runs != plain.runs
    assert "sees 4 to 8 key tokens" in str(seeing)
    assert "sees" not in str(plain)


def test_a_plan_of_which_everything_is_seen_is_a_plan_without_visibility() -> None:
    cameras = Cameras(curved_drive(4), PINHOLE)
    block = Visibility.block_causal(2, 2, last=3, sink=1, cached=2)
    plan = MeRoPE().plan(cameras.at(slice(2, 4)), (1, 2), key=cameras, sees=block, key_extra_tokens=1)
    assert plan.visible_keys is None
    other = MeRoPE().plan(cameras, (1, 2), extra_tokens=1, sees=Visibility.block_causal(4, 4))
    assert other.visible_keys is not None, "extra tokens see extra tokens only"


@pytest.mark.parametrize("name", ["merope", "ucpe"])
def test_one_graph_of_torch_compile(name: str) -> None:
    torch._dynamo.reset()  # what was compiled before would have it trace symbols instead of sizes
    compiled = torch.compile(merope.attend, backend="eager", fullgraph=True)
    for sees in (None, Visibility.block_causal(4, 1, last=2, sink=1)):
        plan = ENCODINGS[name].plan(Cameras(curved_drive(4), PINHOLE), (1, 2), sees=sees)
        q, k, v = random_qkv(1, 2, 8, 32)
        torch.testing.assert_close(compiled(q, k, v, plan), merope.attend(q, k, v, plan))


class CountedPairs(TorchDispatchMode):
    """Counts pairs of query and key tokens that PyTorch's attention works on."""

    pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in func.name() and "backward" not in func.name():
            self.pairs += math.prod(args[0].shape[:-1]) * args[1].shape[-2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["merope", "ucpe", "none"])
def test_work_is_that_of_the_pairs_that_are_seen(name: str) -> None:
    for sees in (Visibility.block_causal(8, 2), Visibility.teacher_forcing(4, 2), Visibility.block_causal(8, last=3)):
        plan = ENCODINGS[name].plan(Cameras(curved_drive(8), PINHOLE), (2, 3), sees=sees)
        with CountedPairs() as counted:
            merope.attend(*random_qkv(1, 2, 48, 32), plan)
        assert counted.pairs == 2 * int(dense_mask(sees, plan, 8, 6).sum())
