"""What the Hopper kernels are launched with, on the CPU, and the operators around them."""

import ctypes
import math
import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merope.attention.kernels import hopper, hopper_module, hopper_tables
from merope.attention.plan import AttentionPlan
from merope.encodings.merope import MeRoPE
from merope.geometry.cameras import Cameras
from tests.scenes import PINHOLE, random_poses

SOURCE = hopper_module.kernel_source(phases=False, visible=False)


class Recorder:
    """In place of the compiled kernels: keeps what they would be launched with."""

    def __init__(self) -> None:
        self.launches: dict[str, tuple[tuple[int, int, int], int, int, ctypes.Structure]] = {}

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        params: ctypes.Structure,
        early: bool = False,
    ) -> None:
        assert early == name.startswith("attend_")  # waits for the kernel before it by itself
        self.launches[name] = (grid, threads, shared, params)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[tuple[int, int, int], int, int, ctypes.Structure]]:
    recorder = Recorder()
    monkeypatch.setattr(hopper, "module", lambda _index, _phases, _visible: recorder)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    return recorder.launches


def case(grid: tuple[int, int] = (9, 15)) -> tuple[AttentionPlan, hopper_tables.HopperTables, list[Tensor]]:
    """Cross-attention of 2 cameras of 135 tokens to 3 cameras of 70; q, k and v are views of token-major tensors."""
    queries, keys = (Cameras(random_poses(2, count), PINHOLE) for count in (2, 3))
    plan = MeRoPE(128).plan(queries, grid, key=keys, key_grid=(7, 10))
    inputs = [torch.randn(2, n, 3, 128).bfloat16().transpose(1, 2) for n in (plan.query_tokens, 210, 210)]
    return plan, hopper_tables.make_tables(plan), inputs


def pointers(params: ctypes.Structure, **expected: Tensor) -> None:
    for name, tensor in expected.items():
        value = getattr(params, name)
        assert (value.data if isinstance(value, hopper_module.Tokens) else value) == tensor.data_ptr(), name


@pytest.mark.parametrize("per_camera", [129, 135, 144])
def test_wide_tiles_are_taken_where_tiles_of_128_leave_few_queries_over(per_camera: int) -> None:
    assert hopper.takes_wide_tiles(per_camera, visible=False)
    assert not hopper.takes_wide_tiles(per_camera, visible=True)


@pytest.mark.parametrize("per_camera", [1, 64, 100, 128, 145, 150, 256, 257, 288, 289, 880, 1560])
def test_tiles_of_128_are_taken_where_they_are_as_full(per_camera: int) -> None:
    assert not hopper.takes_wide_tiles(per_camera, visible=False)


