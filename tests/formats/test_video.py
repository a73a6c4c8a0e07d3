"""Video files: frames are upright, whatever way the camera was held, and only those that are wanted are converted."""

from pathlib import Path

import pytest
import torch
from held_films import write_held
from torch import Tensor

from merope.formats import video
from merope.formats.video import decoded_frames, rate_and_size, read_video

HEIGHT, WIDTH = 32, 64


@pytest.fixture
def film() -> Tensor:  # uint8 [5, H, W, 3]
    """Bright at the top left, and brighter from frame to frame."""
    frames = torch.zeros(5, HEIGHT, WIDTH, 3, dtype=torch.uint8)
    frames[:, : HEIGHT // 2, : WIDTH // 2] = (100 + 30 * torch.arange(5, dtype=torch.uint8))[:, None, None, None]
    return frames


@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
def test_frames_are_upright(tmp_path: Path, film: Tensor, degrees: int) -> None:
    write_held(tmp_path / "film.mp4", film, degrees, 12)
    upright = film.rot90(degrees // 90, dims=(1, 2))
    height, width = upright.shape[1:3]
    assert rate_and_size(tmp_path / "film.mp4") == (12.0, width, height)
    frames = torch.stack(list(decoded_frames(tmp_path / "film.mp4")))
    assert (frames.float() - upright.float()).abs().mean() < 3
    smaller = read_video(tmp_path / "film.mp4", [0, 3], height // 2, width // 2)
    assert (smaller.float() - upright[[0, 3], ::2, ::2].float()).abs().mean() < 6


def test_only_wanted_frames_are_converted(tmp_path: Path, film: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    write_held(tmp_path / "film.mp4", film, 0, 12)
    converted, upright = [], video.upright
    monkeypatch.setattr(video, "upright", lambda frame, *size: converted.append(frame.pts) or upright(frame, *size))
    assert read_video(tmp_path / "film.mp4", [2, 4], HEIGHT, WIDTH).shape[0] == len(converted) == 2
