"""The Hopper kernels: forward and backward pass of MeRoPE's attention, in every shape and at every magnitude."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from merope.attention import fused
from merope.attention.kernels import hopper
from merope.attention.plan import AttentionPlan
from merope.encodings.merope import MeRoPE
from merope.geometry.cameras import Cameras
from merope.geometry.poses import rigid
from tests import hopper_machine
from tests.gpu.errors import (
    DEVICE,
    LENS,
    PARTS,
    assert_accurate,
    driving_cameras,
    errors_of,
    random_inputs,
    relative_errors,
    results,
    straight_cameras,
    under,
)
from tests.scenes import curved_drive, random_poses, random_rotations

IS_HOPPER = torch.cuda.get_device_capability() == (9, 0) if DEVICE.type == "cuda" else hopper_machine.why_not() is None
GPU = pytest.mark.gpu
"""What takes the machine of tests/hopper_machine longest, and repeats what smaller cases show, is left to a GPU."""
pytestmark = [
    pytest.mark.usefixtures("_poisoned"),
    pytest.mark.skipif(not IS_HOPPER, reason="these kernels need a GPU of compute capability 9.0"),
]


def on_a_gpu(*cases: Any) -> list[Any]:
    return [pytest.param(case, marks=GPU) for case in cases]


def earth_centred() -> Tensor:  # [5, 4, 4]
    """A bend somewhere on the Earth: coordinates of 6.4e6 m, steps of metres."""
    earth_from_start = rigid(random_rotations(seed=3), torch.tensor([3.9e6, 0.3e6, 5.0e6], dtype=torch.float64))
    return earth_from_start @ curved_drive(5)


RIGS: dict[str, Callable[[], Cameras]] = {
    "random": lambda: Cameras(random_poses(5), LENS),
    "straight": straight_cameras,
    "coincident": lambda: straight_cameras(coincident=3),
    "Earth-centred": lambda: Cameras(earth_centred(), LENS),
    "1e6 m": lambda: Cameras(random_poses(5, spread_m=1e6), LENS),
}


@pytest.fixture(params=[None, 50.0], ids=["rotation", "directions"])
def encoding(request: pytest.FixtureRequest) -> MeRoPE:
    """The paper's, and the one with phases of directions in place of its rotation block."""
    return MeRoPE(direction_scale=request.param)


