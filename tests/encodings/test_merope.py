"""MeRoPE against the paper's equations, and the properties that the paper claims."""

import math
import re

import numpy as np
import paper_operator
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import (
    FISHEYE,
    PINHOLE,
    curved_drive,
    degenerate_cameras,
    random_poses,
    random_qkv,
    random_rotations,
    straight_drive,
)
from torch import Tensor

import merope
from merope import Cameras, MeRoPE, Pinhole
from merope.geometry.minrot import minrot
from merope.geometry.poses import relative, rigid

GRID = (3, 5)


def paper_operators(query: Cameras, key: Cameras, grid: tuple[int, int], head_dim: int) -> np.ndarray:
    """U of the paper for all pairs of tokens, from the cameras' poses and rays only."""

    def tokens(cameras: Cameras) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        rays, _ = cameras.rays(grid)
        return [
            (cameras.world_from_camera[v].numpy(), rays[v, p].numpy(), np.array([v, p % grid[1], p // grid[1]]))
            for v in range(cameras.count)
            for p in range(grid[0] * grid[1])
        ]

    return np.array([[paper_operator.operator(*a, *b, head_dim) for b in tokens(key)] for a in tokens(query)])


@pytest.mark.parametrize("head_dim", [128, 192])
@pytest.mark.parametrize("name", ["random", "curved", "fisheye", "straight", "coincident"])
def test_backends_equal_the_papers_equations(name: str, head_dim: int) -> None:
    cameras = {
        "random": Cameras(random_poses(3), PINHOLE),
        "curved": Cameras(curved_drive(3), PINHOLE),
        "fisheye": Cameras(random_poses(3, seed=2), FISHEYE),
        "straight": Cameras(straight_drive(3), Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90)),
        "coincident": Cameras(random_poses(1).repeat(3, 1, 1), PINHOLE),
    }[name]
    grid = (3, 3)
    dense = paper_operators(cameras, cameras, grid, head_dim)
    plan = MeRoPE(head_dim=head_dim).plan(cameras, grid)
    ours = torch.stack([plan.operators(token) for token in range(plan.query_tokens)])
    assert np.abs(ours.numpy() - dense).max() < 1e-11

    q, k, v = random_qkv(1, 1, plan.query_tokens, head_dim)
    expected = torch.from_numpy(paper_operator.attention(q[0, 0].numpy(), k[0, 0].numpy(), v[0, 0].numpy(), dense))
    for backend in ("reference", "sdpa"):
        assert (merope.attend(q, k, v, plan, backend=backend)[0, 0] - expected).abs().max() < 1e-11
        single = merope.attend(q.float(), k.float(), v.float(), plan, backend=backend)[0, 0].double()
        assert (single - expected).norm() / expected.norm() < 1e-5


def test_cross_attention_equals_the_papers_equations() -> None:
    query, key = Cameras(random_poses(2), PINHOLE), Cameras(random_poses(3, seed=4), FISHEYE)
    plan = MeRoPE().plan(query, GRID, key=key, key_grid=GRID)
    dense = paper_operators(query, key, GRID, 128)
    ours = torch.stack([plan.operators(token) for token in range(plan.query_tokens)])
    assert np.abs(ours.numpy() - dense).max() < 1e-11


@pytest.mark.parametrize("coarse", ["query", "key"])
def test_cross_attention_has_the_precision_of_the_finer_side(coarse: str) -> None:
    query, key = (random_poses(2, seed=seed) for seed in (0, 4))
    query, key = (query.float(), key) if coarse == "query" else (query, key.float())
    plan = MeRoPE().plan(Cameras(query, PINHOLE), GRID, key=Cameras(key, PINHOLE))
    tables = {operator.table.dtype for block in plan.blocks for operator in block.operators}
    assert tables == {torch.float64}


def orthogonality_defect(plan: merope.AttentionPlan) -> float:
    """Largest entry of UᵀU − I over all pairs of tokens."""
    unit = torch.eye(plan.head_dim, dtype=torch.float64)
    operators = (plan.operators(token) for token in range(plan.query_tokens))
    return max(float((u.mT @ u - unit).abs().max()) for u in operators)


@pytest.mark.parametrize("anchor_frame", ["minrot", "transport"])
@pytest.mark.parametrize("name", degenerate_cameras())
def test_orthogonal_in_degenerate_geometry(name: str, anchor_frame: str) -> None:
    plan = MeRoPE(anchor_frame=anchor_frame).plan(degenerate_cameras()[name], (3, 3))
    assert orthogonality_defect(plan) < 1e-12


@given(
    seed=st.integers(0, 10**6),
    exponent=st.floats(-12, 7),
    anchor_frame=st.sampled_from(["minrot", "transport"]),
    fisheye=st.booleans(),
)
def test_orthogonal_for_any_cameras(seed: int, exponent: float, anchor_frame: str, fisheye: bool) -> None:
    poses = random_poses(3, seed=seed, spread_m=10**exponent)
    plan = MeRoPE(anchor_frame=anchor_frame).plan(Cameras(poses, FISHEYE if fisheye else PINHOLE), (1, 3))
    assert orthogonality_defect(plan) < 1e-12


class BackwardLens:
    """A lens that looks exactly backwards with its middle column, onto MinRot's own pole."""

    width, height, batch_shape = 150, 90, torch.Size([])

    def unproject(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        plane = (pixels - torch.tensor([75.0, 45.0], dtype=torch.float64)) / 60
        rays = torch.nn.functional.normalize(torch.cat((plane, -torch.ones_like(plane[..., :1])), dim=-1), dim=-1)
        return rays, torch.ones(pixels.shape[:-1], dtype=torch.bool)


@pytest.mark.parametrize("anchor_frame", ["minrot", "transport"])
def test_ray_exactly_backwards_is_orthogonal_and_has_a_fixed_frame(anchor_frame: str) -> None:
    cameras = Cameras(random_poses(3), BackwardLens())
    assert torch.equal(cameras.rays((3, 5))[0][0, 7], torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64))
    assert orthogonality_defect(MeRoPE(anchor_frame=anchor_frame).plan(cameras, (3, 5))) < 1e-12
    assert torch.equal(minrot(cameras.rays((3, 5))[0][0, 7]), torch.diag(torch.tensor([-1.0, 1.0, -1.0]).double()))


@pytest.mark.parametrize("exponent", range(-3, 8))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_and_norms_are_bounded_at_every_baseline(exponent: int, dtype: torch.dtype) -> None:
    """|s_ab| ≤ ‖q‖‖k‖/√d and ‖U v‖ = ‖v‖ with q, k and v turned in the dtype, within its rounding."""
    plan = MeRoPE().plan(Cameras(straight_drive(3, step_m=10.0**exponent), PINHOLE), GRID)
    slack = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2 * 2**-8}[dtype]
    q, k = (torch.randn(1, 1, 1, plan.key_tokens, 128, dtype=torch.float64).to(dtype) for _ in range(2))
    q[0, 0, 0, ::2] = k[0, 0, 0, ::2]  # some are aligned, where the bound is tight
    for group in range(3):
        keys, queries = [], []
        for block in plan.blocks:
            operator = block.key.at(slice(None), slice(None), slice(group, group + 1))
            keys.append(operator.apply(k[..., block.channels]))
            turned = q[..., block.channels]
            queries.append(turned if block.query is None else block.query.apply(turned, transpose=True))
        turned_k, turned_q = torch.cat(keys, dim=-1), torch.cat(queries, dim=-1)
        assert turned_k.dtype == dtype
        for before, after in ((k, turned_k), (q, turned_q)):
            assert (after.double().norm(dim=-1) / before.double().norm(dim=-1) - 1).abs().max() < slack
        logits = turned_q.double() @ turned_k.double().mT / math.sqrt(128)
        bound = q.double().norm(dim=-1)[..., :, None] * k.double().norm(dim=-1)[..., None, :] / math.sqrt(128)
        assert (logits.abs() <= bound * (1 + slack) ** 2).all()


def output(
    poses: Tensor, anchor_frame: str = "minrot", lens: merope.Lens = PINHOLE, grid: tuple[int, int] = GRID
) -> Tensor:
    plan = MeRoPE(anchor_frame=anchor_frame).plan(Cameras(poses, lens), grid)
    torch.manual_seed(0)
    return merope.attend(*random_qkv(1, 2, plan.query_tokens, 128), plan)


@given(seed=st.integers(0, 10**6), path=st.sampled_from(["random", "straight", "curved"]), exponent=st.floats(-2, 3))
def test_any_rigid_change_of_the_world_changes_nothing(seed: int, path: str, exponent: float) -> None:
    poses = {"random": random_poses(3, seed=seed), "straight": straight_drive(4), "curved": curved_drive(4)}[path]
    world = rigid(random_rotations(seed=seed + 1), 10**exponent * random_poses(seed=seed + 2)[:3, 3])
    centred = Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90)
    for anchor_frame in ("minrot", "transport"):
        before, after = (output(p, anchor_frame, centred) for p in (poses, world @ poses))
        assert (before - after).abs().max() < 1e-9


