"""What the Hopper kernels are given, on the CPU: tables, structures, and which plans they take."""

import ctypes
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from merope.attention.kernels import hopper, hopper_module, hopper_tables
from merope.attention.kernels.prepared import prepare
from merope.attention.plan import AttentionPlan
from merope.encodings.gta import GTA
from merope.encodings.merope import MeRoPE
from merope.encodings.none import NoEncoding
from merope.geometry.cameras import Cameras
from tests.scenes import PINHOLE, RIMMED, curved_drive, degenerate_cameras, random_poses

SOURCE = hopper_module.kernel_source()


def disparity_from_tables(
    tables: hopper_tables.HopperTables, sample: int, camera: int
) -> Tensor:  # [padded keys, 6, 3, 3]
    """The kernel's arithmetic: z negated, then y − n (n · y)."""
    numbers = tables.half_vectors[sample, camera].double().transpose(1, 2).reshape(-1, 6, 3)
    reflection = torch.eye(3, dtype=torch.float64) - numbers[..., :, None] * numbers[..., None, :]
    return reflection * torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)


def translation_from_tables(
    tables: hopper_tables.HopperTables, sample: int, camera: int
) -> Tensor:  # [padded keys, 12, 2, 2]
    cosines, sines = tables.phasors[sample, camera].double().unbind(-2)
    cosine, sine = (x.flatten(-2)[tables.key_camera.long()] for x in (cosines, sines))
    return torch.stack((cosine, -sine, sine, cosine), dim=-1).unflatten(-1, (2, 2))


def pair_operator(plan: AttentionPlan, tables: hopper_tables.HopperTables, query: int, key: int, sample: int) -> Tensor:
    """U_ab [128, 128] as the kernels put it together from the tables."""
    camera = query // plan.tokens_per_camera
    own = sample if tables.query_rotation.shape[0] > 1 else 0
    frames = [x[own].double().unflatten(-1, (3, 3)) for x in (tables.query_disparity, tables.query_rotation)]
    key_frame = tables.key_rotation[own, key].double().unflatten(-1, (3, 3))
    anchors = frames[0][query] @ disparity_from_tables(tables, own, camera)[key]  # [6, 3, 3]
    triplets = [*anchors.repeat_interleave(2, dim=0), *[frames[1][query] @ key_frame] * 12]
    phases = [torch.view_as_complex(x[own].double()) for x in (tables.query_native, tables.key_native)]
    native = torch.view_as_real(phases[0][query] * phases[1][key])
    rotary = [torch.stack((torch.stack((c, -s)), torch.stack((s, c)))) for c, s in native]
    return torch.block_diag(*triplets, *translation_from_tables(tables, own, camera)[key], *rotary)


@given(seed=st.integers(0, 2**31), clips=st.sampled_from([1, 3]), grid=st.sampled_from([(2, 3), (1, 1), (5, 9)]))
def test_tables_hold_the_plan_to_half_precision(seed: int, clips: int, grid: tuple[int, int]) -> None:
    plan = MeRoPE(128).plan(Cameras(random_poses(clips, 3, seed=seed), PINHOLE), grid)
    tables = hopper_tables.make_tables(plan)
    generator = torch.Generator().manual_seed(seed)
    for sample in range(clips):
        query, key = torch.randint(plan.query_tokens, (2,), generator=generator).tolist()
        u = pair_operator(plan, tables, query, key, sample)
        torch.testing.assert_close(u, plan.operator(query, key, sample), rtol=0, atol=3e-3)


@pytest.mark.parametrize("name", sorted(set(degenerate_cameras()) - {"fisheye straight"}))
def test_tables_of_degenerate_cameras_are_orthogonal(name: str) -> None:
    plan = MeRoPE(128).plan(degenerate_cameras()[name], (3, 5))
    tables = hopper_tables.make_tables(plan)
    for camera in range(plan.query_cameras):
        matrices = disparity_from_tables(tables, 0, camera)[: plan.key_tokens]
        unit = torch.eye(3, dtype=torch.float64).expand_as(matrices)
        torch.testing.assert_close(matrices @ matrices.mT, unit, rtol=0, atol=3e-3)
        torch.testing.assert_close(torch.linalg.det(matrices), torch.ones_like(matrices[..., 0, 0]), rtol=0, atol=3e-3)