@pytest.mark.parametrize(
    ("grid", "name", "tiles", "shared_bytes"),
    [((9, 15), "attend_wide_bf16", 1, hopper.WIDE_SHARED_BYTES), ((9, 17), "attend_bf16", 2, hopper.SHARED_BYTES)],
)
def test_forward_kernels_are_given_what_their_fields_name(
    launches: dict, grid: tuple[int, int], name: str, tiles: int, shared_bytes: int
) -> None:
    plan, tables, (q, k, v) = case(grid)
    per_camera = math.prod(grid)
    out, lse = hopper._forward(q, k, v, tables.tensors(), plan.query_cameras)
    blocks, threads, _, pack = launches["pack_keys_bf16"]
    assert (blocks, threads) == ((256 * 16 // 256, 2, 3), 256)
    pointers(pack, k=k, v=v, rotation=tables.key_rotation, native=tables.key_native)
    assert (pack.k.batch, pack.k.head, pack.k.token) == (210 * 3 * 128, 128, 3 * 128)
    assert (pack.tables_per_sample, pack.heads, pack.keys, pack.padded_keys) == (1, 3, 210, 256)
    assert set(launches) == {"pack_keys_bf16", name}
    blocks, threads, shared, attend = launches[name]
    assert (blocks, threads, shared) == ((2 * 3 * 2 * tiles, 1, 1), 512, shared_bytes)
    pointers(attend, q=q, out=out, lse=lse, disparity=tables.query_disparity, rotation=tables.query_rotation)
    pointers(attend, native=tables.query_native, key_views=tables.key_views, phasors=tables.phasors)
    assert (attend.packed_k, attend.packed_v) == (pack.packed_k, pack.packed_v)
    assert (attend.batch, attend.heads, attend.cameras, attend.tokens_per_camera) == (2, 3, 2, per_camera)
    assert (attend.queries, attend.keys, attend.padded_keys, attend.key_cameras) == (2 * per_camera, 210, 256, 4)
    assert (attend.tables_per_sample, attend.scale) == (1, pytest.approx(128**-0.5))


def test_backward_kernels_are_given_what_their_fields_name(launches: dict) -> None:
    plan, tables, (q, k, v) = case()
    grad, out = torch.randn(2, 2, 270, 3, 128).bfloat16().unbind(0)
    lse = torch.randn(2, 3, 270)
    grads = hopper._backward(grad, q, k, v, out, lse, tables.tensors(), plan.query_cameras)
    grid, threads, _, bound = launches["bound_and_pack_bf16"]
    assert (grid, threads, bound.head_groups) == ((32 * (2 * 3 + 1 * 3), 2, 1), 256, 3)
    pointers(bound, grad=grad)
    assert bound.queries == 270
    assert (bound.grad.batch, bound.grad.head, bound.grad.token) == (270 * 3 * 128, 128, 3 * 128)
    keys = bound.pack
    assert (keys.tables_per_sample, keys.heads, keys.keys, keys.padded_keys) == (1, 3, 210, 256)
    grid, threads, _, queries = launches["pack_queries_bf16"]
    assert (grid, threads) == ((2 * 192 * 16 // 256, 2, 3), 256)
    assert queries.part_bounds == bound.part_bounds
    pointers(keys, k=k, v=v, rotation=tables.key_rotation, native=tables.key_native)
    pointers(queries, q=q, out=out, grad=grad, lse=lse, disparity=tables.query_disparity)
    pointers(queries, rotation=tables.query_rotation, native=tables.query_native)
    grid, threads, shared, work = launches["gradients_bf16"]
    assert (grid, threads, shared) == ((2 * 3 * 2, 1, 1), 384, hopper.GRAD_SHARED_BYTES)
    pointers(work, grad_k=grads[1], grad_v=grads[2], rotation=tables.key_rotation, native=tables.key_native)
    pointers(work, key_views=tables.key_views, phasors=tables.phasors, key_camera=tables.key_camera)
    assert (work.packed_k, work.packed_v) == (keys.packed_k, keys.packed_v)
    assert (work.packed_q, work.packed_grad, work.rows) == (queries.packed_q, queries.packed_grad, queries.rows)
    assert (work.heads, work.cameras, work.padded_rows, work.keys) == (3, 2, 192, 210)
    assert (work.padded_keys, work.key_cameras, work.tables_per_sample) == (256, 4, 1)
    grid, _, _, finish = launches["finish_queries_bf16"]
    assert queries.bounds == work.bounds == finish.bounds != bound.part_bounds
    assert queries.sums == work.sums == finish.sums
    assert grid == (math.ceil(270 * 16 / 256), 2, 3)
    pointers(finish, grad_q=grads[0], disparity=tables.query_disparity, rotation=tables.query_rotation)
    assert finish.native == tables.query_native.data_ptr()
    for params in (queries, finish):
        sizes = (params.heads, params.cameras, params.tokens_per_camera, params.padded_rows, params.queries)
        assert sizes == (3, 2, 135, 192, 270)
    assert work.scale == finish.scale == pytest.approx(128**-0.5)


@pytest.mark.parametrize(
    ("tiles", "cameras", "cut"),
    [
        (1284, 31, (1188, 4)),
        (1536, 21, (1452, 3)),
        (720, 13, (660, 2)),
        (45, 13, (0, 8)),
        (432, 64, (396, 7)),
        (864, 128, (792, 7)),
        (1320, 31, (1320, 1)),
        (263, 31, (263, 1)),
    ],
)
def test_tiles_of_keys_are_cut_where_the_last_wave_is_not_full(tiles: int, cameras: int, cut: tuple[int, int]) -> None:
    assert hopper.cut_tiles(tiles, cameras, 132) == cut


@given(st.integers(1, 2000), st.integers(1, 130), st.integers(1, 200))
def test_cut_tiles_are_walked_over_once_and_never_slower(tiles: int, cameras: int, at_once: int) -> None:
    whole, pieces = hopper.cut_tiles(tiles, cameras, at_once)
    assert 1 <= pieces <= cameras
    assert tiles - whole < at_once

    def time(cut: int, pieces: int) -> float:
        return math.ceil(cut * pieces / at_once) * (1 / pieces + hopper.PIECE_COST)

    assert time(whole, 1) + time(tiles - whole, pieces) <= time(tiles, 1) + 1e-9
    turns = [turn for piece in range(pieces) for turn in turns_of(piece, cameras, pieces)]
    assert turns == list(range(cameras))


def turns_of(piece: int, cameras: int, pieces: int) -> range:
    """What the kernel says."""
    names = {"piece": piece, "cameras": cameras, "pieces": pieces}
    for name in ("first_turn", "turns"):
        (expression,) = re.findall(rf"^        {name} = (.*);", SOURCE, re.MULTILINE)
        names[name] = eval(expression.replace("p.", "").replace("/", "//"), {}, names)
    return range(names["first_turn"], names["first_turn"] + names["turns"])


def test_cut_tiles_have_a_block_for_each_piece(launches: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, tables, (q, k, v) = case()
    grad, out = torch.randn(2, 2, 270, 3, 128).bfloat16().unbind(0)
    arguments = (grad, q, k, v, out, torch.randn(2, 3, 270), tables.tensors(), plan.query_cameras)
    hopper._backward(*arguments)
    assert "finish_keys_bf16" not in launches  # one tile at once: no wave is incomplete
    monkeypatch.setattr(hopper, "multiprocessors", lambda _device: 5)
    hopper._backward(*arguments)
    grid, _, _, work = launches["gradients_bf16"]
    assert (grid, work.whole_tiles, work.pieces) == ((10 + 2 * 2, 1, 1), 10, 2)
    grid, threads, _, finish = launches["finish_keys_bf16"]
    assert (grid, threads) == ((2 * 128 * 16 // 256, 1, 1), 256)
    assert finish.key_sums == work.key_sums


@pytest.mark.parametrize("others", [None, 0.25, 4.0])
def test_errors_are_scaled_by_the_largest_value_of_the_output(
    monkeypatch: pytest.MonkeyPatch, others: float | None
) -> None:
    """Values that the kernels are not given may be in the output, and its product with the gradient is subtracted."""
    _, tables, (q, k, v) = case()
    seen: list[Tensor] = []

    class Bounding(Recorder):
        """Every part of every head has norms of 1."""

        def launch(self, name: str, grid, threads: int, shared: int, params: ctypes.Structure, early=False) -> None:  # type: ignore[no-untyped-def]
            if name == "bound_and_pack_bf16":
                self.bounds = (ctypes.c_float * (2 * 3 * hopper.PARTS * 2)).from_address(params.part_bounds)
                self.bounds[:] = [1.0] * len(self.bounds)
            if name == "pack_queries_bf16":
                seen.append(torch.tensor(self.bounds[:]).view(2, 3, hopper.PARTS, 2).amax(2))

    recorder = Bounding()
    monkeypatch.setattr(hopper, "module", lambda _index, _phases, _visible: recorder)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    grad, out = torch.randn(2, 2, 270, 3, 128).bfloat16().unbind(0)
    norms = None if others is None else torch.ones(2, 3)
    if norms is not None:
        norms[1, 2] = others
    hopper._backward(grad, q, k, v, out, torch.randn(2, 3, 270), tables.tensors(), 2, norms)
    expected = torch.ones(2, 3, 2)
    expected[1, 2, 1] = max(1.0, others or 0.0)
    torch.testing.assert_close(seen[0], expected)


def test_plans_with_directions_take_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, asked = Recorder(), []
    monkeypatch.setattr(hopper, "module", lambda _index, phases, visible: asked.append((phases, visible)) or recorder)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    plan = MeRoPE(128, direction_scale=50.0).plan(Cameras(random_poses(2, 3), PINHOLE), (9, 15))
    tables = hopper_tables.make_tables(plan)
    q, k, v, grad = torch.randn(4, 2, 3, 405, 128).bfloat16()
    out, lse = hopper._forward(q, k, v, tables.tensors(), plan.query_cameras)
    hopper._backward(grad.transpose(1, 2).contiguous(), q, k, v, out, lse, tables.tensors(), plan.query_cameras)
    assert set(asked) == {(True, False)}
    assert tables.key_views.shape == (2, 3, 4, 28 * 128)
    for name in ("attend_wide_bf16", "pack_queries_bf16", "finish_queries_bf16"):
        pointers(recorder.launches[name][3], rotation=tables.query_rotation, disparity=tables.query_disparity)
    for name in ("attend_wide_bf16", "gradients_bf16"):
        pointers(recorder.launches[name][3], key_views=tables.key_views, phasors=tables.phasors)


def test_rows_that_are_not_aligned_are_copied(launches: dict) -> None:
    plan, tables, (q, k, v) = case()
    shifted = torch.randn(2, 3, 270, 129).bfloat16()[..., 1:]
    hopper._forward(shifted, k, v, tables.tensors(), plan.query_cameras)
    attend = launches["attend_wide_bf16"][3]
    assert attend.q.data not in (q.data_ptr(), shifted.data_ptr())
    assert (attend.q.data % 16, attend.q.token) == (0, 128)


def test_dense_queries_at_an_odd_address_are_copied(launches: dict) -> None:
    plan, tables, (_, k, v) = case()
    odd = torch.randn(2 * 3 * 270 * 128 + 1).bfloat16()[1:].view(2, 3, 270, 128)
    assert odd.is_contiguous()
    hopper._forward(odd, k, v, tables.tensors(), plan.query_cameras)
    assert launches["attend_wide_bf16"][3].q.data % 16 == 0


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    logits = q @ k.mT / 128**0.5
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.fixture(scope="module")
def operator() -> Callable[..., tuple[Tensor, Tensor]]:
    """The registered operator with attention without any encoding in place of its kernels, on the CPU."""

    @hopper._attend.register_kernel("cpu")
    def _(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], cameras: int) -> tuple[Tensor, Tensor]:
        out, lse = plain_attention(q, k, v)
        return out.transpose(1, 2).contiguous(), lse

    @hopper._attend_backward.register_kernel("cpu")
    def _(grad, q, k, v, out, lse, tables, cameras, other_norms=None):  # type: ignore[no-untyped-def]
        grad, out = grad.transpose(1, 2), out.transpose(1, 2)
        weights = (q @ k.mT / 128**0.5 - lse[..., None]).exp()
        errors = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) / 128**0.5
        return tuple(x.transpose(1, 2).contiguous() for x in (errors @ k, errors.mT @ q, weights.mT @ grad))

    return torch.ops.merope.attend_hopper


def test_gradients_reach_their_inputs(operator: Callable[..., tuple[Tensor, Tensor]]) -> None:
    q, k, v = (torch.randn(1, 2, n, 128, dtype=torch.float64, requires_grad=True) for n in (6, 5, 5))
    out, lse = operator(q, k, v, [], 2)
    assert not lse.requires_grad
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(plain_attention(q, k, v)[0], (q, k, v), grad.transpose(1, 2))
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), grad), expected)


def test_compiled_graphs_know_the_results_without_a_gpu(operator: Callable[..., tuple[Tensor, Tensor]]) -> None:
    q, k, v = (torch.randn(1, 2, n, 128, requires_grad=True) for n in (6, 5, 5))
    torch.library.opcheck(operator, (q, k, v, [], 2), test_utils=("test_schema", "test_faketensor"))
    grad, out = torch.randn(2, 1, 6, 2, 128)
    arguments = (grad, q.detach(), k.detach(), v.detach(), out, torch.randn(1, 2, 6), [], 2)
    backward = torch.ops.merope.attend_hopper_backward
    torch.library.opcheck(backward, arguments, test_utils=("test_schema", "test_faketensor"))
