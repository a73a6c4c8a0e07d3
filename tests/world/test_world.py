"""The procedural world: what stands where, through which lens, moved, cleared and seen twice."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lens_zoo import each_lens
from scenes import curved_drive, random_poses, random_rotations, straight_drive
from street_views import DRIVE, FISHEYE, GRID, PINHOLE, brute_force, first_hit, mismatches, random, seeds
from torch import Tensor

from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.poses import rigid, transform
from merope.geometry.quaternions import matrix_from_quaternion
from merope.geometry.rays import patch_pixels, patch_rays
from merope.world.render import Render, correspondences, render
from merope.world.scene import World
from merope.world.street import CAMERA_HEIGHT_M, CROWN, FACADE, LANE_M, POLE, beside_street, street_coordinates
from merope.world.textures import band, pulses


def test_first_camera_stands_on_the_road() -> None:
    down = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1]], dtype=torch.float64)
    for seed in range(5):
        streets = World(seed).streets
        lateral, along = street_coordinates(streets, *torch.zeros(2, 1, 1, dtype=torch.float64))
        assert abs(float(lateral[0, 0] - (streets.lanes[0, 0] - 0.5) * LANE_M)) < 1e-9  # in the middle of the last lane
        assert abs(float(along[0, 0])) < 1e-9
        picture = render(World(seed).cleared(down[None]), Cameras(down[None], PINHOLE), 3, 3)
        assert abs(float(picture.depth_m[0, 1, 1]) - CAMERA_HEIGHT_M) < 1e-6


@given(seeds)
def test_street_coordinates_invert(seed: int) -> None:
    streets = World(seed % 1000).streets
    along, lateral = random(1, 50, seed=seed, low=-150, high=150), random(1, 50, seed=seed + 1, low=-30, high=30)
    for street in range(4):
        x, z, _ = beside_street(streets, street, along, lateral)
        one = streets.each(lambda t, street=street: t[:, street, None])
        back_lateral, back_along = street_coordinates(one, x, z)
        assert (back_lateral - lateral).abs().max() < 1e-8
        assert (back_along - along).abs().max() < 1e-8


def test_sizes_are_plausible() -> None:
    solids = World(range(20)).solids
    height = 2.0 * solids.half_m[..., 1]
    top = CAMERA_HEIGHT_M - solids.centre_m[..., 1] + solids.half_m[..., 1]
    facade, pole = solids.material == FACADE, solids.material == POLE
    assert 6.0 <= height[:, facade].min() < 8.0 < 18.0 < height[:, facade].max() <= 20.0
    assert 5.0 <= top[:, pole].min() < top[:, pole].max() <= 8.2
    bottom = top - height
    assert bottom.min() > -1e-9
    assert (solids.present.double().mean(dim=-1) > 0.65).all()


def test_lane_lines_are_where_the_lanes_end() -> None:
    """Seen from 8 m above the street, looking down."""
    down = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, -6.5], [0, -1, 0, 4], [0, 0, 0, 1]], dtype=torch.float64)[None]
    lens, grid = Pinhole(200.0, 200.0, 200.0, 100.0, 400, 200), (200, 400)
    for seed in range(3):
        world = World(seed)
        world.solids.present.zero_()
        picture = render(world, Cameras(down, lens), *grid)
        points = transform(down[0], picture.depth_m.double().reshape(-1, 1) * patch_rays(lens, grid)[0])
        streets = world.streets.each(lambda t: t[0, 0])
        lateral, along = street_coordinates(streets, points[:, 0], points[:, 2])
        brightness = picture.image[0].mean(dim=-1).flatten()
        near = (along - 4.0).abs() < 3.0
        off_edge = (lateral.abs() - float(streets.lanes) * LANE_M).abs()
        assert (brightness[near & (off_edge < 0.03)] > 0.7).all()
        lane_centre = (lateral - (float(streets.lanes) - 0.5) * LANE_M).abs() < 1.2
        assert (brightness[near & lane_centre] < 0.45).all()


@given(seeds, st.floats(0.01, 30.0))
def test_marks_are_averaged_over_the_window(seed: int, width: float) -> None:
    x = random(40, seed=seed, low=-50, high=50)
    fine = x[:, None] + width * (torch.arange(4000, dtype=torch.float64) + 0.5).sub(2000) / 4000
    wide = torch.full_like(x, width)
    rounding = (2.0 + 2.0 * width / 2.9) / 4000  # each edge of a mark may cost one sample
    repeated = (fine % 2.9 < 1.1).double().mean(dim=-1)
    assert (pulses(x, 2.9, 1.1, wide) - repeated).abs().max() < rounding
    single = ((fine > -3.0) & (fine < 7.0)).double().mean(dim=-1)
    assert (band(x, -3.0, 7.0, wide) - single).abs().max() < rounding


def test_far_ground_does_not_shimmer() -> None:
    """One ray per pixel gives nearly what 64 give: patterns finer than a pixel are averaged, not hit or missed."""
    world = World(0)
    world.solids.present.zero_()
    lens = Pinhole(160.0, 160.0, 64.0, 4.0, 128, 40)
    cameras = Cameras(straight_drive(2, step_m=0.37), lens)
    one, many = render(world, cameras, 40, 128, samples=1).image[:, 6:], brute_force(world, cameras, 40, 128, 8)[:, 6:]
    assert (one - many).square().mean().sqrt() < 0.02
    assert many.std() > 0.05


@pytest.mark.parametrize("lens", [PINHOLE, FISHEYE], ids=["pinhole", "fisheye"])
def test_depth_agrees_between_two_cameras(lens: Lens) -> None:
    world = World(3)
    a, b = Cameras(DRIVE[:2], lens), Cameras(DRIVE[1:], FISHEYE)
    picture = render(world, a, *GRID, samples=1)
    pixels, visible = correspondences(picture, a, b)
    assert pixels.shape == (2, *GRID, 2)
    rays_a, _ = a.rays(GRID)
    for v in range(2):
        seen = visible[v].flatten()
        assert 0.2 < seen.double().mean() < 1.0
        points = transform(a.world_from_camera[v], picture.depth_m[v].double().reshape(-1, 1) * rays_a[v])
        centre, rotation = b.world_from_camera[v, :3, 3], b.world_from_camera[v, :3, :3]
        rays_b, _ = FISHEYE.unproject(pixels[v].flatten(0, 1))
        first = first_hit(world, centre, rays_b @ rotation.T)
        distance = (points - centre).norm(dim=-1)
        assert mismatches(first[seen], distance[seen], 1e-4) <= 3
        size = pixels.new_tensor([FISHEYE.width, FISHEYE.height])
        inside = ((pixels[v] > 0) & (pixels[v] < size)).all(dim=-1).flatten() & distance.isfinite()
        hidden = inside & ~seen & (FISHEYE.project((points - centre).nan_to_num() @ rotation)[1])
        assert hidden.any()
        assert int((first[hidden] > 0.9995 * distance[hidden]).sum()) <= 3


def test_correspondences_of_a_camera_with_itself() -> None:
    cameras = Cameras(random_poses(1, seed=4, spread_m=0.5), FISHEYE)
    picture = render(World(6).cleared(cameras.world_from_camera), cameras, 20, 30, samples=1)
    pixels, visible = correspondences(picture, cameras, cameras)
    assert torch.equal(visible, picture.depth_m.isfinite())
    expected = patch_pixels(FISHEYE, (20, 30)).reshape(1, 20, 30, 2)
    assert (pixels - expected)[visible].abs().max() < 1e-9


@each_lens
def test_every_lens_renders(lens: Lens) -> None:
    picture = render(World(2), Cameras(DRIVE[:1], lens), 18, 24, samples=2)
    expected = patch_rays(lens, (18, 24))[1].reshape(18, 24)
    assert torch.equal(picture.valid[0], expected)
    assert picture.image.isfinite().all()
    assert 0.0 <= picture.image.min() < picture.image.max() <= 1.0
    assert not picture.image[0][~expected].any()
    assert picture.depth_m[0][~expected].isinf().all()
    assert picture.image[0][expected].std() > 0.05
    assert (picture.depth_m > 0.0).all()


def assert_same_pictures(a: Render, b: Render, odd_pixels: float = 2e-3) -> None:
    """Equal but for silhouettes, where a rounding decides what a ray meets."""
    assert ((a.image - b.image).abs().amax(dim=-1) > 2e-3).double().mean() <= odd_pixels
    both = a.depth_m.isfinite() & b.depth_m.isfinite()
    assert ((a.depth_m - b.depth_m).abs() > 1e-4 * a.depth_m)[both].double().mean() <= odd_pixels
    assert (a.depth_m.isfinite() != b.depth_m.isfinite()).double().mean() <= odd_pixels


@given(seeds)
def test_a_moved_world_looks_the_same(seed: int) -> None:
    motion = rigid(random_rotations(seed=seed), random(3, seed=seed, low=-6.4e6, high=6.4e6))
    world = World(seed % 50)
    before = render(world, Cameras(DRIVE[:1], PINHOLE), *GRID)
    after = render(world.moved(motion), Cameras(motion @ DRIVE[:1], PINHOLE), *GRID)
    assert_same_pictures(before, after)
    cleared = world.moved(motion).cleared(motion @ DRIVE)
    assert torch.equal(cleared.solids.present, world.cleared(DRIVE).solids.present)


def test_a_seed_is_a_world() -> None:
    cameras = Cameras(DRIVE[:1], FISHEYE)
    first, again, other = (render(World(seed), cameras, *GRID).image for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert (first - other).abs().mean() > 0.03


def test_a_seed_has_the_look_of_this_version() -> None:
    """Colours over a drive. Models were trained on them and are scored against them: no change may go unnoticed."""
    mean = [[0.3966, 0.4358, 0.4713], [0.4142, 0.4140, 0.3901], [0.4387, 0.4306, 0.4275], [0.4625, 0.4729, 0.4637]]
    spread = [[0.1671, 0.1774, 0.2393], [0.1582, 0.1646, 0.2128], [0.1839, 0.2164, 0.2472], [0.1867, 0.1973, 0.2385]]
    image = render(World([0, 1, 2, 3]), Cameras(DRIVE.expand(4, -1, -1, -1), PINHOLE), *GRID, samples=1).image
    assert (image.mean(dim=(1, 2, 3)) - torch.tensor(mean)).abs().max() < 1e-3
    assert (image.std(dim=(1, 2, 3)) - torch.tensor(spread)).abs().max() < 1e-3


def test_a_world_does_not_depend_on_its_batch() -> None:
    poses = torch.stack((DRIVE, straight_drive(3), curved_drive(3, yaw_step_rad=-0.05)))
    worlds = World([4, 9, 2]).cleared(poses)
    together = render(worlds, Cameras(poses, FISHEYE), *GRID, samples=1)
    assert together.image.shape == (3, 3, *GRID, 3)
    for b, seed in enumerate((4, 9, 2)):
        alone = render(World(seed).cleared(poses[b]), Cameras(poses[b], FISHEYE), *GRID, samples=1)
        assert_same_pictures(alone, replace(together, image=together.image[b], depth_m=together.depth_m[b]), 1e-4)


def test_one_world_is_seen_by_a_batch_of_clips_with_a_lens_each() -> None:
    poses = torch.stack((DRIVE, straight_drive(3)))
    lens = UnifiedCamera.from_fov(torch.tensor([90.0, 120.0, 173.0], dtype=torch.float64), 1.66, 64, 36)
    cameras = Cameras(poses, lens)
    picture = render(World(0), cameras, *GRID, samples=1)
    single = UnifiedCamera.from_fov(120.0, 1.66, 64, 36)
    alone = render(World(0), Cameras(poses[1, 1:2], single), *GRID, samples=1)
    assert_same_pictures(alone, replace(picture, image=picture.image[1, 1:2], depth_m=picture.depth_m[1, 1:2]), 1e-4)
    pixels, visible = correspondences(picture, cameras, cameras)
    assert torch.equal(visible, picture.depth_m.isfinite())
    assert (pixels - patch_pixels(single, GRID).reshape(*GRID, 2))[visible].abs().max() < 1e-9


@pytest.mark.parametrize("samples", [1, 3])
def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    world, cameras = World(1), Cameras(DRIVE, FISHEYE)
    whole = render(world, cameras, *GRID, samples=samples)
    monkeypatch.setattr("merope.world.render.RAYS_PER_BLOCK", {"cpu": 1000})
    parts = render(world, cameras, *GRID, samples=samples)
    torch.testing.assert_close(parts.depth_m, whole.depth_m, rtol=1e-5, atol=0)
    assert (whole.image - parts.image).abs().max() < 2e-6  # 1.4e-6 in a stranger's order of sums


def test_autocast_changes_nothing() -> None:
    world, cameras = World(1), Cameras(DRIVE[:1], FISHEYE)
    plain = render(world, cameras, *GRID, samples=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = render(world, cameras, *GRID, samples=1)
    assert torch.equal(plain.image, cast.image)


def wandering_path(seed: int) -> Tensor:  # [6, 4, 4]
    """Through front gardens and side walks."""
    steps = random(6, 3, seed=seed, low=-8.0, high=8.0) * torch.tensor([1.0, 0.1, 2.0])
    centres = steps.cumsum(dim=0) + torch.tensor([0.0, 0.0, 20.0])
    return rigid(random_rotations(6, seed=seed), centres)


def margins(world: World, points_m: Tensor) -> Tensor:  # [P, 3] -> [N]
    """The least widening of each solid that takes in one of the points, by bisection on the shapes themselves."""
    solids = world.solids
    cosine, sine = solids.yaw_rad[0].cos(), solids.yaw_rad[0].sin()
    x, y, z = (points_m[:, None] - solids.centre_m[0]).movedim(-1, 0)
    local = torch.stack((cosine * x - sine * z, y, sine * x + cosine * z), dim=-1).abs()  # [P, N, 3]
    low, high = torch.full_like(local[..., 0], -0.01), torch.full_like(local[..., 0], 500.0)
    for _ in range(40):
        middle = (low + high) / 2.0
        scaled = local / (solids.half_m[0] + middle[..., None]).clamp_min(1e-9)
        norm = torch.where(solids.material == CROWN, scaled.norm(dim=-1), scaled.amax(dim=-1))
        low, high = torch.where(norm > 1.0, middle, low), torch.where(norm > 1.0, high, middle)
    return high.amin(dim=0)


@given(seeds)
def test_clearing_removes_only_what_is_in_the_way(seed: int) -> None:
    world, path, margin = World(seed % 20), wandering_path(seed), 1.0
    cleared = world.cleared(path, margin)
    before, after = world.solids.present[0], cleared.solids.present[0]
    gone = before & ~after
    fractions = torch.linspace(0.0, 1.0, 101, dtype=torch.float64)[:, None, None]
    points = torch.lerp(path[None, :-1, :3, 3], path[None, 1:, :3, 3], fractions).reshape(-1, 3)
    least = torch.where(before, margins(world, points), math.inf)
    assert not (after & ~before).any()
    assert not (after & (least < margin - 1e-6)).any()  # nothing in the way stays
    thing = world.solids.thing
    for number in thing[gone].unique():
        assert least[thing == number].min() < margin + 0.2  # 0.2 m: half a step between the points
        assert not after[thing == number].any()
    assert torch.equal(cleared.solids.centre_m, world.solids.centre_m)


def test_a_single_camera_is_cleared() -> None:
    world = World(0)
    inside = torch.eye(4, dtype=torch.float64)[None].clone()
    house = int(world.solids.present[0].nonzero()[0])
    inside[0, :3, 3] = world.solids.centre_m[0, house]
    cleared = world.cleared(inside, 0.0)
    assert not bool(cleared.solids.present[0, house])
    assert int((world.solids.present != cleared.solids.present).sum()) <= 6
    nowhere = inside.clone()
    nowhere[0, 1, 3] = -60.0
    assert torch.equal(world.cleared(nowhere, 1.0).solids.present, world.solids.present)


def test_no_camera_gives_nan() -> None:
    world = World(0)
    axes = torch.nn.functional.normalize(
        torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, -1, 0, 0], [1, 0, 1, 0]]), dim=-1
    )
    turns = matrix_from_quaternion(axes.double())  # ahead, straight up, straight down, to the right
    places = [[0, 0, 0], world.solids.centre_m[0, 0].tolist(), [0, 1.5, 0], [0, 4.0, 5], [0, -30, 0], [1e5, 0, 1e5]]
    places += [world.solids.centre_m[0, -1].tolist(), [1.75, 1.5 - 1e-9, 0]]
    centres = torch.tensor(places, dtype=torch.float64)
    poses = rigid(turns[:, None].expand(4, len(places), 3, 3), centres.expand(4, -1, 3))
    for lens in (FISHEYE, Pinhole(32.0, 32.0, 32.5, 18.5, 65, 37)):  # the second has a ray exactly along its axis
        picture = render(world, Cameras(poses, lens), 37, 65, samples=1)
        assert picture.image.isfinite().all()
        assert not picture.depth_m.isnan().any()
        assert (picture.depth_m > 0.0).all()


def test_cameras_without_a_pose_are_black() -> None:
    poses = DRIVE.clone()
    poses[1] = float("nan")
    picture = render(World(0), Cameras(poses, PINHOLE, torch.tensor([True, False, True])), *GRID, samples=1)
    assert not picture.image[1].any()
    assert not picture.valid[1].any()
    assert picture.valid[[0, 2]].all()
    seeing, some_blind = Cameras(DRIVE, PINHOLE), Cameras(poses, PINHOLE, torch.tensor([True, False, True]))
    _, visible = correspondences(render(World(0), seeing, *GRID, samples=1), seeing, some_blind)
    assert visible.flatten(1).any(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("seed", [-1, True, [], [1, -2], 0.5])
def test_bad_seeds_are_refused(seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be"):
        World(seed)  # type: ignore[arg-type]


def test_bad_arguments_are_refused() -> None:
    world, cameras = World(0), Cameras(DRIVE, PINHOLE)
    with pytest.raises(ValueError, match="samples must be"):
        render(world, cameras, 10, 10, samples=0)
    with pytest.raises(ValueError, match="height must be"):
        render(world, cameras, 10.0, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="margin_m must be"):
        world.cleared(DRIVE, math.nan)
    with pytest.raises(ValueError, match="one path per world"):
        render(World([1, 2]), cameras, 10, 10)
    with pytest.raises(ValueError, match="motion must be"):
        world.moved(DRIVE)
    with pytest.raises(ValueError, match="pair the cameras"):
        correspondences(render(world, cameras, 4, 4), cameras, Cameras(DRIVE[:2], PINHOLE))


def test_kernels_need_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"by_kernels.*True on cpu"):
        render(World(3), Cameras(DRIVE, PINHOLE), 4, 6, by_kernels=True)
