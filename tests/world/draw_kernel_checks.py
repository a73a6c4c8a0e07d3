"""The drawing kernels under Triton's interpreter, against the plain code that defines them.

Run by tests/test_interpreted_kernels.py in a process of its own. tests/gpu/test_gpu_render.py has more, for a GPU.
"""

import torch

from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.poses import rigid
from merope.world.render import Render, render
from merope.world.scene import World
from merope.world.street import CABIN, CAR, CROWN

GRID = (4, 6)


def both(world: World, poses: torch.Tensor, lens: Lens) -> list[Render]:
    return [render(world, Cameras(poses, lens), *GRID, by_kernels=by_kernels) for by_kernels in (True, False)]


def test_a_street_and_its_sky() -> None:
    """Two worlds through a fisheye: every kind of surface, and fine rays of several cameras in one program."""
    poses = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1, 1)
    poses[1, :, 2, 3] = 9.0
    ours, plain = both(World((3, 8)), poses, UnifiedCamera.from_fov(173.0, 1.66, 64, 40))
    torch.testing.assert_close(ours.image, plain.image, rtol=0.0, atol=1e-4)
    torch.testing.assert_close(ours.depth_m, plain.depth_m, rtol=1e-5, atol=0.0)


def test_cars_and_crowns_from_near() -> None:
    world = World(3)
    solids = world.solids
    places = []
    for material in (CAR, CABIN, CROWN):
        number = int(((solids.material == material) & solids.present[0]).nonzero()[0])
        places.append(solids.centre_m[0, number] - torch.tensor([0.3, 0.0, solids.half_m[0, number].norm() + 0.5]))
    poses = rigid(torch.eye(3, dtype=torch.float64).expand(3, 3, 3), torch.stack(places))
    ours, plain = both(world, poses, Pinhole(60.0, 60.0, 32.0, 20.0, 64, 40))
    torch.testing.assert_close(ours.image, plain.image, rtol=0.0, atol=1e-4)
    torch.testing.assert_close(ours.depth_m, plain.depth_m, rtol=1e-5, atol=0.0)
