"""How well views of a rig agree where they overlap."""

import math

import pytest
import torch
from torch import Tensor

from merope.evaluate.overlap import Overlap, view_overlap
from merope.geometry.cameras import Cameras
from merope.world.clips import WorldClips, by_view
from merope.world.scene import World

CLIPS = WorldClips(
    frames=3, height=32, width=56, rig_yaw_deg=(0, 50), rig_fov_deg=(70, 80), rig_offset_m=0.8, prefix_frames=1
)


@pytest.fixture(scope="module")
def clip() -> tuple[Tensor, Cameras, World]:
    cameras = CLIPS.cameras([5])
    frames = by_view(CLIPS.pictures([5], cameras), 2)
    rig = Cameras(cameras.world_from_camera[0], cameras.lens, views=2)
    return frames, rig, World(5).cleared(rig.world_from_camera)


def test_true_views_agree_and_others_do_not(clip: tuple[Tensor, Cameras, World]) -> None:
    frames, rig, world = clip
    true = view_overlap(frames, rig, world)
    assert true.psnr_db > 25
    late = frames.clone()
    late[1] = late[1].roll(1, 0)
    assert view_overlap(late, rig, world).psnr_db < true.psnr_db - 3
    bright = frames.float()
    bright[1] = (bright[1] + 60).clamp_max(255)
    assert view_overlap(bright.to(torch.uint8), rig, world).psnr_db < 16
    grey = torch.full_like(frames, 90)
    assert view_overlap(grey, rig, world).psnr_db > 100


def test_given_frames_are_left_out(clip: tuple[Tensor, Cameras, World]) -> None:
    frames, rig, world = clip
    whole, last = view_overlap(frames, rig, world), view_overlap(frames, rig, world, first=2)
    assert 0 < last.pixels < whole.pixels
    spoiled = frames.clone()
    spoiled[:, :2] = 0
    assert view_overlap(spoiled, rig, world, first=2) == last
    assert math.isnan(Overlap(0.0, 0).psnr_db)
    with pytest.raises(ValueError, match=r"frames must be \[2, 3, H, W, 3\]"):
        view_overlap(frames[:1], rig, world)