@pytest.fixture(params=[False, True], ids=["tiles of 128", "tiles of 144"])
def _either_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forward kernels, whichever would be taken."""
    monkeypatch.setattr(hopper, "takes_wide_tiles", lambda _queries_per_camera, visible: request.param and not visible)


def takes_the_kernel(plan: AttentionPlan, dtype: torch.dtype) -> bool:
    return fused.hopper_for(torch.empty((1, 1, 1, 128), device=DEVICE, dtype=dtype), plan) is not None


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("rig", RIGS)
def test_rigs(encoding: MeRoPE, rig: str, cross: bool) -> None:
    cameras = RIGS[rig]().to(DEVICE)
    other = (
        {"key": Cameras(cameras.world_from_camera[..., 1:4, :, :], cameras.lens), "key_grid": (4, 9)} if cross else {}
    )
    plan = encoding.plan(cameras, (5, 7), **other)  # type: ignore[arg-type]
    assert takes_the_kernel(plan, torch.bfloat16)
    assert_accurate(errors_of(plan, torch.bfloat16, heads=3), against_plain=True)
    assert_accurate(errors_of(plan, torch.float16, heads=3))


@pytest.mark.parametrize(("cameras", "grid"), [(1, (1, 1)), (2, (1, 3)), (3, (8, 8)), (2, (9, 15)), (7, (8, 16))])
@pytest.mark.parametrize(("keys", "key_grid"), [(1, (1, 1)), (3, (7, 10)), (2, (8, 16)), (5, (5, 13))])
def test_odd_lengths(
    encoding: MeRoPE, cameras: int, grid: tuple[int, int], keys: int, key_grid: tuple[int, int]
) -> None:
    plan = encoding.plan(driving_cameras(1, cameras), grid, key=driving_cameras(1, keys), key_grid=key_grid)
    assert takes_the_kernel(plan, torch.bfloat16)
    if plan.key_tokens > 1:
        assert_accurate(errors_of(plan, torch.bfloat16, heads=1), against_plain=True)
    else:  # the softmax of one score: gradients of queries and keys are zero, and so are the errors of plain attention
        *inputs, gradient = random_inputs(plan, torch.bfloat16)
        got = results(under(plan, "fused"), inputs, gradient)
        right = results(under(plan, "sdpa"), [x.double() for x in inputs], gradient)
        assert max(relative_errors(got[::3], right[::3])) < 0.01
        assert float(got[1].abs().max()) < 0.05
        assert float(got[2].abs().max()) < 0.05 * math.sqrt(plan.query_tokens)  # sums over the queries


@pytest.mark.usefixtures("_either_kernel")
@pytest.mark.parametrize("keys", ["own", "of one tile", "of other cameras", "of every sample's own tables"])
@pytest.mark.parametrize("grid", [(9, 16), (10, 10), *on_a_gpu((10, 13), (16, 18), (10, 15))], ids=str)
def test_tiles_of_queries(encoding: MeRoPE, grid: tuple[int, int], keys: str) -> None:
    """Tiles that are full, and tiles that are not; one tile of keys, and several, full or not."""
    cameras = driving_cameras(3 if keys == "of every sample's own tables" else 1, 2)
    others = {"of one tile": (1, (7, 10)), "of other cameras": (3, (7, 10))}
    key = {"key": driving_cameras(1, others[keys][0]), "key_grid": others[keys][1]} if keys in others else {}
    plan = encoding.plan(cameras, grid, **key)  # type: ignore[arg-type]
    assert takes_the_kernel(plan, torch.bfloat16)
    assert_accurate(errors_of(plan, torch.bfloat16, heads=3), against_plain=True)
    assert_accurate(errors_of(plan, torch.float16, heads=3))


@pytest.mark.parametrize(("clips", "heads"), [(1, 1), (3, 5), pytest.param(8, 12, marks=GPU)])
def test_batches_and_heads(encoding: MeRoPE, clips: int, heads: int) -> None:
    plan = encoding.plan(driving_cameras(clips, 4), (5, 9))
    assert_accurate(errors_of(plan, torch.bfloat16, heads=heads), against_plain=True)


@pytest.mark.parametrize(("at_once", "cut"), [(8, (8, 2)), (1000, (0, 5))], ids=["the last tiles", "all tiles"])
def test_tiles_of_keys_that_are_cut(
    encoding: MeRoPE, monkeypatch: pytest.MonkeyPatch, at_once: int, cut: tuple[int, int]
) -> None:
    plan = encoding.plan(driving_cameras(2, 5), (5, 9))
    assert hopper.cut_tiles(2 * 3 * 2, plan.query_cameras, at_once) == cut
    *inputs, gradient = random_inputs(plan, torch.bfloat16, heads=3)
    monkeypatch.setattr(hopper, "multiprocessors", lambda _device: 1)  # no tile is left over
    whole = results(under(plan, "fused"), inputs, gradient)
    monkeypatch.setattr(hopper, "multiprocessors", lambda _device: at_once)
    for a, b in zip(results(under(plan, "fused"), inputs, gradient), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("_either_kernel")
def test_one_plan_for_several_samples(encoding: MeRoPE) -> None:
    plan = encoding.plan(Cameras(random_poses(3), LENS).to(DEVICE), (5, 9))
    q, k, v, gradient = (x.repeat(3, 1, 1, 1) for x in random_inputs(plan, torch.bfloat16))
    got = results(under(plan, "fused"), (q, k, v), gradient)
    alone = results(under(plan, "fused"), (q[:1], k[:1], v[:1]), gradient[:1])
    for all_samples, one in zip(got, alone, strict=True):
        torch.testing.assert_close(all_samples, one.expand_as(all_samples), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("off", ["disparity", "rotation", "translation"])
def test_blocks_that_are_off(encoding: MeRoPE, off: str) -> None:
    plan = replace(encoding, **{off: False}).plan(driving_cameras(1, 4), (5, 9))  # type: ignore[arg-type]
    assert takes_the_kernel(plan, torch.bfloat16)
    assert_accurate(errors_of(plan, torch.bfloat16), against_plain=True)


@pytest.mark.parametrize("count", [24, pytest.param(64, marks=GPU)])
def test_many_cameras_do_not_add_up_errors(encoding: MeRoPE, count: int) -> None:
    for cameras in (Cameras(curved_drive(count), LENS), Cameras(random_poses(count), LENS)):
        plan = encoding.plan(cameras.to(DEVICE), (3, 5))
        assert_accurate(errors_of(plan, torch.bfloat16), against_plain=True)


@GPU
@pytest.mark.parametrize("cameras", [13, 64, 128])
def test_many_tokens_of_many_cameras(encoding: MeRoPE, cameras: int) -> None:
    plan = encoding.plan(driving_cameras(1, cameras), (9, 16))
    assert takes_the_kernel(plan, torch.bfloat16)
    assert_accurate(errors_of(plan, torch.bfloat16, heads=1), against_plain=True)


def test_rotations_and_directions_in_turn() -> None:
    """Each has kernels of its own: neither takes the other's."""
    plans = [MeRoPE(direction_scale=scale).plan(driving_cameras(1, 4), (5, 9)) for scale in (None, 50.0)]
    for plan in (*plans, *plans):
        assert takes_the_kernel(plan, torch.bfloat16)
        assert_accurate(errors_of(plan, torch.bfloat16), against_plain=True)


@pytest.mark.parametrize("scale", [1.0, 50.0, 400.0])
def test_directions_of_any_scale(scale: float) -> None:
    plan = MeRoPE(direction_scale=scale).plan(driving_cameras(1, 5), (5, 7))
    assert_accurate(errors_of(plan, torch.bfloat16), against_plain=True)


@pytest.mark.usefixtures("_either_kernel")
def test_peaked_attention(encoding: MeRoPE) -> None:
    plan = encoding.plan(driving_cameras(1, 5), (5, 7))
    for dtype in (torch.bfloat16, torch.float16):
        assert_accurate(errors_of(plan, dtype, factor=30.0))