@given(seed=st.integers(0, 10**6), exponent=st.floats(-3, -1), far=st.booleans())
def test_nearly_straight_drives_are_as_invariant_as_their_conditioning_allows(
    seed: int, exponent: float, far: bool
) -> None:
    """A drift of ε sideways per metre: frames amplify rounding by 2/ε; from 1e-3 on, 1e-9 holds, and 1e-6 far away."""
    poses = straight_drive(4)
    poses[:, 0, 3] = 10**exponent * poses[:, 2, 3]
    world = rigid(random_rotations(seed=seed), torch.full((3,), 3.7e6 if far else 100.0, dtype=torch.float64))
    for anchor_frame in ("minrot", "transport"):
        assert (output(poses, anchor_frame) - output(world @ poses, anchor_frame)).abs().max() < (1e-6 if far else 1e-9)


@pytest.mark.parametrize("anchor_frame", ["minrot", "transport"])
@pytest.mark.parametrize("offset_m", [30.0, 300.0])
def test_rounding_of_float32_poses_does_not_pick_the_frame(offset_m: float, anchor_frame: str) -> None:
    """A straight drive in a turned and shifted world, rounded to float32: off by rounding, not by a spinning frame."""
    centred = Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90)
    exact = output(straight_drive(4), anchor_frame, centred)
    for seed in range(6):
        world = rigid(random_rotations(seed=seed), torch.full((3,), offset_m, dtype=torch.float64))
        rounded = output((world @ straight_drive(4)).float(), anchor_frame, centred)
        assert (rounded - exact).abs().max() < 1e-5 * offset_m


