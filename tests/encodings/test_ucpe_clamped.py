"""UCPE with SANA-WM's clamp: equal to diffusers' own code, bounded, and dependent on the world frame."""

import pytest
import torch
from diffusers.models.transformers.transformer_sana_wm import (
    SanaWMRotaryPosEmbed,
    SanaWMSoftmaxCamAttention,
    _prepare_ucpe_ray_transforms,
    ucm_unproject_grid,
    world_to_ray_mats,
)
from hypothesis import given
from hypothesis import strategies as st
from scenes import FISHEYE, PINHOLE, random_poses, random_qkv, random_rotations
from torch import Tensor

import merope
from merope import Cameras, Pinhole
from merope.adapters.turned_keys import can_keep
from merope.attention.length_clamp import with_clamped_lengths
from merope.encodings.ucpe import UCPE
from merope.encodings.ucpe_clamped import UCPEClamped
from merope.geometry.poses import rigid

GRID, PATCH = (3, 4), 16
LENS = Pinhole(50.0, 55.0, 30.0, 25.0, GRID[1] * PATCH, GRID[0] * PATCH)


def as_sana_has_it(poses: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, F, 4, 4], [B, H, N, d]
    """The camera attention of diffusers' SANA-WM on the same tokens."""
    shape, patch, width = (poses.shape[1], *GRID), (1, PATCH, PATCH), q.shape[-1]
    in_patches = (value / PATCH for value in (LENS.fx, LENS.fy, LENS.cx, LENS.cy))
    rays = ucm_unproject_grid(*GRID, *in_patches, xi=0.0, dtype=torch.float64)
    rotary = SanaWMRotaryPosEmbed(width, patch, max_seq_len=16)(shape)
    transforms = _prepare_ucpe_ray_transforms(
        width, poses, shape, patch, rotary, world_to_ray_mats(rays.expand(len(poses), -1, -1, -1), poses)
    )
    out = SanaWMSoftmaxCamAttention()(*(x.transpose(1, 2) for x in (q, k, v)), transforms)
    return out.unflatten(2, (q.shape[1], -1)).transpose(1, 2)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_equals_diffusers(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """It attends in bfloat16; here it is kept from that. Its rotary phases stay in float32."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)
    poses = random_poses(2, 3)
    q, k, v = random_qkv(2, 2, 3 * GRID[0] * GRID[1], 32)
    cameras = Cameras(poses, LENS)
    ours, free = (
        merope.attend(q, k, v, encoding.plan(cameras, GRID), backend=backend)
        for encoding in (UCPEClamped(32, ray_offset=(0.0, 0.0)), UCPE(32, ray_offset=(0.0, 0.0)))
    )
    assert (ours - as_sana_has_it(poses, q, k, v)).abs().max() < 1e-5
    assert (ours - free).abs().max() > 1  # and the clamp has something to do


@given(seed=st.integers(0, 10**6), exponent=st.floats(-6, 7), fisheye=st.booleans())
def test_no_logit_exceeds_what_lengths_allow(seed: int, exponent: float, fisheye: bool) -> None:
    cameras = Cameras(random_poses(2, seed=seed, spread_m=10**exponent), FISHEYE if fisheye else PINHOLE)
    plan = UCPEClamped(16).plan(cameras, (1, 2))
    q, k, v = random_qkv(1, 2, 4, 16)
    clamped_q, clamped_k, clamped_v = with_clamped_lengths(q, k, v, plan)
    for token in range(4):
        logits = torch.einsum("hi,bij,hbj->hb", clamped_q[0, :, token], plan.operators(token), clamped_k[0])
        bound = q[0, :, token].norm(dim=-1)[:, None] * k[0].norm(dim=-1)
        assert (logits.abs() <= bound * (1 + 1e-3) + 1e-3).all()  # of the floor under mean squares
    for before, after in ((q, clamped_q), (k, clamped_k), (v, clamped_v)):
        assert (after.norm(dim=-1) <= before.norm(dim=-1) * (1 + 1e-12)).all()


def test_cameras_that_only_turn_have_nothing_to_clamp() -> None:
    poses = rigid(random_rotations(3), torch.zeros(3, 3, dtype=torch.float64))
    plan = UCPEClamped(16).plan(Cameras(poses, PINHOLE), (2, 2))
    q, k, v = random_qkv(1, 2, 12, 16)
    for before, after in zip((q, k, v), with_clamped_lengths(q, k, v, plan), strict=True):
        assert (after - before).abs().max() < 1e-12


def test_values_that_are_not_transformed_are_not_clamped() -> None:
    plan = UCPEClamped(16, transform_values=False).plan(Cameras(random_poses(3), PINHOLE), (2, 2))
    q, k, v = random_qkv(1, 2, 12, 16)
    assert with_clamped_lengths(q, k, v, plan)[2] is v


def test_the_clamp_depends_on_the_world_frame_and_u_does_not() -> None:
    poses, world = random_poses(3), random_poses(seed=8, spread_m=20.0)
    here, there = (UCPEClamped(16).plan(Cameras(p, PINHOLE), (2, 2)) for p in (poses, world @ poses))
    q, k, v = random_qkv(1, 2, 12, 16)
    assert (here.operators(5) - there.operators(5)).abs().max() < 1e-11
    assert (merope.attend(q, k, v, here) - merope.attend(q, k, v, there)).abs().max() > 0.01


def test_some_frames_attend_as_among_all() -> None:
    """So ranks may share a clip, and streams go on: the frame is that of the poses, not of the first query."""
    cameras, encoding = Cameras(random_poses(3), PINHOLE), UCPEClamped(16)
    some = encoding.plan(cameras.at(slice(1, 3)), (2, 2), key=cameras, times=[1, 2], key_times=[0, 1, 2])
    q, k, v = random_qkv(1, 2, 12, 16)
    whole = merope.attend(q, k, v, encoding.plan(cameras, (2, 2)))
    assert (merope.attend(q[:, :, 4:], k, v, some) - whole[:, :, 4:]).abs().max() < 1e-11


def test_gradients_go_through_the_factors() -> None:
    plan = UCPEClamped(8).plan(Cameras(random_poses(2), PINHOLE), (1, 1))
    qkv = [x.requires_grad_() for x in random_qkv(1, 1, 2, 8)]
    assert torch.autograd.gradcheck(lambda q, k, v: merope.attend(q, k, v, plan), qkv)


def test_streams_do_not_keep_turned_keys_of_it() -> None:
    """They are turned without `attend`, which clamps."""
    cameras = Cameras(random_poses(2), PINHOLE)
    with torch.no_grad():
        assert can_keep(torch.zeros(1), UCPE(16).plan(cameras, (1, 1)))
        assert not can_keep(torch.zeros(1), UCPEClamped(16).plan(cameras, (1, 1)))


def test_the_plan_says_that_it_clamps() -> None:
    cameras = Cameras(random_poses(2), PINHOLE)
    assert "clamped" in str(UCPEClamped(16).plan(cameras, (1, 1)))
    assert "clamped" not in str(UCPE(16).plan(cameras, (1, 1)))
