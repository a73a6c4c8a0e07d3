"""Anti-aliasing: rays go where they are needed, and the image is what 64 rays in every pixel give."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import straight_drive
from street_views import DRIVE, FISHEYE, GRID, PINHOLE, brute_force, random, seeds
from torch import Tensor

from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.poses import rigid
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle
from merope.world.edges import needs_more_rays
from merope.world.lens_grids import lens_grid, places_around_centre
from merope.world.raycast import ROUND, pairs_in_reach
from merope.world.render import render
from merope.world.scene import World
from merope.world.sight import cast, rotated, view_of
from merope.world.street import POLE

LENSES = {"pinhole": PINHOLE, "wide": UnifiedCamera.from_fov(120.0, 0.6, 64, 36), "fisheye": FISHEYE}


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().mean())


@pytest.mark.parametrize("lens", LENSES.values(), ids=LENSES)
def test_images_are_better_than_four_rays_in_every_pixel(lens: Lens) -> None:
    """Against 8 × 8 rays everywhere, still and in the change between two frames 0.1 m apart."""
    still, change = [0.0, 0.0], [0.0, 0.0]
    for seed in (1, 4):
        world, cameras = World(seed), Cameras(straight_drive(2, step_m=0.1), lens)
        truth = brute_force(world, cameras, *GRID, 8)
        for k, image in enumerate((render(world, cameras, *GRID).image, brute_force(world, cameras, *GRID, 2))):
            still[k] += error(image, truth)
            change[k] += error(image[1] - image[0], truth[1] - truth[0])
    assert still[0] < still[1]
    assert change[0] < 0.7 * change[1]


def far_pole() -> tuple[World, Lens]:
    """A world with nothing in it but a lamp's pole, 0.18 m wide, about 70 m ahead, a quarter of a pixel."""
    world = World(3)
    solids = world.solids
    ahead = (solids.material == POLE) & solids.present[0] & (solids.half_m[0, :, 0] < 0.1)
    distance = (solids.centre_m[0, :, 2] - 70.0).abs().masked_fill(~ahead, math.inf)
    solids.present.zero_()
    solids.present[0, distance.argmin()] = True
    x, _, z = solids.centre_m[0, distance.argmin()].tolist()
    return world, Pinhole(90.0, 90.0, 6.0 - 90.0 * x / z, 5.0, 12, 4)  # four rows above the horizon, the pole amid them


@given(st.floats(-0.02, 0.02))
def test_thin_things_neither_vanish_nor_flicker(yaw_rad: float) -> None:
    """However the pole falls between the pixels' centres, it darkens the image as much as it should."""
    world, lens = far_pole()
    yaw = torch.tensor([yaw_rad], dtype=torch.float64)
    turn = matrix_from_quaternion(quaternion_from_axis_angle(yaw.new_tensor([[0.0, 1.0, 0.0]]), yaw))
    cameras = Cameras(rigid(turn, yaw.new_zeros(1, 3)), lens)
    bare = World(3)
    bare.solids.present.zero_()
    without = render(bare, cameras, 4, 12).image
    shade, true_shade = (
        float((without - image).sum())
        for image in (render(world, cameras, 4, 12).image, brute_force(world, cameras, 4, 12, 24))
    )
    assert true_shade > 0.3
    assert abs(shade - true_shade) < 0.35 * true_shade