@pytest.mark.parametrize("offset_m", [0.0, 6.4e6])
def test_a_token_relates_to_itself_by_the_identity_however_coarse_its_pose(offset_m: float) -> None:
    poses = straight_drive(2)
    poses[:, 0, 3] += offset_m
    plan = MeRoPE().plan(Cameras(poses.float(), PINHOLE), GRID)
    for token in (0, 7, 22):
        torch.testing.assert_close(plan.operator(token, token), torch.eye(128), rtol=0, atol=1e-6)


def test_the_precision_of_a_plan_does_not_decide_what_rounding_of_its_poses_is() -> None:
    """Poses that came in float32 round alike in a float64 plan, and float64 poses do not round in a float32 one."""
    centred = Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90)
    nearly_straight = straight_drive(4)
    nearly_straight[:, 0, 3] = 1e-5 * nearly_straight[:, 2, 3]
    world = rigid(random_rotations(seed=1), torch.full((3,), 300.0, dtype=torch.float64))
    for poses in ((world @ straight_drive(4)).float(), world @ nearly_straight):
        single, double = (
            MeRoPE().plan(Cameras(poses, centred, plan_dtype=dtype), GRID).blocks[0].key.matrices(torch.float64)
            for dtype in (torch.float32, torch.float64)
        )
        assert (single - double).abs().max() < 1e-6


@pytest.mark.parametrize("path", ["straight", "curved", "highway"])
def test_a_world_6400_km_away_changes_nothing(path: str, highway: Tensor) -> None:
    poses = {"straight": straight_drive(5), "curved": curved_drive(5), "highway": highway}[path]
    local = relative(poses[0], poses)
    world = rigid(random_rotations(seed=11), torch.tensor([4.2e6, -3.1e6, 3.7e6], dtype=torch.float64))
    centred = Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90)
    for anchor_frame in ("minrot", "transport"):
        assert (output(local, anchor_frame, centred) - output(world @ local, anchor_frame, centred)).abs().max() < 1e-6
    assert (output(local) - output(poses)).abs().max() < 1e-6