@pytest.mark.parametrize("off", ["disparity", "rotation", "translation"])
def test_blocks_that_are_off_become_the_identity(off: str) -> None:
    plan = MeRoPE(128, **{off: False}).plan(Cameras(curved_drive(3), PINHOLE), (2, 3))
    assert hopper_tables.why_not_plan(plan) is None
    u = pair_operator(plan, hopper_tables.make_tables(plan), 4, 17, 0)
    torch.testing.assert_close(u, plan.operator(4, 17), rtol=0, atol=3e-3)


def test_cross_attention_names_the_cameras_of_the_keys() -> None:
    queries, keys = Cameras(curved_drive(2), PINHOLE), Cameras(random_poses(5), PINHOLE)
    plan = MeRoPE(128).plan(queries, (3, 3), key=keys, key_grid=(7, 5))
    tables = hopper_tables.make_tables(plan)
    assert tables.half_vectors.shape == (1, 2, 2, 9, 128, 2)
    torch.testing.assert_close(pair_operator(plan, tables, 13, 174, 0), plan.operator(13, 174), rtol=0, atol=3e-3)


def test_padding_neither_turns_nor_points_outside_the_tables() -> None:
    plan = MeRoPE(128).plan(Cameras(curved_drive(2), PINHOLE), (9, 8))
    tables = hopper_tables.make_tables(plan)
    assert tables.key_camera.shape == (256,)
    assert bool((tables.key_camera < tables.phasors.shape[2]).all())
    assert not tables.half_vectors[:, :, 1, :, 16:].any()


def test_tables_are_made_once_and_contiguous() -> None:
    plan = MeRoPE(128).plan(Cameras(random_poses(2, 3), PINHOLE), (2, 3))
    tables = hopper_tables.hopper_tables(plan)
    assert hopper_tables.hopper_tables(plan) is tables
    assert all(tensor.is_contiguous() for tensor in tables.tensors())
    assert {tensor.shape[0] for tensor in tables.tensors()[:-1]} == {2}


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (MeRoPE(192).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "heads of 128"),
        (MeRoPE(128, partition=(36, 48, 12, 32)).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "paper's partition"),
        (MeRoPE(128, fractions=(0.0, 0.5, 1.0)).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "6 disparity anchors"),
        (MeRoPE(128, anchor_frame="transport").plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "MinRot"),
        (MeRoPE(128, transform_values=False).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "values"),
        (MeRoPE(128).plan(Cameras(curved_drive(2), PINHOLE), (2, 3), extra_tokens=1), "camera for every token"),
        (MeRoPE(128).plan(Cameras(curved_drive(2), RIMMED), (9, 16)), "camera for every token"),
        (GTA(128).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "MeRoPE"),
        (NoEncoding(128).plan(Cameras(curved_drive(2), PINHOLE), (2, 3), extra_tokens=1), "camera for every token"),
        (
            MeRoPE(128, disparity=False, rotation=False, translation=False).plan(
                Cameras(curved_drive(3), PINHOLE), (2, 3), extra_tokens=5
            ),
            "camera for every token",
        ),
    ],
)
def test_other_plans_are_refused_with_the_reason(plan: AttentionPlan, reason: str) -> None:
    assert reason in (hopper_tables.why_not_plan(plan) or "")


def test_other_machines_and_types_are_refused_with_the_reason() -> None:
    plan = MeRoPE(128).plan(Cameras(curved_drive(2), PINHOLE), (2, 3))
    assert "Hopper" in (hopper.why_not_hopper(torch.zeros(1, dtype=torch.bfloat16), plan) or "")
    assert "float32" in (hopper.why_not_hopper(torch.zeros(1), plan) or "")


