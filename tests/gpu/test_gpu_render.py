"""The kernels that draw the procedural world against the plain code that defines it."""

import pytest
import torch
from torch import Tensor

from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.poses import rigid
from merope.world.clips import WorldClips
from merope.world.render import render
from merope.world.scene import World
from tests.gpu.errors import DEVICE
from tests.scenes import curved_drive

GRID = (72, 128) if DEVICE.type == "cuda" else (6, 10)  # Triton's interpreter takes a millisecond a ray
CLIPS = 4 if DEVICE.type == "cuda" else 2
LENSES = {
    "pinhole": Pinhole(104.0, 104.0, 64.0, 36.0, 128, 72),
    "wide": UnifiedCamera.from_fov(120.0, 0.6, 128, 72),
    "fisheye": UnifiedCamera.from_fov(173.0, 1.66, 128, 72),
}
STEP = 2.0 / 255.0
DIFFERENT_PIXELS = 1e-3
"""Share of pixels that may differ by more than STEP: rays that graze an edge, or meet a mark's end, to the last bit."""
DEPTH = 1e-4
"""Of the distance, at all pixels but as few: grazing rays meet the surface behind."""


def drive(clips: int = 1, seed: int = 0) -> Tensor:  # [clips, 3, 4, 4]
    paths = [curved_drive(3, step_m=3.0 + n, yaw_step_rad=0.05 * (n - 1 + seed)) for n in range(clips)]
    return torch.stack(paths).to(DEVICE)


def assert_same(world: World, cameras: Cameras, samples: int = 3) -> None:
    ours, plain = (render(world, cameras, *GRID, samples, by_kernels) for by_kernels in (True, False))
    assert torch.equal(ours.valid, plain.valid)
    assert ours.image.isfinite().all()
    different = ((ours.image - plain.image).abs() > STEP).any(dim=-1)
    assert different.double().mean() <= DIFFERENT_PIXELS, f"{int(different.sum())} pixels differ"
    same_sky = ours.depth_m.isinf() == plain.depth_m.isinf()
    near = (ours.depth_m - plain.depth_m).abs() <= DEPTH * plain.depth_m
    wrong = ~same_sky | ~(near | plain.depth_m.isinf())
    assert wrong.double().mean() <= DIFFERENT_PIXELS, f"{int(wrong.sum())} depths differ"


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("lens", LENSES.values(), ids=LENSES)
def test_images_and_depths_of_a_batch_of_worlds(lens: Lens, samples: int) -> None:
    poses = drive(CLIPS)
    world = World(range(10, 10 + CLIPS), DEVICE).cleared(poses)
    assert_same(world, Cameras(poses, lens.to(DEVICE)), samples)


def test_one_lens_per_clip() -> None:
    clips = WorldClips(frames=2, height=72, width=128, prefix_frames=1, fov_deg=(60.0, 120.0), xi=(0.0, 0.8))
    seeds = tuple(range(5, 5 + CLIPS))
    cameras = clips.cameras(seeds, DEVICE)
    assert_same(World(seeds, DEVICE).cleared(cameras.world_from_camera), cameras)


def test_one_world_that_all_cameras_see() -> None:
    assert_same(World(3, DEVICE), Cameras(drive(CLIPS), LENSES["pinhole"].to(DEVICE)))


def test_cameras_inside_of_solids_and_beside_them() -> None:
    """In the middle of a house, of a crown and of a car, and a hand's breadth from their walls."""
    world = World(3, DEVICE)
    solids = world.solids
    centres = [solids.centre_m[0, int(kind)] for kind in (0, solids.boxes, solids.boxes - 1)]
    walls = [centre + solids.half_m[0, n] + 0.05 for centre, n in zip(centres, (0, solids.boxes), strict=False)]
    places = torch.stack(centres + walls)
    poses = rigid(torch.eye(3, dtype=torch.float64, device=DEVICE).expand(len(places), 3, 3), places)
    for lens in (LENSES["pinhole"], LENSES["fisheye"]):
        assert_same(world, Cameras(poses, lens.to(DEVICE)))


def test_cameras_without_a_pose_see_nothing() -> None:
    has_pose = torch.tensor([[True, False, True]] * CLIPS, device=DEVICE)
    poses = drive(CLIPS)
    cameras = Cameras(poses, LENSES["pinhole"].to(DEVICE), has_pose=has_pose)
    world = World(range(CLIPS), DEVICE)
    assert_same(world, cameras)
    seen = render(world, cameras, *GRID)
    assert not seen.valid[:, 1].any()
    assert not seen.image[:, 1].any()


def test_a_world_without_solids() -> None:
    world = World(3, DEVICE)
    world.solids.present.zero_()
    assert_same(world, Cameras(drive(), LENSES["fisheye"].to(DEVICE)))


def test_far_from_the_origin() -> None:
    poses = drive(CLIPS)
    motion = torch.eye(4, dtype=torch.float64, device=DEVICE)
    motion[:3, 3] = torch.tensor([1e6, -3e5, 1e6])
    world = World(range(CLIPS), DEVICE).cleared(poses).moved(motion)
    assert_same(world, Cameras(motion @ poses, LENSES["pinhole"].to(DEVICE)))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU: nothing is chosen")
def test_a_gpu_draws_by_kernels() -> None:
    world, cameras = World(3, DEVICE), Cameras(drive(), LENSES["pinhole"].to(DEVICE))
    chosen, ours = render(world, cameras, *GRID), render(world, cameras, *GRID, by_kernels=True)
    assert torch.equal(chosen.image, ours.image)
    assert torch.equal(chosen.depth_m, ours.depth_m)
