"""The epipolar mask: what a query's ray may show is seen, in pixels it is CamI2V's, degenerate geometry is decided."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import (
    FISHEYE,
    LENSES,
    PINHOLE,
    RIMMED,
    ZOOM,
    curved_drive,
    degenerate_cameras,
    random_poses,
    random_rotations,
    straight_drive,
)
from torch import Tensor

from merope import Cameras, Pinhole
from merope.encodings.epipolar_rays import EpipolarRays, half_diagonals_rad
from merope.geometry.poses import rigid
from merope.geometry.rays import patch_pixels

GRID = (5, 7)
ALL = EpipolarRays(key_frames="all")


def by_camera(mask: Tensor, cameras: int) -> Tensor:  # [B, N, K] -> [B, V, P, K / P, P]
    patches = GRID[0] * GRID[1]
    return mask.unflatten(2, (-1, patches)).unflatten(1, (cameras, patches))


def check_same_but_for_rounding(mask: Tensor, cameras: Cameras) -> None:
    """The mask is that of these cameras, unless a key lies at the very reach: sums of another order decide there."""
    inner, outer = (
        EpipolarRays(key_frames="all", reach=0.5 * part).mask(cameras, GRID) for part in (1 - 1e-6, 1 + 1e-6)
    )
    assert not (inner & ~mask).any()
    assert not (mask & ~outer).any()
    assert inner.sum() > 0.99 * outer.sum()


@pytest.mark.parametrize("lens", LENSES)
@given(seed=st.integers(0, 10**6), exponent=st.floats(-1, 5))
def test_what_a_ray_shows_in_another_frame_is_seen(lens: str, seed: int, exponent: float) -> None:
    """A point at any depth on a query's ray lies in some patch of the other image: the query sees that patch."""
    drive = curved_drive(2)
    drive[1] = drive[1] @ rigid(random_rotations(seed=seed), torch.zeros(3).double()) if seed % 2 else drive[1]
    cameras = Cameras(drive, LENSES[lens])
    rays, _ = cameras.rays(GRID)
    points = drive[0, :3, 3] + 10**exponent * rays[0] @ drive[0, :3, :3].mT  # world
    in_other = (points - drive[1, :3, 3]) @ drive[1, :3, :3]
    pixels, visible = cameras.lens.project(in_other)
    rows, columns = GRID
    column = (pixels[:, 0] / (cameras.lens.width / columns)).floor()
    row = (pixels[:, 1] / (cameras.lens.height / rows)).floor()
    visible &= (column >= 0) & (column < columns) & (row >= 0) & (row < rows)
    seen = by_camera(ALL.mask(cameras, GRID), 2)[0, 0, :, 1]
    for query in visible.nonzero().flatten().tolist():
        assert seen[query, int(row[query]) * columns + int(column[query])]


def test_for_narrow_pinholes_it_is_the_line_in_pixels() -> None:
    """CamI2V: the distance of a patch's centre from F x is less than half of the patch's diagonal."""
    lens = Pinhole(800.0, 800.0, 112.0, 80.0, 224, 160)
    poses = curved_drive(3, yaw_step_rad=0.03)
    pixels = torch.cat((patch_pixels(lens, GRID), torch.ones(35, 1, dtype=torch.float64)), dim=-1)
    matrix = torch.tensor([[800.0, 0, 112], [0, 800, 80], [0, 0, 1]], dtype=torch.float64)
    mask, agreeing = by_camera(ALL.mask(Cameras(poses, lens), GRID), 3)[0], []
    for query, key in ((0, 1), (0, 2), (2, 1)):
        relative = torch.linalg.inv(poses[key]) @ poses[query]
        crossed = torch.linalg.cross(relative[:3, 3, None].expand(3, 3), relative[:3, :3], dim=0)
        inverse = torch.linalg.inv(matrix)
        lines = pixels @ (inverse.mT @ crossed @ inverse).mT  # [P, 3]
        distance = (lines @ pixels.mT).abs() / lines[:, :2].norm(dim=-1, keepdim=True)
        half_diagonal = math.hypot(224 / 7, 160 / 5) / 2
        decided = (distance / half_diagonal - 1).abs() > 0.05
        assert torch.equal(mask[query, :, key][decided], (distance < half_diagonal)[decided])
        agreeing.append(decided.double().mean())
    assert min(agreeing) > 0.9


