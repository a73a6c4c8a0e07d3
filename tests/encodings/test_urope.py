"""URoPE against its definition written out pair by pair, its reduction to 2-D RoPE, and the points no camera sees."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import (
    LENSES,
    PINHOLE,
    assert_backends_agree,
    curved_drive,
    random_poses,
    random_qkv,
    random_rotations,
    straight_drive,
)
from torch import Tensor

import merope
from merope import Cameras, Lens, Pinhole, UnifiedCamera
from merope.encodings.urope import URoPE, pixels_seen, seen_half_angle_rad
from merope.geometry.poses import rigid

GRID = (2, 3)
CPU = torch.device("cpu")


def rotation_blocks(phases: np.ndarray) -> np.ndarray:  # [n] -> [2n, 2n]
    dense = np.zeros((2 * len(phases), 2 * len(phases)))
    for m, phase in enumerate(phases):
        c, s = np.cos(phase), np.sin(phase)
        dense[2 * m : 2 * m + 2, 2 * m : 2 * m + 2] = [[c, -s], [s, c]]
    return dense


def rope(difference: tuple[float, float, float]) -> np.ndarray:  # [128, 128]
    """Rot(ω·difference) over time (32 channels), column (48) and row (48), base 10000."""
    phases = [x * 10000.0 ** (-np.arange(0, n, 2) / n) for x, n in zip(difference, (32, 48, 48), strict=True)]
    return rotation_blocks(np.concatenate(phases))


def patch_seen(camera_i: np.ndarray, camera_j: np.ndarray, column: int, row: int, depth_m: float) -> np.ndarray:
    """Column and row, in camera i, of the patch (column, row) of camera j at a depth, through PINHOLE."""
    intrinsics = np.array([[120.0, 0, 128.0], [0, 125.0, 70.0], [0, 0, 1]])
    pixel = np.array([(column + 0.5) * 256 / GRID[1], (row + 0.5) * 144 / GRID[0], 1.0])
    point = np.append(depth_m * np.linalg.solve(intrinsics, pixel), 1.0)
    x, y, z = (np.linalg.inv(camera_i) @ camera_j @ point)[:3]
    image = intrinsics @ np.array([x, y, max(z, 0.05)])
    u, v = np.clip(image[:2] / image[2], [-256, -144], [512, 288])
    return np.array([u / 256 * GRID[1] - 0.5, v / 144 * GRID[0] - 0.5])


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_definition_pair_by_pair(seed: int) -> None:
    poses = random_poses(3, seed=seed, spread_m=2.0)
    plan = URoPE().plan(Cameras(poses, PINHOLE), GRID, times=[0.0, 2.5, 100.0])
    tokens = [(i, p % 3, p // 3) for i in range(3) for p in range(6)]
    for head, depth_m in enumerate((2.0, 8.0, 14.0, 20.0)):
        for a, (i, column_a, row_a) in enumerate(tokens[::5]):
            ours = plan.operators(5 * a, head=head).numpy()
            for b, (j, column_b, row_b) in enumerate(tokens):
                column, row = patch_seen(poses[i].numpy(), poses[j].numpy(), column_b, row_b, depth_m)
                time = (0.0, 2.5, 100.0)[j] - (0.0, 2.5, 100.0)[i]
                assert np.abs(ours[b] - rope((time, column - column_a, row - row_a))).max() < 1e-9


@pytest.mark.parametrize("name", LENSES)
def test_within_one_camera_it_is_ordinary_2d_rope(name: str) -> None:
    plan = URoPE().plan(Cameras(random_poses(2), LENSES[name]), GRID)
    for head in range(4):
        for a in range(6, 12):
            u = plan.operators(a, head=head)[6:].numpy()
            for b in range(6):
                expected = rope((0.0, b % 3 - (a - 6) % 3, b // 3 - (a - 6) // 3))
                assert np.abs(u[b] - expected).max() < 1e-12


SMALL = URoPE(head_dim=32)


@pytest.mark.parametrize("heads", [1, 3, 4, 6])
@pytest.mark.parametrize("transform_values", [True, False])
def test_backends_agree_for_any_number_of_heads(heads: int, transform_values: bool) -> None:
    encoding = URoPE(head_dim=32, transform_values=transform_values)
    assert_backends_agree(encoding.plan(Cameras(random_poses(3), PINHOLE), GRID), heads=heads)


@pytest.mark.parametrize("per_clip", [True, False])
def test_a_batch_is_its_clips_and_cameras_one_by_one(per_clip: bool) -> None:
    """Every query camera looks through its own lens, shared by the clips ([V]) or not ([B, V])."""
    poses = random_poses(2, 3)
    focal = torch.rand(2, 3) * 40 + 80 if per_clip else torch.rand(3) * 40 + 80
    together = SMALL.plan(Cameras(poses, UnifiedCamera(focal, 90.0, 128.0, 72.0, 0.4, 256, 144)), GRID)
    for b in range(2):
        for i in range(3):
            one = UnifiedCamera(focal[b, i] if per_clip else focal[i], 90.0, 128.0, 72.0, 0.4, 256, 144)
            every = UnifiedCamera(focal[b] if per_clip else focal, 90.0, 128.0, 72.0, 0.4, 256, 144)
            alone = SMALL.plan(Cameras(poses[b, i : i + 1], one), GRID, key=Cameras(poses[b], every), times=[float(i)])
            difference = alone.operators(0, head=2) - together.operators(6 * i, batch=b, head=2)
            assert difference.abs().max() < 1e-9


def output(poses: Tensor, encoding: URoPE = SMALL) -> Tensor:
    plan = encoding.plan(Cameras(poses, PINHOLE), GRID)
    torch.manual_seed(0)
    return merope.attend(*random_qkv(1, 4, plan.query_tokens, encoding.head_dim), plan)


@pytest.mark.parametrize("fisheye", [False, True])
def test_world_frame_does_not_matter_on_a_straight_drive(fisheye: bool) -> None:
    """Anchors of the central patch of past frames lie exactly behind, where a point has no azimuth."""
    lens = UnifiedCamera.from_fov(200.0, 2.3, 150, 90) if fisheye else Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90)
    world = rigid(random_rotations(seed=4), 10 * random_poses(seed=6)[:3, 3])
    drive = straight_drive(4, step_m=9.0)
    plans = [SMALL.plan(Cameras(poses, lens), (3, 3)) for poses in (drive, world @ drive)]
    tables = [plan.blocks[1].key.table for plan in plans]
    assert (tables[0] - tables[1]).abs().max() < 1e-9


@given(scale=st.floats(0.1, 10.0).filter(lambda s: abs(s - 1) > 0.05), seed=st.integers(0, 10**6))
def test_scale_of_the_world_counts_unless_the_anchors_share_it(scale: float, seed: int) -> None:
    poses = curved_drive(3) if seed % 2 else random_poses(3, seed=seed)
    scaled = rigid(poses[:, :3, :3], scale * poses[:, :3, 3])
    anchors = URoPE(head_dim=32, anchors_m=tuple(scale * d for d in (2.0, 8.0, 14.0, 20.0)), z_min_m=scale * 0.05)
    before = output(poses)
    assert (output(scaled, anchors) - before).abs().max() < 1e-9
    assert (output(scaled) - before).abs().max() > 1e-5


def test_heads_share_the_anchors_in_contiguous_groups() -> None:
    cameras = Cameras(curved_drive(2), PINHOLE)
    plan = SMALL.plan(cameras, GRID)
    for heads, expected in ((8, (0, 0, 1, 1, 2, 2, 3, 3)), (2, (0, 2)), (4, (0, 1, 2, 3))):
        laid_out = plan.for_heads(heads)
        for head, anchor in enumerate(expected):
            single = URoPE(head_dim=32, anchors_m=((2.0, 8.0, 14.0, 20.0)[anchor],)).plan(cameras, GRID)
            assert (laid_out.operator(0, 8, head=head) - single.operator(0, 8)).abs().max() < 1e-12


def seen(lens: Lens, *points: tuple[float, float, float]) -> Tensor:  # [n, 2]
    stacked = torch.tensor(points, dtype=torch.float64)[None, None]
    return pixels_seen(lens, stacked, seen_half_angle_rad(lens, CPU), 0.05)[0, 0]


@pytest.mark.parametrize("name", LENSES)
def test_points_in_the_image_are_projected_by_the_lens(name: str) -> None:
    points = torch.tensor([[0.3, -0.2, 2.0], [-1.0, 0.5, 4.0], [0.0, 0.0, 9.0]], dtype=torch.float64)
    assert (seen(LENSES[name], *points.tolist()) - LENSES[name].project(points)[0]).abs().max() < 1e-10


def test_points_behind_leave_on_their_own_side() -> None:
    right, left, below, far = seen(PINHOLE, (1.0, 0.0, -5.0), (-1.0, 0.0, -5.0), (0.0, 1.0, 0.0), (1e6, 0.0, -1.0))
    assert right.tolist() == [512.0, 70.0]
    assert left.tolist() == [-256.0, 70.0]
    assert below.tolist() == [128.0, 288.0]
    assert far.tolist() == right.tolist()
    assert seen(PINHOLE, (0.0, 0.0, -5.0)).tolist() == [[128.0, 70.0]]


def test_a_wide_lens_takes_what_it_does_not_see_on_its_rim() -> None:
    lens = UnifiedCamera(20.0, 20.0, 128.0, 72.0, 2.0, 256, 144)  # sees 120 degrees off axis
    rim_radius = 20.0 * math.sin(math.radians(120)) / (math.cos(math.radians(120)) + 2.0)
    pixels = seen(lens, (1.0, 0.0, -5.0), (0.0, -1.0, -9.0), (1e-9, 1e-9, -9.0), (0.5, 0.0, -0.2))
    rim = torch.tensor([[rim_radius, 0.0], [0.0, -rim_radius], [rim_radius, 0.0]]) + torch.tensor([128.0, 72.0])
    assert (pixels[:3] - rim).abs().max() < 1e-4
    assert (pixels[3] - lens.project(torch.tensor([0.5, 0.0, -0.2], dtype=torch.float64))[0]).abs().max() < 1e-10


def test_half_angle_of_every_lens() -> None:
    expected = {
        "pinhole": math.atan(1e3),
        "fisheye": math.acos(-1 / 2.13),
        "brown": float(torch.as_tensor(LENSES["brown"].max_tangent).atan()),  # type: ignore[attr-defined]
        "kannala": float(LENSES["kannala"].max_angle),  # type: ignore[attr-defined]
        "panorama": math.pi,
    }
    for name, lens in LENSES.items():
        assert float(seen_half_angle_rad(lens, CPU)) == pytest.approx(expected[name], abs=2e-6)
    several = UnifiedCamera(80.0, 80.0, 128.0, 72.0, torch.tensor([2.0, 4.0]), 256, 144)
    assert seen_half_angle_rad(several, CPU).tolist() == pytest.approx([math.acos(-0.5), math.acos(-0.25)], abs=2e-6)


@pytest.mark.parametrize("name", LENSES)
def test_gradients_of_pixels_are_finite_everywhere(name: str) -> None:
    lens, axis = LENSES[name], (0.0, 1e-13, 1e7, -1e-9, -3.0)
    points = torch.cartesian_prod(*[torch.tensor(axis, dtype=torch.float64)] * 3)[None, None].requires_grad_()
    pixels = pixels_seen(lens, points, seen_half_angle_rad(lens, CPU), 0.05)
    assert pixels.isfinite().all()
    (gradient,) = torch.autograd.grad(pixels.sum(), points)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", LENSES)
@pytest.mark.parametrize(
    ("half_turn_about", "centre_m"),
    [
        ((0.0, 0.0, 0.0), (0.0, 0.0, 8.0)),  # the second camera stands on an anchor of the first
        ((0.0, 1.0, 0.0), (0.0, 0.0, 8.0)),  # and looks back at it
        ((0.0, 1.0, 0.0), (0.0, 0.0, 4.0)),  # each lies straight ahead of the other
        ((1.0, 0.0, 0.0), (0.0, 0.0, 0.0)),  # one looks straight to the back of the other
    ],
)
def test_rounding_chooses_no_direction(
    name: str, half_turn_about: tuple[float, float, float], centre_m: tuple[float, float, float]
) -> None:
    axis = torch.tensor(half_turn_about, dtype=torch.float64)
    turn = 2 * torch.outer(axis, axis) - torch.eye(3, dtype=torch.float64) if axis.any() else torch.eye(3).double()
    first = torch.eye(4, dtype=torch.float64)
    poses = torch.stack((first, rigid(turn, torch.tensor(centre_m, dtype=torch.float64))))
    world = rigid(random_rotations(1, seed=3)[0], torch.tensor([5.0, -3.0, 2.0], dtype=torch.float64))
    lens = LENSES[name]
    plans = [SMALL.plan(Cameras(given, lens), (3, 3)) for given in (poses, world @ poses)]
    for here, there in zip(plans[0].blocks, plans[1].blocks, strict=True):
        torch.testing.assert_close(here.key.table, there.key.table, rtol=0, atol=1e-5)


def test_the_published_layout_has_no_time_band() -> None:
    plan = URoPE(head_dim=128, split=(0, 64, 64)).plan(Cameras(random_poses(2), PINHOLE), GRID)
    assert [(block.name, block.start, block.stop) for block in plan.blocks] == [("image", 0, 128)]
    assert_backends_agree(plan, heads=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": (32, 50, 50)}, "split"),
        ({"split": (33, 48, 47)}, "split"),
        ({"anchors_m": ()}, "anchors_m"),
        ({"anchors_m": (0.0, 2.0)}, "anchors_m"),
        ({"z_min_m": 0.0}, "z_min_m"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        URoPE(**options)  # type: ignore[arg-type]


def test_an_operator_of_a_head_or_clip_that_the_tables_do_not_have_is_refused() -> None:
    plan = URoPE(32).plan(Cameras(random_poses(2, 2), PINHOLE), GRID)
    for head in (4, 5, -1):
        message = rf"^head must be in 0 … 3, .*got {head}; lay the plan out with plan\.for_heads"
        with pytest.raises(ValueError, match=message):
            plan.operator(0, 1, head=head)
    with pytest.raises(ValueError, match=r"^batch must be in 0 … 1, got 2; "):
        plan.operator(0, 1, batch=2)
    assert torch.equal(plan.for_heads(8).operator(0, 1, head=5), plan.operator(0, 1, head=2))
