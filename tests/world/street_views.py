"""Views of the procedural world, and its ray casting in closed form, float64, one solid at a time: the oracle."""

import math

import torch
from hypothesis import strategies as st
from scenes import curved_drive
from torch import Tensor

from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole, UnifiedCamera
from merope.world.render import render
from merope.world.scene import World
from merope.world.street import CAMERA_HEIGHT_M, CROWN

GRID = (36, 64)
PINHOLE = Pinhole(52.0, 52.0, 32.0, 18.0, 64, 36)
FISHEYE = UnifiedCamera.from_fov(173.0, 1.66, 64, 36)
DRIVE = curved_drive(3, step_m=4.0, yaw_step_rad=0.03)
seeds = st.integers(0, 2**31 - 1)


def random(*shape: int, seed: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, dtype=torch.float64, generator=generator)


def smallest_positive(candidates: Tensor) -> Tensor:  # [k, n], NaN or ≤ 0 where there is none -> [n]
    return torch.where(candidates > 0.0, candidates, math.inf).amin(dim=0)


def box_by_faces(origin: Tensor, direction: Tensor, half: Tensor) -> Tensor:  # [3, n] -> [n]
    """Each of the six faces as a plane; the hits that lie inside their face."""
    candidates = []
    for axis in range(3):
        others = [i for i in range(3) if i != axis]
        for sign in (-1.0, 1.0):
            distance = (sign * half[axis] - origin[axis]) / direction[axis]
            point = origin + distance * direction
            inside = (point[others].abs() <= half[others]).all(dim=0)
            candidates.append(torch.where(inside, distance, math.nan))
    return smallest_positive(torch.stack(candidates))


def ellipsoid_by_quadratic(origin: Tensor, direction: Tensor, radii: Tensor) -> Tensor:  # [3, n] -> [n]
    """Roots of a t² + 2 b t + c."""
    a = (direction / radii).square().sum(dim=0)
    b = (direction * origin / radii.square()).sum(dim=0)
    c = (origin / radii).square().sum(dim=0) - 1.0
    root = (b.square() - a * c).sqrt()
    return smallest_positive(torch.stack(((-b - root) / a, (-b + root) / a)))


def first_hit(world: World, centre_m: Tensor, rays: Tensor, which: int = 0) -> Tensor:  # [3], [P, 3] -> [P]
    """Distance to the nearest surface of a scene, every solid tried, in float64."""
    solids, count = world.solids, len(rays)
    best = (CAMERA_HEIGHT_M - centre_m[1]) / rays[:, 1]
    best = torch.where(best > 0.0, best, math.inf)
    for n in solids.present[which].nonzero().squeeze(-1).tolist():
        yaw = float(solids.yaw_rad[which, n])
        c, s = math.cos(yaw), math.sin(yaw)
        solid_from_scene = torch.tensor([[c, 0, -s], [0, 1, 0], [s, 0, c]], dtype=torch.float64)
        origin = solid_from_scene @ (centre_m - solids.centre_m[which, n])
        half = solids.half_m[which, n][:, None].expand(3, count)
        meet = ellipsoid_by_quadratic if solids.material[n] == CROWN else box_by_faces
        best = torch.minimum(best, meet(origin[:, None].expand(3, count), solid_from_scene @ rays.T, half))
    return best


def mismatches(ours: Tensor, expected: Tensor, relative: float) -> int:
    """How many distances differ by more, counting those below 1 m as 1 m; equal infinities agree."""
    same = (ours.isinf() & expected.isinf()) | ((ours - expected).abs() <= relative * expected.clamp_min(1.0))
    return int((~same).sum())


def brute_force(world: World, cameras: Cameras, height: int, width: int, rays: int) -> Tensor:  # [V, H, W, 3]
    """The image from rays × rays rays in every pixel."""
    fine = render(world, cameras, height * rays, width * rays, samples=1).image
    return fine.unflatten(1, (height, rays)).unflatten(3, (width, rays)).mean(dim=(2, 4))