def test_reach_is_counted_in_diagonals() -> None:
    cameras = Cameras(curved_drive(2), FISHEYE)
    seen = [EpipolarRays(key_frames="all", reach=reach).mask(cameras, GRID).sum() for reach in (0.25, 0.5, 1.0, 50.0)]
    assert seen == sorted(seen)
    assert seen[-1] == (2 * 35) ** 2
    assert 0.05 < seen[1] / seen[-1] < 0.4


def test_the_first_frame_is_that_part_of_all_frames() -> None:
    cameras = Cameras(random_poses(2, 3), ZOOM)
    first, later = EpipolarRays().mask(cameras, GRID), ALL.mask(cameras, GRID)[..., 35:]
    check_same_but_for_rounding(torch.cat((first, later), dim=-1), cameras)


def test_without_a_baseline_a_query_sees_its_own_direction() -> None:
    poses = rigid(random_rotations(2), torch.ones(2, 3, dtype=torch.float64))
    poses[1, :3, :3] = poses[0, :3, :3]
    mask = by_camera(ALL.mask(Cameras(poses, PINHOLE), GRID), 2)[0]
    for query in range(2):
        for key in range(2):
            assert mask[query, :, key].diagonal().all()
            assert mask[query, :, key].sum(-1).max() <= 9  # and what touches it at most
    turned = poses.clone()
    turned[1, :3, :3] = turned[1, :3, :3] @ torch.diag(torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64))
    away = by_camera(ALL.mask(Cameras(turned, PINHOLE), GRID), 2)[0]
    assert not away[0, :, 1].any()  # looking back, nothing of it is in the image
    assert away[0, :, 0].any(-1).all()


def test_a_ray_along_the_baseline_sees_where_it_points() -> None:
    cameras = Cameras(straight_drive(3), Pinhole(120.0, 120.0, 128.0, 72.0, 256, 144))
    mask = by_camera(ALL.mask(cameras, GRID), 3)[0]
    centre = 2 * 7 + 3
    for query in range(3):
        for key in range(3):
            assert mask[query, centre, key, centre]
            assert mask[query, centre, key].sum() <= 9


@pytest.mark.parametrize("name", list(degenerate_cameras()))
def test_degenerate_geometry_is_decided(name: str) -> None:
    cameras = degenerate_cameras()[name]
    mask = ALL.mask(cameras, (3, 3))
    _, valid = cameras.rays((3, 3))
    assert torch.equal(mask[0].diagonal(), valid.flatten())  # every token sees itself


@pytest.mark.parametrize("shift_m", [1e3, 6.4e6])
def test_the_world_frame_does_not_matter(shift_m: float) -> None:
    poses = random_poses(2, 3)
    world = rigid(random_rotations(seed=5), torch.full((3,), shift_m, dtype=torch.float64))
    check_same_but_for_rounding(ALL.mask(Cameras(world @ poses, PINHOLE), GRID), Cameras(poses, PINHOLE))


def test_a_batch_is_its_clips_one_by_one() -> None:
    poses = random_poses(2, 3)
    together = ALL.mask(Cameras(poses, ZOOM), GRID)
    for clip in range(2):
        check_same_but_for_rounding(together[clip : clip + 1], Cameras(poses[clip], ZOOM))


def test_tokens_without_a_camera_take_no_part() -> None:
    has_pose = torch.tensor([True, False, True])
    cameras = Cameras(random_poses(3), RIMMED, has_pose)
    _, valid = cameras.rays(GRID)
    mask = ALL.mask(cameras, GRID)[0]
    lonely = ~valid.flatten()
    assert 35 < lonely.sum() < 105
    assert not mask[lonely].any()
    assert not mask[:, lonely].any()


def test_half_diagonals_are_angles_to_corners() -> None:
    lens = Pinhole(100.0, 100.0, 50.0, 50.0, 100, 100)
    angle = half_diagonals_rad(Cameras(torch.eye(4, dtype=torch.float64)[None], lens), (1, 1))
    assert angle.item() == pytest.approx(math.atan(math.hypot(0.5, 0.5)))


@pytest.mark.parametrize("options", [{"reach": 0.0}, {"reach": math.nan}, {"key_frames": "last"}, {"samples": 0}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        EpipolarRays(**options)
