"""Poses and patch rays."""

import pytest
import torch
from scenes import FISHEYE, PINHOLE, random_poses, random_rotations

from merope import Cameras, Pinhole
from merope.geometry.poses import inverse, orthonormalise, relative
from merope.geometry.rays import patch_pixels, patch_rays


def test_relative_is_inverse_times_pose() -> None:
    a, b = random_poses(20), random_poses(20, seed=1)
    assert (relative(a, b) - inverse(a) @ b).abs().max() < 1e-12
    assert (inverse(a) @ a - torch.eye(4, dtype=torch.float64)).abs().max() < 1e-13


def test_relative_loses_nothing_far_from_the_origin() -> None:
    local = random_poses(2)
    far = local.clone()
    far[:, :3, 3] += 2.0**23  # exactly representable, so only the order of operations matters
    far[:, :3, 3] = far[:, :3, 3].round(decimals=6)
    exact = far[1, :3, 3] - far[0, :3, 3]
    assert (relative(far[0], far[1])[:3, 3] - far[0, :3, :3].mT @ exact).abs().max() < 1e-13


def test_orthonormalise_repairs_rounding_and_has_gradients() -> None:
    rotation = random_rotations(10)
    noisy = (rotation + 1e-4 * torch.randn_like(rotation)).requires_grad_()
    repaired = orthonormalise(noisy)
    assert (repaired.mT @ repaired - torch.eye(3, dtype=torch.float64)).abs().max() < 1e-14
    assert (repaired - rotation).abs().max() < 5e-4
    repaired.sum().backward()
    assert noisy.grad is not None
    assert noisy.grad.isfinite().all()


def test_patch_centres_are_the_centres_of_patches() -> None:
    centres = patch_pixels(Pinhole(1.0, 1.0, 0.0, 0.0, 6, 4), (2, 3))
    assert centres.tolist() == [[1, 1], [3, 1], [5, 1], [1, 3], [3, 3], [5, 3]]
    assert patch_pixels(Pinhole(1.0, 1.0, 0.0, 0.0, 2, 2), (2, 2))[0].tolist() == [0.5, 0.5]


def test_every_camera_may_have_its_own_lens() -> None:
    focal = torch.tensor([[90.0, 110.0], [130.0, 150.0]])
    batched = Cameras(random_poses(2, 2), Pinhole(focal, focal, 128.0, 72.0, 256, 144))
    rays, valid = batched.rays((3, 4))
    assert rays.shape == (2, 2, 12, 3)
    assert valid.all()
    for b in range(2):
        for v in range(2):
            single = Pinhole(float(focal[b, v]), float(focal[b, v]), 128.0, 72.0, 256, 144)
            assert (rays[b, v] - patch_rays(single, (3, 4))[0]).abs().max() < 1e-14


def test_one_lens_serves_all_cameras() -> None:
    rays, valid = Cameras(random_poses(2, 3), FISHEYE).rays((2, 2))
    assert rays.shape == (2, 3, 4, 3)
    assert valid.shape == (2, 3, 4)


def test_cameras_keep_precision_and_move() -> None:
    cameras = Cameras(random_poses(3).float(), PINHOLE, torch.tensor([True, False, True]))
    assert cameras.dtype == torch.float32
    assert cameras.world_from_camera.dtype == torch.float64
    moved = cameras.to("cpu")
    assert moved.dtype == torch.float32
    assert torch.equal(moved.world_from_camera, cameras.world_from_camera)
    assert not moved.rays((1, 1))[1][1].any()


@pytest.mark.parametrize("has_pose", [[True, True, True], [False, False, True]])
def test_origin_is_the_first_posed_camera(has_pose: list[bool]) -> None:
    poses = random_poses(3)
    cameras = Cameras(poses, PINHOLE, torch.tensor(has_pose))
    first = has_pose.index(True)
    assert (cameras.relative_to(cameras.origin())[first] - torch.eye(4, dtype=torch.float64)).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moving_never_changes_the_precision(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"^device must be a device, got {dtype}; poses stay float64"):
        Cameras(random_poses(2), PINHOLE).to(dtype)  # type: ignore[arg-type]


def test_joined_cameras_keep_poses_lenses_flags_and_precision() -> None:
    focal = torch.tensor([90.0, 110.0, 130.0])
    video = Cameras(random_poses(2, 3), Pinhole(focal, focal, 128.0, 72.0, 256, 144), torch.tensor([[True] * 3] * 2))
    others = Cameras(random_poses(2, seed=1).float(), Pinhole(50.0, 50.0, 128.0, 72.0, 256, 144))
    both = video.joined(others)
    assert both.world_from_camera.shape == (2, 5, 4, 4)
    assert both.lens.fx.tolist() == [90.0, 110.0, 130.0, 50.0, 50.0]  # type: ignore[attr-defined]
    assert both.has_pose is not None
    assert both.has_pose.all()
    assert (both.given_dtype, both.dtype) == (torch.float32, torch.float64)
    for part, cameras in ((both.at(slice(3)), video), (both.at(slice(3, 5)), others)):
        expected = cameras.world_from_camera.expand(2, -1, 4, 4)
        assert torch.equal(part.world_from_camera, expected)
        torch.testing.assert_close(
            part.rays((2, 2))[0], cameras.rays((2, 2))[0].expand(2, -1, 4, 3), rtol=0, atol=1e-12
        )


def test_cameras_of_one_lens_share_it_when_joined() -> None:
    cameras = Cameras(random_poses(2), PINHOLE)
    assert cameras.joined(cameras).lens is PINHOLE
    with pytest.raises(ValueError, match=r"^lens must be of one kind and size.*Pinhole.*UnifiedCamera"):
        cameras.joined(Cameras(random_poses(2), FISHEYE))


def test_repeated_cameras_stand_in_a_row_with_their_lenses() -> None:
    focal = torch.tensor([[90.0], [110.0]])
    flags = torch.tensor([[True, False, True], [True, True, True]])
    cameras = Cameras(random_poses(2, 3).float(), Pinhole(focal, focal, 128.0, 72.0, 256, 144), flags)
    more = cameras.repeated(2)
    for sample, clip in enumerate((0, 0, 1, 1)):
        assert torch.equal(more.world_from_camera[sample], cameras.world_from_camera[clip])
        assert (more.rays((2, 2))[0][sample] - cameras.rays((2, 2))[0][clip]).abs().max() < 1e-14
        assert more.has_pose is not None
        assert torch.equal(more.has_pose[sample], flags[clip])
    assert more.dtype == more.given_dtype == torch.float32
