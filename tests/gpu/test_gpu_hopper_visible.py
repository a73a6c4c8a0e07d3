"""The Hopper kernels where each query camera sees a part of the keys: outputs and gradients against float64."""

import pytest
import torch

from merope.attention.plan import AttentionPlan
from merope.attention.visible_cameras import Visibility
from merope.encodings.merope import MeRoPE
from tests.gpu.errors import assert_accurate, driving_cameras, errors_of, random_inputs, under
from tests.gpu.test_gpu_hopper import GPU, IS_HOPPER, on_a_gpu, takes_the_kernel
from tests.gpu.test_gpu_visible import leaves_no_trace

pytestmark = [
    pytest.mark.usefixtures("_poisoned"),
    pytest.mark.skipif(not IS_HOPPER, reason="these kernels need a GPU of compute capability 9.0"),
]
LAYOUTS = {
    "causal": Visibility.block_causal(7, 3),
    "window and sink": Visibility.block_causal(7, 2, last=3, sink=1),
    "clean and noisy": Visibility.teacher_forcing(4, 2),
    "a block and its past": Visibility.block_causal(3, 3, last=4, sink=2, cached=5),
    "keys that nobody sees": Visibility([[(0, 1)], [(4, 5)], [(0, 1), (4, 5)]]),
}
GRIDS = [(1, 3), (5, 7), *on_a_gpu((8, 16), (9, 15))]


def plan_of(encoding: MeRoPE, sees: Visibility, grid: tuple[int, int], clips: int = 1) -> AttentionPlan:
    """The query cameras are the last of the keys'; and one key camera more, which no layout sees."""
    queries, keys = len(sees.intervals), 1 + max(stop for row in sees.intervals for _, stop in row)
    cameras = driving_cameras(clips, max(queries, keys))
    own = cameras.at(slice(cameras.count - queries, cameras.count))
    return encoding.plan(own, grid, key=cameras.at(slice(0, keys)), sees=sees)


@pytest.fixture(params=[None, 50.0], ids=["rotation", "directions"])
def encoding(request: pytest.FixtureRequest) -> MeRoPE:
    return MeRoPE(direction_scale=request.param)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_in_the_hopper_kernels(encoding: MeRoPE, name: str, grid: tuple[int, int]) -> None:
    plan = plan_of(encoding, LAYOUTS[name], grid)
    assert plan.visible_keys is not None
    assert takes_the_kernel(plan, torch.bfloat16)
    assert_accurate(errors_of(plan, torch.bfloat16), against_plain=True)
    assert_accurate(errors_of(plan, torch.float16))


@GPU
def test_clips_heads_and_many_tiles(encoding: MeRoPE) -> None:
    cameras = driving_cameras(2, 13)
    plan = encoding.plan(cameras, (9, 16), sees=Visibility.block_causal(13, 3, last=6, sink=1))
    assert_accurate(errors_of(plan, torch.bfloat16, heads=5), against_plain=True)


@pytest.mark.parametrize("dtype", [torch.float16, *on_a_gpu(torch.bfloat16)])
@pytest.mark.parametrize("grid", [(5, 7), (9, 15)])
def test_peaked_attention(encoding: MeRoPE, grid: tuple[int, int], dtype: torch.dtype) -> None:
    assert_accurate(errors_of(plan_of(encoding, LAYOUTS["causal"], grid), dtype, factor=30.0))


@GPU
def test_cuda_graphs(encoding: MeRoPE) -> None:
    plan = plan_of(encoding, LAYOUTS["window and sink"], (5, 9))
    q, k, v, _ = random_inputs(plan, torch.bfloat16)
    with torch.no_grad():
        expected = under(plan, "fused")(q, k, v)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            out = under(plan, "fused")(q, k, v)
        graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_what_is_not_seen_leaves_no_trace() -> None:
    leaves_no_trace(torch.bfloat16)


def test_nan_that_is_not_seen_leaves_no_trace_in_the_output(encoding: MeRoPE) -> None:
    """70 of the first tile's 128 keys are seen by the first cameras, the others are NaN."""
    plan = encoding.plan(driving_cameras(1, 4), (5, 7), sees=Visibility.block_causal(4, 2))
    q, k, v, _ = random_inputs(plan, torch.bfloat16)
    with torch.no_grad():
        usual = under(plan, "fused")(q, k, v)[:, :, :70]
        k[:, :, 70:], v[:, :, 70:] = torch.nan, torch.nan
        assert torch.equal(under(plan, "fused")(q, k, v)[:, :, :70], usual)
