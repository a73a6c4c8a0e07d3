"""Sample videos of a training run: true bytes, and a size that can be looked at."""

import torch

from merope.train.samples import side_by_side, video_bytes
from merope.world.clips import as_video


def test_bytes_come_back_from_the_range_of_the_model() -> None:
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16, 1).expand(1, 2, 16, 16, 3)
    assert torch.equal(video_bytes(as_video(levels)), levels)
    assert torch.equal(video_bytes(torch.tensor([-3.0, 3.0]).reshape(1, 1, 2, 1, 1)).flatten(), torch.tensor([0, 255]))


def test_small_frames_are_enlarged_by_whole_factors_beside_their_path() -> None:
    true = torch.randint(256, (2, 16, 24, 3), dtype=torch.uint8)
    shown = side_by_side(true, 255 - true, torch.eye(4, dtype=torch.float64).repeat(2, 1, 1))
    assert shown.shape == (2, 256, 2 * 24 * 16 + 256, 3)
    assert torch.equal(shown[:, ::16, : 24 * 16 : 16], true)
    assert torch.equal(shown[:, ::16, 24 * 16 : 2 * 24 * 16 : 16], 255 - true)
