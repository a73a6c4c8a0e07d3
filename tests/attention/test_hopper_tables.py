"""What the Hopper kernels are given, on the CPU: tables, structures, and which plans they take."""

import ctypes
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merope.attention.kernels import hopper, hopper_module, hopper_tables
from merope.attention.kernels.hopper_visible import TILE
from merope.attention.kernels.prepared import prepare
from merope.attention.plan import AttentionPlan
from merope.attention.visible_cameras import Visibility
from merope.encodings.gta import GTA
from merope.encodings.merope import MeRoPE
from merope.encodings.none import NoEncoding
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens
from tests.attention.test_hopper_arithmetic import view_words
from tests.foreign_plans import ACCEPTED, FOREIGN, random_plan
from tests.scenes import PINHOLE, RIMMED, curved_drive, degenerate_cameras, random_poses

SOURCE = hopper_module.kernel_source(phases=False, visible=False)


def disparity_from_tables(
    tables: hopper_tables.HopperTables, sample: int, camera: int
) -> Tensor:  # [padded keys, 6, 3, 3]
    """The kernel's arithmetic: z negated, then y − 2 m (m · y)."""
    numbers = view_words(tables, sample, camera)[:, :9].double().reshape(-1, 6, 3)
    reflection = torch.eye(3, dtype=torch.float64) - 2 * numbers[..., :, None] * numbers[..., None, :]
    return reflection * torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)


def translation_from_tables(
    tables: hopper_tables.HopperTables, sample: int, camera: int
) -> Tensor:  # [padded keys, 12, 2, 2]
    cosines, sines = tables.phasors[sample, camera].double().unbind(-2)
    cosine, sine = (x.flatten(-2)[tables.key_camera.long()] for x in (cosines, sines))
    return torch.stack((cosine, -sine, sine, cosine), dim=-1).unflatten(-1, (2, 2))


def directions_from_tables(
    tables: hopper_tables.HopperTables, sample: int, camera: int, query: int
) -> Tensor:  # [padded keys, 18, 2, 2]
    """A query's own phases beside those of the keys in its camera's view."""
    words = view_words(tables, sample, camera)[:, 9:].double().unflatten(1, (9, 2))
    cosine, sine = (x.reshape(-1, 18) for x in words.unbind(-2))
    own = torch.view_as_complex(tables.query_rotation[sample, query].double().unflatten(-1, (18, 2)))
    cosine, sine = torch.view_as_real(own * torch.complex(cosine, sine)).unbind(-1)
    return torch.stack((cosine, -sine, sine, cosine), dim=-1).unflatten(-1, (2, 2))


def pair_operator(plan: AttentionPlan, tables: hopper_tables.HopperTables, query: int, key: int, sample: int) -> Tensor:
    """U_ab [128, 128] as the kernels put it together from the tables."""
    camera = query // plan.tokens_per_camera
    own = sample if tables.query_rotation.shape[0] > 1 else 0
    query_frame = tables.query_disparity[own, query].double().unflatten(-1, (3, 3))
    anchors = query_frame @ disparity_from_tables(tables, own, camera)[key]  # [6, 3, 3]
    if tables.phases:
        middle = [*directions_from_tables(tables, own, camera, query)[key]]
    else:
        frames = [x.double().unflatten(-1, (3, 3)) for x in (tables.query_rotation[own], tables.key_rotation[own])]
        middle = [frames[0][query] @ frames[1][key]] * 12
    phases = [torch.view_as_complex(x[own].double()) for x in (tables.query_native, tables.key_native)]
    native = torch.view_as_real(phases[0][query] * phases[1][key])
    rotary = [torch.stack((torch.stack((c, -s)), torch.stack((s, c)))) for c, s in native]
    anchors = anchors.repeat_interleave(2, dim=0)
    return torch.block_diag(*anchors, *middle, *translation_from_tables(tables, own, camera)[key], *rotary)


def assert_tables_hold(plan: AttentionPlan) -> None:
    """Multiplied out as the kernels do, the tables give the plan's operator of every pair, to half precision."""
    tables = hopper_tables.make_tables(plan)
    for sample in range(plan.batch):
        for query in range(plan.query_tokens):
            exact = plan.operators(query, sample)
            ours = [pair_operator(plan, tables, query, key, sample) for key in range(plan.key_tokens)]
            torch.testing.assert_close(torch.stack(ours), exact, rtol=0, atol=3e-3)