class Recorder:
    """In place of the compiled kernels: keeps what they would be launched with."""

    def __init__(self) -> None:
        self.launches: dict[str, tuple[tuple[int, int, int], int, int, ctypes.Structure]] = {}

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, shared: int, params: ctypes.Structure
    ) -> None:
        self.launches[name] = (grid, threads, shared, params)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[tuple[int, int, int], int, int, ctypes.Structure]]:
    recorder = Recorder()
    monkeypatch.setattr(hopper, "module", lambda _index: recorder)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    return recorder.launches


def case(samples: int = 2) -> tuple[AttentionPlan, hopper_tables.HopperTables, list[Tensor]]:
    """Cross-attention of 2 cameras of 135 tokens to 3 cameras of 70; q, k and v are views of token-major tensors."""
    queries, keys = (Cameras(random_poses(samples, count), PINHOLE) for count in (2, 3))
    plan = MeRoPE(128).plan(queries, (9, 15), key=keys, key_grid=(7, 10))
    inputs = [torch.randn(samples, n, 3, 128).bfloat16().transpose(1, 2) for n in (270, 210, 210)]
    return plan, hopper_tables.make_tables(plan), inputs


def pointers(params: ctypes.Structure, **expected: Tensor) -> None:
    for name, tensor in expected.items():
        value = getattr(params, name)
        assert (value.data if isinstance(value, hopper_module.Tokens) else value) == tensor.data_ptr(), name


