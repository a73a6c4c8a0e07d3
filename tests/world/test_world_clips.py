"""Clips of the procedural world: which drive and lens a seed has."""

import pytest
import torch

from merope.world.clips import DRIVES, WorldClips


def test_a_seed_has_the_drive_and_lens_of_this_version() -> None:
    """Where this fails on purpose, raise DRIVES too: results of other drives must not pass for comparable."""
    assert DRIVES == 2
    ends = {0: (-5.0635381209877135, 23.98514123648422), 1: (-4.33367216915787, 11.11344001749759)}  # x and z, metres
    lenses = {0: (101.03567251780214, 0.5669927748473945), 1: (52.92811322579267, 0.20333649049608749)}  # fx, ξ
    long = WorldClips(frames=49, frame_rate_hz=12.0, prefix_frames=9)
    mixed = WorldClips(fov_deg=(60.0, 120.0), xi=(0.0, 1.0))
    for seed in (0, 1):
        assert long.path(seed)[-1, [0, 2], 3].tolist() == pytest.approx(ends[seed], abs=1e-9)
        lens = mixed.lens(seed)
        assert (float(torch.as_tensor(lens.fx)), float(torch.as_tensor(lens.xi))) == pytest.approx(lenses[seed])
