"""Every encoding under the fused backend: outputs and gradients against float64."""

import pytest
import torch

import merope
from merope.attention import fused
from merope.encodings.merope import MeRoPE
from tests.gpu.errors import DEVICE, GEOMETRIC, HALF, assert_accurate, cases, driving_cameras, errors_of
from tests.scenes import mixed_cameras

pytestmark = pytest.mark.usefixtures("_poisoned")
HALF_CASES = ("curved", "cross", "peaked")


@pytest.mark.parametrize("name", GEOMETRIC)
def test_errors_in_half_precision(name: str) -> None:
    for plan, factor in cases(name).values():
        assert_accurate(errors_of(plan, HALF, factor))


@pytest.mark.parametrize("name", GEOMETRIC)
def test_errors_in_float16(name: str) -> None:
    plans = cases(name)
    for case in HALF_CASES:
        plan, factor = plans[case]
        assert_accurate(errors_of(plan, torch.float16, factor))


@pytest.mark.parametrize("name", ["merope", "ucpe", "urope"])
def test_errors_in_float32(name: str) -> None:
    assert_accurate(errors_of(cases(name)["batch, cross"][0], torch.float32))


@pytest.mark.parametrize("name", ["merope", "gta", "ucpe", "urope", "raynova"])
@pytest.mark.parametrize("extra_tokens", [0, 3])
def test_tokens_without_a_camera(name: str, extra_tokens: int) -> None:
    encoding = merope.encoding(name)
    plan = encoding.plan(mixed_cameras(batch=True).to(DEVICE), (3, 4), extra_tokens=extra_tokens)
    assert plan.cameraless_queries.numel() > 0
    assert plan.has_cameraless_keys
    assert_accurate(errors_of(plan, HALF))


GENERAL = {
    "transport": MeRoPE(anchor_frame="transport"),
    "phases": MeRoPE(direction_scale=50.0),
    "logits only": MeRoPE(transform_values=False),
    "192": MeRoPE(head_dim=192),
    "30 channels": MeRoPE(head_dim=30, partition=(18, 6, 6, 0)),
}


@pytest.mark.parametrize("name", GENERAL)
def test_forms_of_merope_that_are_expanded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fused, "hopper_for", lambda q, plan: None)  # it takes phases of directions
    plan = GENERAL[name].plan(driving_cameras(2, 4), (5, 7))
    assert_accurate(errors_of(plan, HALF))


@pytest.mark.parametrize("cameras_at_once", [1, 2, 5])
def test_query_cameras_in_chunks(monkeypatch: pytest.MonkeyPatch, cameras_at_once: int) -> None:
    monkeypatch.setattr(fused, "hopper_for", lambda q, plan: None)
    plan = MeRoPE().plan(driving_cameras(2, 5), (5, 7))
    per_camera = 4 * (2 * plan.key_tokens * 128 * 2)  # keys, values and gradients of two heads in two bytes
    errors = errors_of(plan, HALF, memory_budget=cameras_at_once * per_camera)
    assert_accurate(errors)
