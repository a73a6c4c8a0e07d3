"""Ray casting against closed forms, written here a second time and in float64, without culling."""

import math

import pytest
import torch
from hypothesis import given
from street_views import (
    DRIVE,
    FISHEYE,
    GRID,
    PINHOLE,
    box_by_faces,
    ellipsoid_by_quadratic,
    first_hit,
    mismatches,
    random,
    seeds,
)
from torch import Tensor

from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens
from merope.geometry.rays import patch_rays
from merope.world.raycast import (
    box_interval,
    ellipsoid_interval,
    first_surface,
    nearest,
    pairs_in_reach,
    ray_plane,
    seen_solids,
    turned_into,
)
from merope.world.render import render
from merope.world.scene import World


def directions(count: int, seed: int) -> Tensor:  # [3, count] unit
    vectors = torch.randn(3, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    vectors[:, : count // 8] = vectors[:, : count // 8].sign() * torch.eye(3, dtype=torch.float64)[:, [seed % 3]]
    return vectors / vectors.norm(dim=0)


def assert_equal_distances(ours: Tensor, expected: Tensor, relative: float) -> None:
    assert torch.equal(ours.isinf(), expected.isinf())
    hit = expected.isfinite()
    assert hit.any()
    assert ((ours - expected).abs()[hit] <= relative * expected[hit].clamp_min(1.0)).all()


@given(seeds)
def test_plane_is_exact(seed: int) -> None:
    heights, ray = random(500, seed=seed, low=-5, high=5), directions(500, seed)
    distance = ray_plane(heights, ray[1])
    hit = distance.isfinite()
    assert torch.equal(hit, heights * ray[1] > 0.0)
    assert ((distance * ray[1] - heights).abs()[hit] < 1e-12).all()


@given(seeds)
def test_box_is_exact(seed: int) -> None:
    origin, half = random(3, 500, seed=seed, low=-6, high=6), random(3, 500, seed=seed + 1, low=0.05, high=4)
    ray = directions(500, seed + 2)
    assert_equal_distances(first_surface(*box_interval(origin, ray, half)), box_by_faces(origin, ray, half), 1e-12)


@given(seeds)
def test_ellipsoid_is_exact(seed: int) -> None:
    origin, radii = random(3, 500, seed=seed, low=-6, high=6), random(3, 500, seed=seed + 1, low=0.3, high=4)
    ray = directions(500, seed + 2)
    expected = ellipsoid_by_quadratic(origin, ray, radii)
    ours = first_surface(*ellipsoid_interval(origin, ray, radii))
    skimming = ours.isinf() != expected.isinf()  # tangents: rounding decides
    assert int(skimming.sum()) <= 1
    assert_equal_distances(ours[~skimming], expected[~skimming], 1e-6)
    assert ((ours - expected).abs()[expected.isfinite() & ~skimming].median()) < 1e-13


def test_nearest_names_the_solid_that_is_hit() -> None:
    solids, rays = World(7).solids, directions(3000, seed=1)
    towards = solids.centre_m - torch.tensor([1.0, -2.0, 30.0])
    seen = seen_solids(towards, solids.half_m, solids.yaw_rad, solids.present, dtype=torch.float64)
    pairs = pairs_in_reach(seen, range(solids.boxes), box_interval, rays[:, None])
    distance, index = nearest(seen, box_interval, pairs, rays)
    each = torch.empty(solids.boxes, rays.shape[1], dtype=torch.float64)
    for n in range(solids.boxes):
        origin, turned = seen.origin[:, [n]].expand_as(rays), turned_into(seen.yaw_cos_sin[:, [n]], rays)
        each[n] = first_surface(*box_interval(origin, turned, seen.half[:, [n]]))
    each[~solids.present[0, : solids.boxes]] = math.inf
    best, expected = each.min(dim=0)
    assert_equal_distances(distance, best, 1e-12)
    assert torch.equal(index, torch.where(best.isfinite(), expected, -1))
    assert int((each.isfinite().sum(dim=0) > 1).sum()) > 100  # rays that pass through several


@pytest.mark.parametrize("lens", [PINHOLE, FISHEYE], ids=["pinhole", "fisheye"])
@pytest.mark.parametrize("seed", [0, 2])
def test_depth_is_exact(lens: Lens, seed: int) -> None:
    world, cameras = World(seed), Cameras(DRIVE, lens)
    depth = render(world, cameras, *GRID, samples=1).depth_m.double()
    rays, _ = patch_rays(lens, GRID)
    for v, pose in enumerate(DRIVE):
        expected = first_hit(world, pose[:3, 3], rays @ pose[:3, :3].T)
        # On a silhouette float32 may see past an edge that float64 meets.
        assert mismatches(depth[v].flatten(), expected, 1e-5) <= 2
        assert expected.isinf().any()


def test_depth_is_of_the_pixel_centre_for_any_number_of_samples() -> None:
    world, cameras = World(1), Cameras(DRIVE, FISHEYE)
    pictures = [render(world, cameras, *GRID, samples=samples) for samples in (1, 2, 3)]
    for picture in pictures[1:]:
        torch.testing.assert_close(picture.depth_m, pictures[0].depth_m, rtol=1e-5, atol=0)
    blur = [(pictures[0].image - picture.image).abs().mean() for picture in pictures[1:]]
    assert 1e-3 < min(blur) <= max(blur) < 0.06
