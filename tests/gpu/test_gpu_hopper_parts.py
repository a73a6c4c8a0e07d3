"""The Hopper kernels beside tokens without a camera: extra tokens, rims of a lens, cameras without a pose."""

from collections.abc import Callable

import pytest
import torch

from merope.attention import fused
from merope.attention.kernels import hopper
from merope.attention.plan import AttentionPlan
from merope.encodings.merope import MeRoPE
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import UnifiedCamera
from tests.gpu.errors import (
    DEVICE,
    LENS,
    PEAKED,
    assert_accurate,
    driving_cameras,
    errors_of,
    random_inputs,
    relative_errors,
    results,
    under,
)
from tests.gpu.test_gpu_hopper import IS_HOPPER, takes_the_kernel
from tests.scenes import random_poses

pytestmark = [
    pytest.mark.usefixtures("_poisoned"),
    pytest.mark.skipif(not IS_HOPPER, reason="these kernels need a GPU of compute capability 9.0"),
]
RIMMED = UnifiedCamera(300.0, 300.0, 256.0, 144.0, 1.8, 512, 288)
"""It sees 402 pixels of its image's width: no patch at the left and right."""


def rimmed(clips: int, count: int) -> Cameras:
    return Cameras(driving_cameras(clips, count).world_from_camera, RIMMED.to(DEVICE))


def without_a_pose(*missing: int) -> Cameras:
    poses, flags = random_poses(5), torch.ones(5, dtype=torch.bool)
    for camera in missing:
        poses[camera], flags[camera] = torch.nan, False
    return Cameras(poses, LENS, flags).to(DEVICE)


def cross(encoding: MeRoPE) -> AttentionPlan:
    options = {"key": rimmed(1, 3), "key_grid": (8, 9), "key_extra_tokens": 5}
    return encoding.plan(driving_cameras(1, 4), (5, 7), extra_tokens=2, **options)  # type: ignore[arg-type]


def queries_alone(encoding: MeRoPE) -> AttentionPlan:
    return encoding.plan(rimmed(1, 3), (5, 7), extra_tokens=2, key=driving_cameras(1, 4), key_grid=(6, 9))


def keys_alone(encoding: MeRoPE) -> AttentionPlan:
    return encoding.plan(driving_cameras(1, 4), (5, 7), key=rimmed(1, 3), key_grid=(6, 9))


PLANS: dict[str, Callable[[MeRoPE], AttentionPlan]] = {
    "64 extra tokens": lambda e: e.plan(driving_cameras(1, 5), (5, 7), extra_tokens=64),
    "one extra token": lambda e: e.plan(driving_cameras(1, 5), (5, 7), extra_tokens=1),
    "a rim": lambda e: e.plan(rimmed(1, 5), (6, 10)),
    "a rim and extra tokens, three clips": lambda e: e.plan(rimmed(3, 4), (6, 10), extra_tokens=7),
    "tiles of 144": lambda e: e.plan(rimmed(1, 5), (9, 16), extra_tokens=3),
    "cameras without a pose": lambda e: e.plan(without_a_pose(0, 3), (5, 7), extra_tokens=3),
    "other keys": cross,
    "queries alone": queries_alone,
    "keys alone": keys_alone,
}


@pytest.fixture(params=[None, 50.0], ids=["rotation", "directions"])
def paper(request: pytest.FixtureRequest) -> MeRoPE:
    return MeRoPE(direction_scale=request.param)


@pytest.mark.parametrize("name", PLANS)
def test_errors(paper: MeRoPE, name: str) -> None:
    plan = PLANS[name](paper)
    assert not bool(plan.query_has_camera.all() and plan.key_has_camera.all())
    assert takes_the_kernel(plan, torch.bfloat16)
    assert_accurate(errors_of(plan, torch.bfloat16, heads=3), against_plain=True)
    assert_accurate(errors_of(plan, torch.float16, heads=3))


