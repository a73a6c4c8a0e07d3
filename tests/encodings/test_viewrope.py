"""ViewRope against its formula, MeRoPE's rotation block, and Wan's layout."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import FISHEYE, PINHOLE, random_poses, random_qkv
from torch import Tensor

import merope
from merope import Cameras, MeRoPE
from merope.encodings.viewrope import ViewRope
from merope.geometry.poses import rigid

GRID = (2, 3)


def pairs(delta: float, band: int, count: int) -> Tensor:  # [2 count, 2 count]
    """The first pairs of a rotary band of `band` channels with base 10000, at a difference of positions."""
    angles = [delta * 10000 ** (-2 * m / band) for m in range(count)]
    turns = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles]
    return torch.block_diag(*torch.tensor(turns, dtype=torch.float64))


def ray_frame(pose: Tensor, ray: Tensor) -> Tensor:  # [3, 3]
    """R A with A by Rodrigues' formula, I + [v] + [v]² / (1 + c) for v = e_z × ray (paper, Eq. 5)."""
    x, y, c = ray.tolist()
    cross = torch.tensor([[0.0, 0.0, x], [0.0, 0.0, y], [-x, -y, 0.0]], dtype=torch.float64)
    return pose[:3, :3] @ (torch.eye(3, dtype=torch.float64) + cross + cross @ cross / (1 + c))


@pytest.mark.parametrize(
    ("head_dim", "bands", "kept", "triplets"),
    [(128, (44, 42, 42), 11, 7), (64, (24, 20, 20), 6, 4), (192, (64, 64, 64), 16, 10), (18, (6, 6, 6), 1, 1)],
)
def test_operator_is_its_formula(head_dim: int, bands: tuple[int, int, int], kept: int, triplets: int) -> None:
    cameras, times = Cameras(random_poses(2), FISHEYE), [0.0, 5.5]
    encoding = ViewRope(head_dim=head_dim)
    assert encoding.band_channels == bands
    plan = encoding.plan(cameras, GRID, times=times)
    rays, _ = cameras.rays(GRID)
    for a, b in ((0, 11), (8, 1), (4, 4)):
        query, key = (ray_frame(cameras.world_from_camera[t // 6], rays[t // 6, t % 6]) for t in (a, b))
        delta_time = times[b // 6] - times[a // 6]
        delta_row, delta_column = b % 6 // 3 - a % 6 // 3, b % 3 - a % 3
        expected = torch.block_diag(
            pairs(delta_time, bands[0], kept),
            *[query.mT @ key] * triplets,
            torch.eye(bands[0] - 2 * kept - 3 * triplets, dtype=torch.float64),
            pairs(delta_row, bands[1], bands[1] // 2),
            pairs(delta_column, bands[2], bands[2] // 2),
        )
        assert (plan.operator(a, b) - expected).abs().max() < 1e-12


def test_its_triplets_are_those_of_merope() -> None:
    cameras = Cameras(random_poses(3), FISHEYE)
    ours = ViewRope().plan(cameras, GRID)
    rotation = MeRoPE(disparity=False, translation=False).plan(cameras, GRID)
    for token in (0, 7, 17):
        own, papers = ours.operators(token)[:, 22:43, 22:43], rotation.operators(token)[:, 36:57, 36:57]
        assert (own - papers).abs().max() < 1e-14


def output(poses: Tensor) -> Tensor:
    torch.manual_seed(0)
    return merope.attend(*random_qkv(1, 2, 18, 32), ViewRope(head_dim=32).plan(Cameras(poses, FISHEYE), GRID))


@given(seed=st.integers(0, 10**6), factor=st.floats(0, 1e6))
def test_metres_have_no_effect_and_turns_have(seed: int, factor: float) -> None:
    """Property (A) of the paper's Table 1 fails: translation is not seen at all."""
    poses = random_poses(3, seed=seed)
    before = output(poses)
    assert torch.equal(before, output(rigid(poses[:, :3, :3], factor * poses[:, :3, 3])))
    assert (before - output(random_poses(3, seed=seed + 1))).abs().max() > 1e-4


@given(seed=st.integers(0, 10**6), head_dim=st.integers(7, 40).map(lambda n: 2 * n))
def test_orthogonal_for_any_cameras_and_head(seed: int, head_dim: int) -> None:
    plan = ViewRope(head_dim=head_dim).plan(Cameras(random_poses(2, seed=seed), FISHEYE), (2, 2))
    names = [block.name for block in plan.blocks]
    assert names == ["time", "rotation", "image"]
    assert all(block.stop > block.start for block in plan.blocks)
    u = plan.operators(0)
    assert (u.mT @ u - torch.eye(head_dim, dtype=torch.float64)).abs().max() < 1e-12


def test_a_pinhole_and_a_fisheye_can_look_at_each_other() -> None:
    query, key = Cameras(random_poses(1), PINHOLE), Cameras(random_poses(1, seed=3), FISHEYE)
    u = ViewRope().plan(query, GRID, key=key).operator(0, 5)[22:25, 22:25]
    frames = [ray_frame(c.world_from_camera[0], c.rays(GRID)[0][0, t]) for c, t in ((query, 0), (key, 5))]
    assert (u - frames[0].mT @ frames[1]).abs().max() < 1e-12