@given(seed=st.integers(0, 10**6))
def test_scale_is_metric(seed: int) -> None:
    poses = random_poses(3, seed=seed)
    scaled = rigid(poses[:, :3, :3], 1.01 * poses[:, :3, 3])
    assert (output(poses) - output(scaled)).abs().max() > 1e-4


def test_each_camera_block_sees_what_it_should() -> None:
    """Scale reaches translation and not rotation; a turn in place reaches rotation and not translation."""
    poses = random_poses(3)
    moved = MeRoPE().plan(Cameras(rigid(poses[:, :3, :3], 1.01 * poses[:, :3, 3]), PINHOLE), GRID).tensors()
    plain = MeRoPE().plan(Cameras(poses, PINHOLE), GRID).tensors()
    assert torch.allclose(moved["rotation.key"], plain["rotation.key"], atol=1e-12)
    assert not torch.allclose(moved["translation.key"], plain["translation.key"], atol=1e-3)
    # Angular fractions of the arc do not depend on how far the centres are apart, only on where they lie.
    assert torch.allclose(moved["disparity.key"], plain["disparity.key"], atol=1e-12)


def test_permuting_key_cameras_permutes_nothing_but_the_sum() -> None:
    query, key_poses, order = Cameras(random_poses(2), PINHOLE), random_poses(4, seed=8), torch.tensor([2, 0, 3, 1])
    q, k, v = random_qkv(1, 2, 2 * 15, 128, 4 * 15)
    times = torch.tensor([0.0, 1.5, 2.0, 7.25])
    plan = MeRoPE().plan(query, GRID, key=Cameras(key_poses, PINHOLE), key_times=times)
    shuffled = MeRoPE().plan(query, GRID, key=Cameras(key_poses[order], PINHOLE), key_times=times[order])
    k2, v2 = (x.unflatten(2, (4, 15))[:, :, order].flatten(2, 3) for x in (k, v))
    assert (merope.attend(q, k, v, plan) - merope.attend(q, k2, v2, shuffled)).abs().max() < 1e-12