def test_forward_kernels_are_given_what_their_fields_name(launches: dict) -> None:
    plan, tables, (q, k, v) = case()
    out, lse = hopper._forward(q, k, v, tables.tensors(), plan.query_cameras)
    grid, threads, _, pack = launches["pack_keys_bf16"]
    assert (grid, threads) == ((256 * 16 // 256, 2, 3), 256)
    pointers(pack, k=k, v=v, rotation=tables.key_rotation, native=tables.key_native)
    assert (pack.k.batch, pack.k.head, pack.k.token) == (210 * 3 * 128, 128, 3 * 128)
    assert (pack.tables_per_sample, pack.heads, pack.keys, pack.padded_keys) == (1, 3, 210, 256)
    grid, threads, shared, attend = launches["attend_bf16"]
    assert (grid, threads, shared) == ((2 * 3 * 2 * 2, 1, 1), 512, hopper.SHARED_BYTES)
    pointers(attend, q=q, out=out, lse=lse, disparity=tables.query_disparity, rotation=tables.query_rotation)
    pointers(attend, native=tables.query_native, half_vectors=tables.half_vectors, phasors=tables.phasors)
    pointers(attend, key_camera=tables.key_camera)
    assert (attend.packed_k, attend.packed_v) == (pack.packed_k, pack.packed_v)
    assert (attend.batch, attend.heads, attend.cameras, attend.tokens_per_camera) == (2, 3, 2, 135)
    assert (attend.queries, attend.keys, attend.padded_keys, attend.key_cameras) == (270, 210, 256, 4)
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
    pointers(work, half_vectors=tables.half_vectors, phasors=tables.phasors, key_camera=tables.key_camera)
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


def bound_and_pack_launch(
    samples: int, heads: int, keys: int
) -> tuple[tuple[int, int, int], int, int, ctypes.Structure]:
    """What `bound_and_pack` is launched with for so many padded keys, without the tensors."""
    recorder, nothing = Recorder(), torch.empty(0)
    one = torch.empty(1).bfloat16().as_strided((samples, heads, 1, 128), (0, 0, 0, 0))
    packed = torch.empty(1).as_strided((2, 1, 1, keys, 1), (0, 0, 0, 0, 0))
    tables = hopper_tables.HopperTables(*[nothing] * 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "module", lambda _index: recorder)
        hopper._bound_and_pack(one, one, one, nothing, packed, tables)
    return recorder.launches["bound_and_pack_bf16"]


def test_rows_that_are_not_aligned_are_copied(launches: dict) -> None:
    plan, tables, (q, k, v) = case()
    shifted = torch.randn(2, 3, 270, 129).bfloat16()[..., 1:]
    hopper._forward(shifted, k, v, tables.tensors(), plan.query_cameras)
    attend = launches["attend_bf16"][3]
    assert attend.q.data not in (q.data_ptr(), shifted.data_ptr())
    assert (attend.q.data % 16, attend.q.token) == (0, 128)


def test_dense_queries_at_an_odd_address_are_copied(launches: dict) -> None:
    plan, tables, (_, k, v) = case()
    odd = torch.randn(2 * 3 * 270 * 128 + 1).bfloat16()[1:].view(2, 3, 270, 128)
    assert odd.is_contiguous()
    hopper._forward(odd, k, v, tables.tensors(), plan.query_cameras)
    assert launches["attend_bf16"][3].q.data % 16 == 0


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_tables_have_the_kernels_types_whatever_the_default(default: torch.dtype) -> None:
    plan = MeRoPE(128, rotation=False).plan(Cameras(curved_drive(2), PINHOLE), (2, 3))
    usual = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        tables, maps = hopper_tables.make_tables(plan), prepare(plan, torch.float16)
    finally:
        torch.set_default_dtype(usual)
    assert {x.dtype for x in tables.tensors()[:5]} == {torch.float32}
    assert maps.query_tables.shared.dtype == maps.key_tables.shared.dtype == maps.turn.weight.dtype == torch.float32


def test_saturation_keeps_nan() -> None:
    """`packed` of hopper_channels.cuh, read as Python; fminf and fmaxf drop a NaN."""
    bound = re.search(r"bounded\[i\] = (.*?);", SOURCE)
    assert bound is not None
    python = re.sub(r"^(.*?) \? (.*?) : (.*)$", r"(\2 if \1 else \3)", bound[1]).replace("x[i]", "x")
    names = {
        "kMost": 16384.0,
        "fminf": lambda a, b: b if math.isnan(a) else min(a, b),
        "fmaxf": lambda a, b: b if math.isnan(a) else max(a, b),
    }
    assert math.isnan(eval(python, {**names, "x": math.nan}))
    assert [eval(python, {**names, "x": x}) for x in (-1e6, 3.0, math.inf)] == [-16384.0, 3.0, 16384.0]


norms = st.floats(-44, 38.5).map(lambda decades: 10.0**decades)


@given(grad=norms, value=norms)
@example(grad=1e-44, value=1e-44)
@example(grad=3e38, value=3e38)
@example(grad=3e38, value=1e-44)
def test_scales_of_a_head_keep_half_precision_in_its_range(grad: float, value: float) -> None:
    """`HeadScales` of hopper_grad_rows.cu, read as Python, for the largest norms of output gradients and of values."""
    names = {"bounds": SimpleNamespace(x=grad, y=value), "exponent": lambda x: max(math.frexp(x)[1] - 1, -127)}
    found = [re.search(rf"  {name}_exponent = (.*?);", SOURCE) for name in ("grad", "error")]
    grads, errors = (eval(match[1], {**names, "min": min, "max": max}) for match in found if match)
    packed_value = min(value, 16384 * 128**0.5)
    scaled_grad, scaled_product = grad * 2.0**grads, grad * packed_value * 2.0 ** (grads + errors)
    assert scaled_grad < 2**14
    assert 2**8 * scaled_product / 2 < 2**15  # a weight's shift; p (1 - p) 2 |g| |v|
    if grad > 1e-26 and value > 2**-26:
        assert scaled_grad >= 2**13
        assert scaled_product >= 2**5  # within a factor of 8 of the most
    assert all(-126 <= exponent <= 127 for exponent in (grads, -grads, errors, -8 - errors))
    assert all(2.0**-149 <= x * 2.0**-grads < 2.0**128 for x in (2.0**-8, 128**-0.5 * 2.0 ** (-8 - errors)))


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
    def _(grad, q, k, v, out, lse, tables, cameras):  # type: ignore[no-untyped-def]
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


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("Tokens", hopper_module.Tokens),
        ("PackParams", hopper_module.PackParams),
        ("AttendParams", hopper_module.AttendParams),
        ("BoundParams", hopper_module.BoundParams),
        ("PackQueryParams", hopper_module.PackQueryParams),
        ("GradParams", hopper_module.GradParams),
        ("FinishParams", hopper_module.FinishParams),
    ],
)
def test_structures_mirror_those_of_the_kernels(name: str, structure: type[ctypes.Structure]) -> None:
    body = re.search(rf"struct {name} {{(.*?)\n}};", SOURCE, re.DOTALL)
    assert body is not None
    kinds = {"i64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}
    kinds |= {"Tokens": hopper_module.Tokens, "PackParams": hopper_module.PackParams}
    expected = []
    for line in re.sub(r"//.*", "", body[1]).split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*(?:const )?(\w+\*?) (.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        expected += [(one, ctypes.c_void_p if "*" in kind else kinds[kind]) for one in names.split(", ")]
    assert [(field[0], field[1]) for field in structure._fields_] == expected


def test_shared_memory_is_what_the_kernel_lays_out() -> None:
    number: dict[str, int] = {}
    for name, value in re.findall(r"constexpr (?:int|u32) (k\w+) = ([^;]*);", SOURCE):
        number[name] = eval(value.replace("/", "//"), {}, number)
    barriers = 2 * 3 * number["kStages"] * 8
    assert 1008 + number["kBarrierOffset"] + barriers <= hopper.SHARED_BYTES <= 227 * 1024
    assert 1008 + number["kStepBarriers"] + 9 * 8 <= hopper.GRAD_SHARED_BYTES <= 227 * 1024
    assert number["kKeys"] == number["kRows"] == hopper_tables.TILE
    assert number["kStepBytes"] == hopper.STEP * 256
    assert number["kParts"] == hopper.PARTS


@given(key_blocks=st.integers(1, 120), heads=st.integers(1, 12), samples=st.integers(1, 9))
def test_one_grid_bounds_and_packs_everything_once(key_blocks: int, heads: int, samples: int) -> None:
    """`bound_and_pack` of hopper_grad_rows.cu, read as Python."""
    grid, _, _, params = bound_and_pack_launch(samples, heads, keys=16 * key_blocks)
    body = re.search(r"void bound_and_pack\(.*?\n}", SOURCE, re.DOTALL)
    assert body is not None
    names = {"gridDim": SimpleNamespace(x=grid[0]), "kParts": hopper.PARTS, "p": params}
    bounded, packed = [], []
    for block in range(grid[0]):
        names["blockIdx"] = SimpleNamespace(x=block)
        for name in ("per_part", "bounding", "part", "within", "packing", "index"):
            value = re.search(rf"(?:int|,) {name} = (.*?)(?:, \w+ = |;)", body[0])
            names[name] = eval(value[1].replace("/", "//"), {}, names)  # type: ignore[index]
        kernel = "bound_part" if names["within"] < names["bounding"] else "pack_keys"
        call = re.search(rf"{kernel}<kBf16>\((.*?)\);", body[0])
        arguments = eval(f"[{call[1].replace('/', '//')}]", {}, names)  # type: ignore[index]
        (bounded if kernel == "bound_part" else packed).append(tuple(arguments[1:]))
    parts = {(part, head, operand) for part in range(hopper.PARTS) for head in range(heads) for operand in range(2)}
    assert len(bounded) == len(parts)
    assert set(bounded) == parts
    work = [(block, head) for block, first, step in packed for head in range(first, heads, step) if block < key_blocks]
    assert len(work) == key_blocks * heads
    assert set(work) == {(block, head) for block in range(key_blocks) for head in range(heads)}


def test_packed_order_is_a_permutation_of_the_heads_channels() -> None:
    """`channel` of hopper.cu, read as Python, names every channel once and keeps blocks in the half that turns them."""
    body = re.search(r"int translation_channel\(int word, int i\) { return (.*?); }", SOURCE)
    assert body is not None
    assert body[1] == "72 + 4 * (word / 2) + (word & 1) + 2 * i"

    def translation(word: int, i: int) -> int:
        return 72 + 4 * (word // 2) + (word & 1) + 2 * i

    grouped = [6 * c + 3 * (slot & 1) + slot // 2 for c in range(6) for slot in range(6)]
    grouped += [translation(word, i) for word in range(12) for i in range(2)]
    assert sorted(grouped) == [*range(36), *range(72, 96)]