@pytest.mark.parametrize("off", ["disparity", "rotation", "translation"])
def test_blocks_that_are_off(off: str) -> None:
    plan = MeRoPE(**{off: False}).plan(rimmed(1, 4), (6, 10), extra_tokens=3)  # type: ignore[arg-type]
    assert takes_the_kernel(plan, torch.bfloat16)
    assert_accurate(errors_of(plan, torch.bfloat16), against_plain=True)


@pytest.mark.parametrize("name", ["64 extra tokens", "a rim", "tiles of 144"])
def test_peaked_attention(paper: MeRoPE, name: str) -> None:
    """A query without a camera may have a far larger score among the cameras' keys than anywhere else."""
    for dtype in (torch.bfloat16, torch.float16):
        assert_accurate(errors_of(PLANS[name](paper), dtype, factor=PEAKED))


@pytest.mark.parametrize("magnitude", [1e-3, 100.0, 3000.0])
def test_values_of_another_magnitude_without_a_camera(paper: MeRoPE, magnitude: float) -> None:
    """As registers have. Errors of the kernels' own values are scaled by the largest of all."""
    plan = PLANS["64 extra tokens"](paper)
    q, k, v, gradient = random_inputs(plan, torch.bfloat16)
    v = torch.where(plan.key_has_camera[0, :, None], v, magnitude * v)
    got = results(under(plan, "fused"), (q, k, v), gradient)
    right = results(under(plan, "sdpa"), [x.double() for x in (q, k, v)], gradient)
    sdpa = results(under(plan, "sdpa"), (q, k, v), gradient)
    ours, others = relative_errors(got, right), relative_errors(sdpa, right)
    assert all(a <= 2 * b for a, b in zip(ours, others, strict=True)), (ours, others)


@pytest.mark.parametrize("exponent", [-66, 0, 66])
def test_output_gradients_of_any_magnitude(paper: MeRoPE, exponent: int) -> None:
    plan = PLANS["a rim and extra tokens, three clips"](paper)
    *inputs, gradient = random_inputs(plan, torch.bfloat16)
    got = results(under(plan, "fused"), inputs, gradient * 2.0**exponent)
    right = results(under(plan, "sdpa"), [x.double() for x in inputs], gradient)
    scaled = [got[0], *(x.double() / 2.0**exponent for x in got[1:])]
    assert max(relative_errors(scaled, right)) < 0.02


def test_either_forward_kernel(paper: MeRoPE, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS["a rim"](paper)
    for wide in (False, True):
        monkeypatch.setattr(hopper, "takes_wide_tiles", lambda _queries, visible, wide=wide: wide and not visible)
        assert_accurate(errors_of(plan, torch.bfloat16), against_plain=True)


def test_views_of_one_projection(paper: MeRoPE) -> None:
    plan = PLANS["a rim and extra tokens, three clips"](paper)
    *inputs, gradient = random_inputs(plan, torch.bfloat16)
    dense = results(under(plan, "fused"), inputs, gradient)
    views = torch.stack([x.transpose(1, 2) for x in inputs], dim=2).unbind(2)  # [B, N, 3, H, d]
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in views]
    out = under(plan, "fused")(*leaves)
    assert out.transpose(1, 2).is_contiguous()
    for a, b in zip((out.detach(), *torch.autograd.grad(out, leaves, gradient)), dense, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_cuda_graphs(paper: MeRoPE) -> None:
    plan = PLANS["a rim and extra tokens, three clips"](paper)
    q, k, v, _ = random_inputs(plan, torch.bfloat16)
    with torch.no_grad():
        expected = under(plan, "fused")(q, k, v)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            out = under(plan, "fused")(q, k, v)
        graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_nothing_is_read_off_the_gpu(paper: MeRoPE) -> None:
    """In any call but the first, which makes what the plan keeps."""
    plan = PLANS["a rim and extra tokens, three clips"](paper)
    *inputs, gradient = random_inputs(plan, torch.bfloat16)
    leaves = [x.requires_grad_() for x in inputs]

    def step() -> None:
        torch.autograd.grad(under(plan, "fused")(*leaves), leaves, gradient)

    fused.make_ready(inputs[0], plan)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