def test_translation_phase_at_a_known_displacement() -> None:
    """A quarter of the shortest wavelength forward is a quarter turn of the z axis' first pair, and of nothing else."""
    cameras = Cameras(straight_drive(2, step_m=0.125), PINHOLE)
    u = MeRoPE().plan(cameras, (1, 1)).operator(0, 1)[72:96, 72:96]
    turned = u[16:18, 16:18]  # axis-major: x 0–7, y 8–15, z 16–23
    assert torch.allclose(turned, torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64), atol=1e-12)
    assert torch.allclose(u[:16, :16], torch.eye(16, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize(
    "off", [("disparity",), ("rotation",), ("translation",), ("disparity", "rotation", "translation")]
)
def test_blocks_that_are_off_are_the_identity(off: tuple[str, ...]) -> None:
    channels = {"disparity": slice(0, 36), "rotation": slice(36, 72), "translation": slice(72, 96)}
    cameras = Cameras(random_poses(3), PINHOLE)
    full = MeRoPE().plan(cameras, GRID).operator(0, 40)
    ablated = MeRoPE(**dict.fromkeys(off, False)).plan(cameras, GRID).operator(0, 40)
    for name, span in channels.items():
        expected = torch.eye(span.stop - span.start, dtype=torch.float64) if name in off else full[span, span]
        assert (ablated[span, span] - expected).abs().max() < 1e-14


def test_rotation_alone_factors_per_token_and_camera_blocks_group() -> None:
    cameras = Cameras(random_poses(3), PINHOLE)
    assert MeRoPE(disparity=False, translation=False).plan(cameras, GRID).groups == 1
    assert MeRoPE().plan(cameras, GRID).groups == 3


def test_single_frequency_repeats_the_geometric_mean_wavelength() -> None:
    cameras = Cameras(straight_drive(2, step_m=2.5), PINHOLE)  # a quarter of 10 m
    u = MeRoPE(frequencies=1).plan(cameras, (1, 1)).operator(0, 1)[88:96, 88:96]
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(u, torch.block_diag(*[quarter] * 4), atol=1e-12)


def test_two_frequencies_stand_side_by_side_on_neighbouring_pairs() -> None:
    cameras = Cameras(straight_drive(2, step_m=0.125), PINHOLE)  # a quarter of the shortest wavelength
    u = MeRoPE(frequencies=2).plan(cameras, (1, 1)).operator(0, 1)[88:96, 88:96]
    turns = [2 * math.pi * 0.125 / wavelength_m for wavelength_m in (0.5, 0.5, 200.0, 200.0)]
    assert torch.allclose(u.diagonal()[::2], torch.tensor(turns, dtype=torch.float64).cos(), atol=1e-12)


def test_custom_partition_fractions_and_times() -> None:
    encoding = MeRoPE(head_dim=64, partition=(18, 12, 18, 16), fractions=(0.0, 0.5, 1.0), native_split=(8, 4, 4))
    plan = encoding.plan(Cameras(random_poses(3), PINHOLE), GRID, times=[0.5, 1.25, 102.0])
    assert orthogonality_defect(plan) < 1e-12
    time_block = plan.operator(0, 44)[48:56, 48:56]
    assert torch.allclose(time_block[0, 0], torch.tensor(101.5, dtype=torch.float64).cos())


def test_transport_has_the_same_anchor_directions() -> None:
    """Both frames carry e_z to the same anchors; they differ by a turn about the anchor."""
    cameras = Cameras(curved_drive(4), PINHOLE)
    tables = [MeRoPE(anchor_frame=f).plan(cameras, GRID).blocks[0].key.matrices() for f in ("minrot", "transport")]
    assert (tables[0][..., 2] - tables[1][..., 2]).abs().max() < 1e-12
    assert (tables[0] - tables[1]).abs().max() > 0.01


def test_transport_is_smooth_where_minrot_is_not() -> None:
    """Sideways noise of 1 mm on a straight drive of 10 m: MinRot frames jump, transported frames do not."""
    noisy = straight_drive(2, step_m=10.0)
    noisy[1, :2, 3] = torch.tensor([6e-4, -8e-4])
    change = {}
    for frame in ("minrot", "transport"):
        plans = [MeRoPE(anchor_frame=frame).plan(Cameras(p, PINHOLE), GRID) for p in (straight_drive(2, 10.0), noisy)]
        first, second = (
            plan.blocks[0].key.matrices()[0, 0, 1, :15] for plan in plans
        )  # camera 1 looks back at camera 0
        change[frame] = float((first - second).abs().max())
    assert change["minrot"] > 0.5
    assert change["transport"] < 0.02


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"head_dim": 100}, "head_dim"),
        ({"partition": (36, 36, 24, 30)}, "partition"),
        ({"partition": (35, 37, 24, 32)}, "disparity"),
        ({"partition": (36, 35, 24, 33)}, "rotation"),
        ({"partition": (36, 36, 22, 34)}, "translation"),
        ({"native_split": (15, 9, 8)}, "native_split"),
        ({"fractions": (0.0, 1.5)}, "fractions"),
        ({"wavelengths_m": (200.0, 0.5)}, "wavelengths_m"),
        ({"frequencies": 3}, "frequencies"),
        ({"anchor_frame": "frenet"}, "anchor_frame"),
    ],
)
def test_configs_that_do_not_fill_a_head_are_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){word}.*got.*;"):
        merope.encoding("merope", **options)


@pytest.mark.parametrize("head_dim", [56, 64, 72, 80, 88, 96, 100, 160, 256, 20480])
def test_the_error_of_another_head_names_a_partition_that_fits(head_dim: int) -> None:
    with pytest.raises(ValueError, match=r"^head_dim must be one of \[128, 192\]") as refusal:
        merope.encoding("merope", head_dim=head_dim)
    partition = tuple(map(int, re.findall(r"\d+", str(refusal.value).partition("such as")[2])))
    assert merope.encoding("merope", head_dim=head_dim, partition=partition).channels == partition
    assert head_dim != 64 or partition == (18, 18, 12, 16)
