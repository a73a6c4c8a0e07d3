"""The twelve numbers of a pose as features of its tokens."""

import math

import pytest
import torch
from scenes import FISHEYE, PINHOLE, random_poses, random_rotations

from merope import Cameras
from merope.encodings.extrinsics import Extrinsics
from merope.geometry.poses import rigid


@pytest.mark.parametrize("scale", [1.0, 0.04, 0.0])
def test_every_token_has_the_pose_of_its_camera(scale: float) -> None:
    poses = random_poses(2, 3)
    numbers = Extrinsics(scale).features(Cameras(poses, PINHOLE), (2, 3)).reshape(2, 3, 6, 3, 4)
    expected = torch.linalg.inv(poses[:, :1]) @ poses
    assert (numbers[..., :3] - expected[:, :, None, :3, :3]).abs().max() < 1e-12
    assert (numbers[..., 3] - scale * expected[:, :, None, :3, 3]).abs().max() < 1e-12


def test_neither_the_world_nor_the_lens_matters() -> None:
    poses = random_poses(3)
    world = rigid(random_rotations(seed=5), torch.tensor([4.2e6, -3.1e6, 3.7e6], dtype=torch.float64))
    here = Extrinsics().features(Cameras(poses, PINHOLE), (2, 3))
    assert (Extrinsics().features(Cameras(world @ poses, FISHEYE), (2, 3)) - here).abs().max() < 1e-8


def test_cameras_without_a_pose_are_zeros_and_never_the_origin() -> None:
    has_pose = torch.tensor([False, True, True])
    numbers = Extrinsics().features(Cameras(random_poses(3), PINHOLE, has_pose), (1, 2))[0]
    assert (numbers[:2] == 0).all()
    assert (numbers[2:4].reshape(2, 3, 4) - torch.eye(3, 4, dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize("scale", [-1.0, math.inf, math.nan, "1"])
def test_bad_scales_are_refused(scale: object) -> None:
    with pytest.raises(ValueError, match="translation_scale must be"):
        Extrinsics(scale)  # type: ignore[arg-type]
