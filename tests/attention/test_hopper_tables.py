"""What the Hopper kernels are given, on the CPU: tables, structures, and which plans they take."""

import ctypes
import math
import re
from collections.abc import Callable
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


def test_tables_are_contiguous_and_of_every_sample() -> None:
    plan = MeRoPE(128).plan(Cameras(random_poses(2, 3), PINHOLE), (2, 3))
    tables = hopper_tables.make_tables(plan)
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
        (NoEncoding(128).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "nothing to turn"),
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


def test_packed_order_is_a_permutation_of_the_heads_channels() -> None:
    """`channel` of hopper_channels.cuh names every channel once and keeps blocks in the half that turns them."""
    body = re.search(r"int translation_channel\(int word, int i\) { return (.*?); }", SOURCE)
    assert body is not None
    assert body[1] == "72 + 4 * (word / 2) + (word & 1) + 2 * i"

    def translation(word: int, i: int) -> int:
        return 72 + 4 * (word // 2) + (word & 1) + 2 * i

    grouped = [6 * c + 3 * (slot & 1) + slot // 2 for c in range(6) for slot in range(6)]
    grouped += [translation(word, i) for word in range(12) for i in range(2)]
    assert sorted(grouped) == [*range(36), *range(72, 96)]


def c_function(name: str) -> Callable[..., int]:
    """A function of the kernels' source that only returns integers, read as Python."""
    found = re.search(rf"int {name}\(([^)]*)\) {{\n(.*?)\n}}", SOURCE, re.DOTALL)
    assert found is not None
    lines = found[2].replace("&&", "and").replace("/", "//").replace("const int ", "").replace(";", "").splitlines()
    lines = [re.sub(r"if \((.*?)\) return", r"if \1: return", line) for line in lines]
    lines = [re.sub(r"(= |return )(.*?) \? (.*?) : (.*)$", r"\1(\3) if \2 else (\4)", line) for line in lines]
    names: dict[str, Callable[..., int]] = {}
    exec(f"def {name}({found[1].replace('int ', '')}):\n" + "\n".join(lines), names)
    return names[name]


def test_in_the_order_of_sums_what_turns_together_is_with_one_thread() -> None:
    """`sum_place` of hopper_channels.cuh: word w of every chunk is with lane w of a quad."""
    place = c_function("sum_place")
    for half in (0, 1):
        assert sorted(place(half, c, i) for c in range(8) for i in range(4)) == list(range(32))
    for anchor in range(6):
        x, y, z = (place(0, anchor, i) for i in range(3))
        assert (y, z) == (x + 4, x + 8)
    words = [place(0, c, 3) for c in range(6)] + [place(0, 6, i) for i in range(4)] + [place(0, 7, i) for i in (0, 1)]
    assert words[1::2] == [word + 4 for word in words[0::2]]  # cosine and sine turn the two words of a pair
    assert [place(0, 7, i) for i in (2, 3)] == [22, 23]  # native pairs do not turn with the camera