@given(seeds)
def test_a_cone_misses_no_solid(seed: int) -> None:
    """Whatever a ray of a cone meets is among the pairs of the cone's axis: level, steep and beside the solids."""
    world, count, angle = World(seed % 30), 40, 10.0 ** -(1.0 + seed % 3)
    centre = random(1, 1, 3, seed=seed, low=-1.0, high=1.0) * torch.tensor([15.0, 8.0, 60.0])
    spread = torch.full((1, count), math.tan(angle))
    pose = rigid(torch.eye(3, dtype=torch.float64)[None], centre[0])
    view = view_of(world, pose, torch.zeros(1, dtype=torch.int64), spread)
    axes = torch.nn.functional.normalize(random(3, count, seed=seed + 1, low=-1, high=1), dim=0)
    aside = torch.nn.functional.normalize(random(3, count, 50, seed=seed + 2, low=-1, high=1), dim=0)
    aside = torch.linalg.cross(axes[..., None].expand_as(aside), aside, dim=0)
    share = random(count, 50, seed=seed + 3)
    rays = torch.nn.functional.normalize(axes[..., None] + math.tan(angle) * share * aside, dim=0)
    for numbers, interval in view.kinds():
        cones = pairs_in_reach(view.solids, numbers, interval, axes.float()[:, None], spread)
        met = pairs_in_reach(view.solids, numbers, interval, rays.float().flatten(1)[:, None])
        reached = set(zip(cones.solid.tolist(), cones.ray.tolist(), strict=True))
        needed = set(zip(met.solid.tolist(), (met.ray // 50).tolist(), strict=True))
        assert needed <= reached
        assert len(reached) < 0.5 * count * len(numbers)


@given(seeds, st.floats(1.0, 2.0), st.floats(1.0, 2.0), st.sampled_from([1e-3, 0.1, 1.0, 10.0]))
def test_a_widened_ellipsoid_holds_all_that_is_near_it(seed: int, second: float, third: float, wider: float) -> None:
    """Points off the surface along its normals, for radii of which none is over twice another, as crowns have."""
    radii = torch.tensor([[1.0], [second], [third]], dtype=torch.float64)
    unit = torch.nn.functional.normalize(random(3, 2000, seed=seed, low=-1, high=1), dim=0)
    near = radii * unit + (wider / ROUND) * torch.nn.functional.normalize(unit / radii, dim=0)
    assert ((near / (radii + wider)).norm(dim=0) <= 1.0).all()
    solids = World(seed % 30).solids
    crowns = solids.half_m[:, solids.boxes :]
    assert (crowns.amax(dim=-1) <= 2.0 * crowns.amin(dim=-1)).all()


@pytest.mark.parametrize("lens", LENSES.values(), ids=LENSES)
def test_cones_hold_their_pixels(lens: Lens) -> None:
    grid = lens_grid(Cameras(DRIVE[:1], lens), GRID, 4)
    assert grid.fine_rays is not None
    cosine = (grid.fine_rays[0] * grid.rays[0].permute(1, 2, 0)[..., None]).double().sum(dim=-2)
    angle = torch.acos(cosine.clamp_max(1.0)).amax(dim=-1)
    assert (angle <= grid.spread[0].atan() + 1e-3).all()  # of float32 rays near 0
    assert (angle > 0.5 * grid.spread[0].atan()).double().mean() > 0.5


def test_most_pixels_need_no_more_rays() -> None:
    world, lens = World(1), lens_grid(Cameras(DRIVE[:1], PINHOLE), GRID, 3)
    spread = lens.spread.flatten(1)
    view = view_of(world, DRIVE[:1], torch.zeros(1, dtype=torch.int64), spread)
    hits, pairs = cast(view, rotated(view.rotation, lens.rays.flatten(2)), spread)
    flat = torch.full((3, 1, *GRID), 0.5)
    silhouettes = needs_more_rays(flat, hits, pairs)
    assert 0.01 < silhouettes.double().mean() < 0.3
    flat[:, 0, 20:30, 20:30] += 0.2
    beside = needs_more_rays(flat, hits, []).nonzero()
    assert len(beside) == 4 * 10 + 4 * 9  # both sides of the square's border, corners once
    assert beside[:, 1:].min() == 19
    assert beside[:, 1:].max() == 30


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_places_are_spread_evenly_along_both_axes(samples: int) -> None:
    places = sorted({*places_around_centre(samples), (0.5, 0.5)} if samples % 2 else places_around_centre(samples))
    assert len(places) == samples**2
    even = [(k + 0.5) / samples**2 for k in range(samples**2)]
    assert [x for x, _ in places] == pytest.approx(even)
    assert sorted(y for _, y in places) == pytest.approx(even)
    cells = {(int(x * samples), int(y * samples)) for x, y in places}
    assert len(cells) == samples**2
