"""Attention where each query camera sees a part of the keys: outputs and gradients against float64."""

import pytest
import torch

import merope
from merope.attention import fused
from merope.attention.kernels.softmax_attention import kernel_for
from merope.attention.visible_cameras import Visibility
from merope.encodings.merope import MeRoPE
from tests.attention.far_apart_intervals import errors_far_apart, rotary
from tests.gpu.errors import (
    DEVICE,
    HALF,
    assert_accurate,
    driving_cameras,
    errors_of,
    random_inputs,
    relative_errors,
    results,
    under,
    visible_cases,
)

pytestmark = pytest.mark.usefixtures("_poisoned")


def test_what_is_not_seen_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "hopper_for", lambda q, plan: None)
    leaves_no_trace(HALF)


def leaves_no_trace(dtype: torch.dtype) -> None:
    """Other keys and values of the cameras to come change nothing, and get no gradient from the cameras before."""
    tokens = 35
    plan = MeRoPE().plan(driving_cameras(1, 4), (5, 7), sees=Visibility.block_causal(4, 2))
    q, k, v, gradient = random_inputs(plan, dtype)
    gradient[:, :, 2 * tokens :] = 0
    usual = results(under(plan, "fused"), (q, k, v), gradient)
    k[:, :, 2 * tokens :], v[:, :, 2 * tokens :] = 100, 1000
    other = results(under(plan, "fused"), (q, k, v), gradient)
    assert torch.equal(usual[0][:, :, : 2 * tokens], other[0][:, :, : 2 * tokens])
    for of_keys in (*usual[2:], *other[2:]):
        assert float(of_keys[:, :, 2 * tokens :].abs().max()) == 0
    torch.testing.assert_close(usual[2], other[2], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["merope", "gta", "ucpe", "urope", "none"])
def test_encodings_with_keys_expanded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fused, "hopper_for", lambda q, plan: None)
    for case, (plan, factor) in visible_cases(name).items():
        assert_accurate(errors_of(plan, HALF, factor))
        if case == "window":
            assert_accurate(errors_of(plan, torch.float32))


@pytest.mark.parametrize("name", ["merope", "ucpe"])
def test_extra_tokens_and_few_cameras_at_a_time(name: str) -> None:
    sees = Visibility.block_causal(5, 1, last=2, sink=1)
    plan = merope.encoding(name).plan(driving_cameras(2, 5), (3, 4), extra_tokens=3, sees=sees)
    assert_accurate(errors_of(plan, HALF, memory_budget=2**20))


WAN = (44, 42, 42)
"""Channels of Wan's rotary embedding for time, rows and columns."""
SHARED_KEYS = {
    "clean and noisy": Visibility.teacher_forcing(12, 3),
    "a short last block": Visibility.teacher_forcing(7, 3),
    "given frames": Visibility.teacher_forcing(9, 3, given=3),
    "window and a sink that blocks share": Visibility.block_causal(15, 3, last=6, sink=3),
    "many blocks": Visibility.teacher_forcing(20, 1),  # more gradients than are held at once
    "keys that nobody sees": Visibility([[(0, 2)], [(3, 4)], [(0, 2), (3, 4)], [(0, 2)], [(3, 4)]]),
}


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SHARED_KEYS)
def test_intervals_of_shared_keys_are_merged(name: str, dtype: torch.dtype) -> None:
    """Wan's own causal attention: cuDNN's backward pass with the merged log-sum-exp, and memory-efficient attention."""
    plan = rotary(SHARED_KEYS[name], (4, 9), batch=3, widths=WAN)
    if DEVICE.type == "cuda":
        expected = "efficient" if dtype == torch.float32 else "cudnn"
        assert kernel_for(torch.empty(0, 128, dtype=dtype, device=DEVICE), keys=2) == expected
    assert_accurate(errors_of(plan, dtype, heads=3))


@pytest.mark.parametrize("name", ["clean and noisy", "many blocks"])
def test_intervals_of_shared_keys_in_flash_attention(name: str) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert_accurate(errors_of(rotary(SHARED_KEYS[name], (3, 5), widths=WAN), HALF))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("factor", [0.01, 30.0])
def test_flat_and_peaked_attention_to_shared_keys(factor: float) -> None:
    assert_accurate(errors_of(rotary(SHARED_KEYS["clean and noisy"], (9, 16), widths=WAN), HALF, factor))


@pytest.mark.parametrize("second_is_higher", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
def test_scores_of_one_interval_are_far_above_those_of_the_other(dtype: torch.dtype, second_is_higher: bool) -> None:
    plan = rotary(Visibility.teacher_forcing(6, 2), (5, 9), widths=WAN)
    for ours, plain in zip(*errors_far_apart(plan, dtype, second_is_higher), strict=True):
        assert ours <= 2 * plain


def test_values_of_one_projection_are_read_where_they_lie() -> None:
    plan = rotary(SHARED_KEYS["clean and noisy"], (4, 9), widths=WAN)
    packed = torch.randn(2, plan.key_tokens, 3, 2, 128, device=DEVICE, dtype=HALF)
    views = [x.transpose(1, 2) for x in packed.unbind(2)]
    gradient = torch.randn_like(views[0])
    dense = results(under(plan, "fused"), views, gradient)  # which copies its inputs
    leaf = packed.clone().requires_grad_()
    out = under(plan, "fused")(*(x.transpose(1, 2) for x in leaf.unbind(2)))
    (of_packed,) = torch.autograd.grad(out, leaf, gradient)
    got = [out, *(x.transpose(1, 2) for x in of_packed.unbind(2))]
    assert max(relative_errors(got, [x.double() for x in dense])) < 0.01


@pytest.mark.parametrize("extra_tokens", [1, 3])
def test_extra_tokens_are_an_interval_of_their_own(extra_tokens: int) -> None:
    sees = Visibility.teacher_forcing(4, 2)
    plan = merope.encoding("ucpe").plan(driving_cameras(2, 8), (3, 5), extra_tokens=extra_tokens, sees=sees)
    assert_accurate(errors_of(plan, HALF))


def test_backends_agree_in_float64() -> None:
    plan = MeRoPE().plan(driving_cameras(1, 7), (1, 3), sees=Visibility.block_causal(7, 2, last=3, sink=1))
    *inputs, gradient = random_inputs(plan, torch.float64)
    dense = results(under(plan, "reference"), inputs, gradient)
    assert max(relative_errors(results(under(plan, "sdpa"), inputs, gradient), dense)) < 1e-11
    assert DEVICE.type == plan.device.type