@pytest.mark.usefixtures("_either_kernel")
@pytest.mark.parametrize("largest", [0.3, 3.0, 30.0])
def test_scores_that_grow_from_tile_to_tile(encoding: MeRoPE, largest: float) -> None:
    """Weights outgrow the shift of the tiles before: within half precision, within float32, beyond it."""
    plan = encoding.plan(driving_cameras(1, 4), (9, 16))
    q, k, v, gradient = random_inputs(plan, torch.bfloat16)
    growing = torch.linspace(0.01, largest, plan.key_tokens, device=DEVICE)[:, None]
    inputs = [20 * q, (growing * k).to(k.dtype), v]
    right = results(under(plan, "sdpa"), [x.double() for x in inputs], gradient)
    ours, sdpa = (relative_errors(results(under(plan, name), inputs, gradient), right) for name in ("fused", "sdpa"))
    assert all(a <= 2 * b for a, b in zip(ours, sdpa, strict=True)), (ours, sdpa)


@pytest.mark.parametrize("exponent", [-66, -27, 0, 27, 66, 100])
def test_output_gradients_of_any_magnitude(encoding: MeRoPE, exponent: int) -> None:
    """Gradients are linear in the output's: each head is scaled into half precision's range and back."""
    plan = encoding.plan(driving_cameras(1, 3), (5, 9))
    *inputs, gradient = random_inputs(plan, torch.bfloat16)
    gradient[:, 1] *= 1e-3  # heads of different magnitudes
    got = results(under(plan, "fused"), inputs, gradient * 2.0**exponent)
    right = results(under(plan, "sdpa"), [x.double() for x in inputs], gradient.double())
    for part, a, b in zip(PARTS[1:], got[1:], right[1:], strict=True):
        for head in range(2):
            error = (a[:, head].double() / 2.0**exponent - b[:, head]).norm() / b[:, head].norm()
            assert error < 0.02, f"{part} of head {head}"


@pytest.mark.parametrize("magnitude", [1e-4, 100.0, 1000.0])
def test_values_of_any_magnitude(encoding: MeRoPE, magnitude: float) -> None:
    plan = encoding.plan(driving_cameras(1, 3), (5, 9))
    q, k, v, gradient = random_inputs(plan, torch.bfloat16)
    got = results(under(plan, "fused"), (q, k, magnitude * v), gradient)
    exact = [x.double() for x in (q, k, magnitude * v)]
    assert max(relative_errors(got, results(under(plan, "sdpa"), exact, gradient))) < 0.02


@pytest.mark.usefixtures("_either_kernel")
def test_saturation_keeps_numbers_finite_and_nan(encoding: MeRoPE) -> None:
    plan = encoding.plan(driving_cameras(1, 2), (2, 3))
    q, k, v, _ = random_inputs(plan, torch.bfloat16)
    v[0, 0, 0, 5] = 1e6
    assert under(plan, "fused")(q, k, v).isfinite().all()
    v[0, 0, 0, 5] = math.nan
    out = under(plan, "fused")(q, k, v)
    assert out[0, 0].isnan().any()
    assert out[0, 1].isfinite().all()


@pytest.mark.usefixtures("_either_kernel")
def test_padding_beside_large_negative_scores_is_not_nan(encoding: MeRoPE) -> None:
    """Scores of padding are 0, far above log-sum-exps of −1000: their weight must not be infinite."""
    plan = replace(encoding, disparity=False, rotation=False, translation=False).plan(driving_cameras(1, 1), (3, 3))
    q, k, v, gradient = random_inputs(plan, torch.bfloat16)
    q, k = 30 * torch.ones_like(q), -30 * torch.ones_like(k)
    assert all(x.isfinite().all() for x in results(under(plan, "fused"), (q, k, v), gradient))


def test_views_of_one_projection_and_unaligned_rows(encoding: MeRoPE) -> None:
    plan = encoding.plan(driving_cameras(1, 3), (5, 9))
    *inputs, gradient = random_inputs(plan, torch.bfloat16)
    dense = results(under(plan, "fused"), inputs, gradient)
    views = torch.stack([x.transpose(1, 2) for x in inputs], dim=2).unbind(2)  # [B, N, 3, H, d]
    odd = [torch.cat((x[..., :1], x), dim=-1)[..., 1:] for x in inputs]
    for layout in ([x.transpose(1, 2) for x in views], odd):
        leaves = [x.detach().requires_grad_() for x in layout]
        out = under(plan, "fused")(*leaves)
        assert out.transpose(1, 2).is_contiguous()
        got = (out.detach(), *torch.autograd.grad(out, leaves, gradient))
        for a, b in zip(got, dense, strict=True):  # gradients of queries are added up in any order
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@GPU
def test_cuda_graphs(encoding: MeRoPE) -> None:
    plan = encoding.plan(driving_cameras(1, 3), (5, 9))
    q, k, v, _ = random_inputs(plan, torch.bfloat16)
    with torch.no_grad():
        expected = under(plan, "fused")(q, k, v)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            out = under(plan, "fused")(q, k, v)
        graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
