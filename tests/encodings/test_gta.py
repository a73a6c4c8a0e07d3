"""GTA against numbers of its public code, and the growth that the paper shows for it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scenes import PINHOLE, random_poses, random_qkv, random_rotations, straight_drive

import merope
from merope import GTA, Cameras
from merope.geometry.poses import inverse, rigid

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "gta.npz"


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_equals_the_public_code(backend: str) -> None:
    golden = np.load(GOLDEN)
    q, k, v, out = (torch.from_numpy(golden[name]) for name in ("q", "k", "v", "out"))
    rows, columns = golden["grid"].tolist()
    cameras = Cameras(torch.from_numpy(golden["world_from_camera"]), PINHOLE)
    plan = GTA(head_dim=q.shape[-1]).plan(cameras, (rows, columns))
    assert (merope.attend(q, k, v, plan, backend=backend) - out).abs().max() < 1e-9


def test_camera_block_is_the_relative_pose() -> None:
    poses = random_poses(2)
    u = GTA(translation_scale=0.25).plan(Cameras(poses, PINHOLE), (1, 1)).operator(0, 1)
    expected = inverse(poses[0]) @ poses[1]
    expected[:3, 3] *= 0.25
    assert (u[:64, :64] - torch.block_diag(*[expected] * 16)).abs().max() < 1e-12


def test_values_grow_with_the_baseline() -> None:
    """‖U v‖ of Eq. 4 is linear in the baseline once it dominates: ten times the metres, ten times the norm."""
    value = torch.ones(128, dtype=torch.float64)
    norms = [
        (GTA().plan(Cameras(straight_drive(2, step_m), PINHOLE), (1, 1)).operator(0, 1) @ value).norm()
        for step_m in (1e3, 1e4)
    ]
    assert float(norms[1] / norms[0]) == pytest.approx(10, rel=1e-3)


def test_world_frame_does_not_matter_even_far_away() -> None:
    poses = random_poses(3)
    world = rigid(random_rotations(seed=5), torch.tensor([4.2e6, -3.1e6, 3.7e6], dtype=torch.float64))
    q, k, v = random_qkv(1, 2, 18, 128)
    outputs = [merope.attend(q, k, v, GTA().plan(Cameras(p, PINHOLE), (2, 3))) for p in (poses, world @ poses)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-6


def test_head_dim_is_checked() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 8, got 30; the nearest is 32"):
        merope.encoding("gta", head_dim=30)