@pytest.mark.parametrize("name", ACCEPTED)
def test_foreign_plans_of_the_right_structure_are_taken(name: str) -> None:
    plan = ACCEPTED[name]()
    assert hopper_tables.why_not_plan(plan) is None
    assert_tables_hold(plan)


REASONS = {
    "translation by token": "they turn keys alone (query side",
    "translation by token, keys alone": "one table row for every camera",
    "translation with a query operator": "they turn keys alone (query side",
    "translation in six pairs": "not a phasor [6, 2]",
    "translation with split halves": "neighbouring channels",
    "translation of shortened phasors": "hold rotations",
    "translation by head": "between heads",
    "native with split halves": "neighbouring channels",
    "native with one phase, split halves": "not a phasor [1, 2]",
    "native by query camera": "between query cameras",
    "native of 4×4 matrices": "not a matrix [1, 4, 4]",
    "native by camera": "one table row for every token",
    "rotation by query camera": "between query cameras",
    "rotation of quaternions": "not a quaternion [1, 4]",
    "rotation of 4×4 matrices": "not a matrix [1, 4, 4]",
    "rotation of twelve matrices": "not a matrix [12, 3, 3]",
    "rotation of large matrices": "hold rotations",
    "rotation by camera": "one table row for every token",
    "directions by camera": "one table row for every token",
    "directions with a query operator of matrices": "not a matrix [1, 3, 3] (query side",
    "directions with one phase": "not a phasor [1, 2]",
    "directions with split halves": "neighbouring channels",
    "directions by head": "between heads",
    "directions of shortened phasors": "hold rotations",
    "rotation with a query operator of phasors": "not a phasor [18, 2] (query side",
    "disparity that spins": "MinRot",
    "disparity of three anchors": "not a quaternion [3, 4]",
    "disparity of matrices": "not a matrix [6, 3, 3]",
    "disparity of 2×2 matrices": "not a matrix [18, 2, 2]",
    "disparity with a query operator of six": "not a matrix [6, 3, 3] (query side",
    "one block over two places": "paper's partition",
    "a head of 64": "heads of 128",
    "matrices of five": "paper's partition",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_plans_of_another_structure_are_refused(name: str) -> None:
    assert REASONS[name] in (hopper_tables.why_not_plan(FOREIGN[name]()) or "")


@given(seed=st.integers(0, 2**31))
def test_random_plans_are_right_or_refused(seed: int) -> None:
    plan = random_plan(seed)
    reason = hopper_tables.why_not_plan(plan)
    if reason is None:
        assert_tables_hold(plan)
    else:
        assert reason.startswith(("they ", "on channels "))


def test_some_random_plans_are_taken_and_some_are_not() -> None:
    taken = [hopper_tables.why_not_plan(random_plan(seed)) is None for seed in range(40)]
    assert 4 <= sum(taken) <= 36


@pytest.mark.parametrize("direction_scale", [None, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("cameras", "grid"), [(1, (1, 1)), (2, (5, 7)), (13, (9, 16)), (31, (3, 4))])
def test_the_papers_plan_and_direction_phases_take_the_kernel(
    cameras: int, grid: tuple[int, int], dtype: torch.dtype, direction_scale: float | None
) -> None:
    encoding = MeRoPE(128, direction_scale=direction_scale)
    plan = encoding.plan(Cameras(curved_drive(cameras).to(dtype), PINHOLE), grid)
    assert hopper_tables.why_not_plan(plan) is None
    assert hopper_tables.has_phases(plan) is (direction_scale is not None)
    far = encoding.plan(Cameras(random_poses(2, cameras, spread_m=6.4e6), PINHOLE), grid)
    assert hopper_tables.why_not_plan(far) is None


@given(
    seed=st.integers(0, 2**31),
    clips=st.sampled_from([1, 3]),
    grid=st.sampled_from([(2, 3), (1, 1), (5, 9)]),
    direction_scale=st.sampled_from([None, 50.0]),
)
def test_tables_hold_the_plan_to_half_precision(
    seed: int, clips: int, grid: tuple[int, int], direction_scale: float | None
) -> None:
    encoding = MeRoPE(128, direction_scale=direction_scale)
    plan = encoding.plan(Cameras(random_poses(clips, 3, seed=seed), PINHOLE), grid)
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


@pytest.mark.parametrize("direction_scale", [None, 50.0])
@pytest.mark.parametrize("off", ["disparity", "rotation", "translation"])
def test_blocks_that_are_off_become_the_identity(off: str, direction_scale: float | None) -> None:
    encoding = MeRoPE(128, direction_scale=direction_scale, **{off: False})  # type: ignore[arg-type]
    plan = encoding.plan(Cameras(curved_drive(3), PINHOLE), (2, 3))
    assert hopper_tables.why_not_plan(plan) is None
    u = pair_operator(plan, hopper_tables.make_tables(plan), 4, 17, 0)
    torch.testing.assert_close(u, plan.operator(4, 17), rtol=0, atol=3e-3)


def test_cross_attention_names_the_cameras_of_the_keys() -> None:
    queries, keys = Cameras(curved_drive(2), PINHOLE), Cameras(random_poses(5), PINHOLE)
    plan = MeRoPE(128).plan(queries, (3, 3), key=keys, key_grid=(7, 5))
    tables = hopper_tables.make_tables(plan)
    assert tables.key_views.shape == (1, 2, 2, 10 * 128)
    torch.testing.assert_close(pair_operator(plan, tables, 13, 174, 0), plan.operator(13, 174), rtol=0, atol=3e-3)


def test_padding_neither_turns_nor_points_outside_the_tables() -> None:
    plan = MeRoPE(128).plan(Cameras(curved_drive(2), PINHOLE), (9, 8))
    tables = hopper_tables.make_tables(plan)
    assert tables.key_camera.shape == (256,)
    assert bool((tables.key_camera < tables.phasors.shape[2]).all())
    assert not any(view_words(tables, 0, camera)[144:].any() for camera in range(2))


@pytest.mark.parametrize("direction_scale", [None, 50.0])
def test_views_name_the_cameras_of_keys(direction_scale: float | None) -> None:
    plan = MeRoPE(128, direction_scale=direction_scale).plan(Cameras(random_poses(2, 3), PINHOLE), (9, 8))
    tables = hopper_tables.make_tables(plan)
    last = tables.key_views[..., 8 * TILE :].unflatten(-1, (-1, 2 if direction_scale is None else 4))[..., :TILE, 1]
    assert len(tables.key_camera.unique()) == 3
    assert bool((last.flatten(2) == tables.key_camera).all())


@pytest.mark.parametrize("direction_scale", [None, 50.0])
def test_tables_are_contiguous_and_of_every_sample(direction_scale: float | None) -> None:
    plan = MeRoPE(128, direction_scale=direction_scale).plan(Cameras(random_poses(2, 3), PINHOLE), (2, 3))
    tables = hopper_tables.make_tables(plan)
    assert all(tensor.is_contiguous() for tensor in tables.tensors())
    assert {tensor.shape[0] for tensor in tables.tensors()[:7]} == {2}


def some_cameras(*has_pose: list[bool]) -> Cameras:
    flags = torch.tensor(has_pose)
    return Cameras(random_poses(*flags.shape), PINHOLE, flags)


def some_poses(*has_pose: list[bool], key: Cameras | None = None) -> AttentionPlan:
    return MeRoPE(128).plan(some_cameras(*has_pose), (1, 2), key=key)


def late_queries() -> AttentionPlan:
    """As no encoding makes them: a token after the cameras' has one."""
    plan = MeRoPE(128).plan(Cameras(curved_drive(2), PINHOLE), (1, 2), extra_tokens=2)
    flags = plan.query_has_camera.clone()
    flags[0, 4] = True
    return replace(plan, query_has_camera=flags)


@pytest.mark.parametrize("direction_scale", [None, 50.0])
@pytest.mark.parametrize("lens", [PINHOLE, RIMMED])
def test_tables_hold_the_pairs_that_both_have_a_camera(lens: Lens, direction_scale: float | None) -> None:
    encoding = MeRoPE(128, direction_scale=direction_scale)
    plan = encoding.plan(Cameras(random_poses(2, 2), lens), (3, 10), extra_tokens=2)
    assert hopper_tables.why_not_plan(plan) is None
    tables = hopper_tables.make_tables(plan)
    queries, keys = (flags[0].nonzero().squeeze(-1) for flags in (plan.query_has_camera, plan.key_has_camera))
    assert 0 < len(keys) < plan.key_tokens
    assert (tables.query_native.shape[1], tables.key_native.shape[1]) == (60, len(keys))
    for sample, query, place in ((0, 0, 0), (1, -1, 1), (1, 1, len(keys) - 1)):
        token = int(queries[query])
        u = pair_operator(plan, tables, token, place, sample)
        torch.testing.assert_close(u, plan.operator(token, int(keys[place]), sample), rtol=0, atol=3e-3)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (MeRoPE(192).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "heads of 128"),
        (MeRoPE(128, partition=(36, 48, 12, 32)).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "paper's partition"),
        (MeRoPE(128, fractions=(0.0, 0.5, 1.0)).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "quaternion [3, 4]"),
        (MeRoPE(128, anchor_scale=12.5).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "not a phasor [18, 2]"),
        (MeRoPE(128, anchor_frame="transport").plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "MinRot"),
        (MeRoPE(128, transform_values=False).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "values"),
        (some_poses([True, False], [False, True]), "the same tokens with a camera in every sample"),
        (some_poses([False, False], [False, False]), "a query and a key with a camera"),
        (some_poses([True, True], key=some_cameras([False, False])), "a query and a key with a camera"),
        (
            MeRoPE(128).plan(
                Cameras(curved_drive(2), PINHOLE), (2, 3), extra_tokens=1, sees=Visibility.block_causal(2, 1)
            ),
            "camera for every token, where `sees`",
        ),
        (late_queries(), "among the cameras' tokens"),
        (GTA(128).plan(Cameras(curved_drive(2), PINHOLE), (2, 3)), "paper's partition"),
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
@pytest.mark.parametrize("options", [{"rotation": False}, {"direction_scale": 50.0}], ids=str)
def test_tables_have_the_kernels_types_whatever_the_default(default: torch.dtype, options: dict) -> None:
    plan = MeRoPE(128, **options).plan(Cameras(curved_drive(2), PINHOLE), (2, 3))
    usual = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        tables, maps = hopper_tables.make_tables(plan), prepare(plan, torch.float16)
    finally:
        torch.set_default_dtype(usual)
    assert {x.dtype for x in tables.tensors()[:5]} == {torch.float32}
    assert maps.query_tables.shared.dtype == maps.key_tables.shared.dtype == maps.turn.weight.dtype == torch.float32


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


@pytest.mark.parametrize(("phases", "visible"), [(False, False), (True, False), (False, True), (True, True)])
def test_shared_memory_is_what_the_kernel_lays_out(phases: bool, visible: bool) -> None:
    number: dict[str, int] = {"true": 1, "false": 0}
    source = hopper_module.kernel_source(phases, visible)
    for name, value in re.findall(r"^constexpr (?:bool|int|u32) (k\w+) = ([^;]*);", source, re.MULTILINE):
        number[name] = eval(value.replace("/", "//"), {}, number)
    barriers = 2 * 3 * number["kStages"] * 8
    assert 1008 + number["kBarrierOffset"] + barriers <= hopper.SHARED_BYTES <= 227 * 1024
    assert 1008 + number["kStepBarriers"] + 9 * 8 <= hopper.GRAD_SHARED_BYTES <= 227 * 1024
    assert number["kKeys"] == number["kRows"] == hopper.ROWS == TILE
    if not visible:
        columns = (2 + 8) * number["kWideRows"] * 4  # shifts and factors; parts of eight warps
        assert 1008 + number["kColumnsOffset"] + columns <= hopper.WIDE_SHARED_BYTES <= 227 * 1024
        assert number["kWideRows"] == hopper.WIDE_ROWS
        assert all(number[f"k{of}Offset"] % 1024 == 0 for of in ("Weights", "WideTiles"))  # the swizzle's period
        assert number["kWideHalf"] % 1024 == 0
    assert number["kStepBytes"] == hopper.STEP * 256
    assert number["kParts"] == hopper.PARTS
    registers = number["kCopyingRegisters"] + number["kTurningRegisters"] + 2 * number["kAttendingRegisters"]
    assert registers * 128 == 65536
