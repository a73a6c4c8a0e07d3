"""Video files: frames are upright, whatever way the camera was held, and only those that are wanted are converted."""

from pathlib import Path

import pytest
import torch
from held_films import write_at, write_held
from PIL import Image
from torch import Tensor

from merope.formats import video
from merope.formats.video import decoded_frames, frames_at, rate_and_size, read_image, read_video

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


def test_photos_are_upright(tmp_path: Path) -> None:
    """A phone writes its sensor's pixels and, beside them, how it was held."""
    pixels = torch.zeros(8, 16, 3, dtype=torch.uint8)
    pixels[:4, :4] = 255  # top left as the sensor has it
    photo = Image.fromarray(pixels.numpy())
    held = photo.getexif()
    held[274] = 6  # to be turned to the right
    photo.save(tmp_path / "photo.png", exif=held)
    seen = read_image(tmp_path / "photo.png", 16, 8)
    assert torch.equal(seen, pixels.rot90(-1, dims=(0, 1)))


def shown(path: Path, rate_hz: float) -> list[int]:  # numbers of frames
    return [round(float(frame.float().mean()) / 4) for frame in frames_at(path, rate_hz, HEIGHT, WIDTH)]


def numbered(count: int) -> Tensor:  # uint8 [count, H, W, 3]
    return (4 * torch.arange(count, dtype=torch.uint8))[:, None, None, None].expand(-1, HEIGHT, WIDTH, 3)


def test_frames_are_taken_by_their_times(tmp_path: Path) -> None:
    """A phone in the dark: 30 frames in the first second, then 15 a second."""
    times_ms = [round(1000 * k / 30) for k in range(30)] + [1000 + round(1000 * k / 15) for k in range(30)]
    write_at(tmp_path / "film.mp4", numbered(60), times_ms)
    taken = shown(tmp_path / "film.mp4", 10.0)
    assert len(taken) == 30
    assert max(abs(times_ms[frame] - 100 * k) for k, frame in enumerate(taken)) <= 34
    assert shown(tmp_path / "film.mp4", 15.0) == [*range(0, 30, 2), *range(30, 60)]


def test_one_missing_frame_is_bridged_and_a_gap_is_refused(tmp_path: Path) -> None:
    write_at(tmp_path / "film.mp4", numbered(5), [0, 100, 300, 400, 500])
    assert shown(tmp_path / "film.mp4", 10.0) in ([0, 1, 1, 2, 3, 4], [0, 1, 2, 2, 3, 4])
    write_at(tmp_path / "film.mp4", numbered(5), [0, 100, 200, 600, 700])
    frames = frames_at(tmp_path / "film.mp4", 10.0, HEIGHT, WIDTH)
    assert [next(frames).shape for _ in range(3)] == [(HEIGHT, WIDTH, 3)] * 3
    with pytest.raises(ValueError, match=r"10 frames per second, got none between 0\.20 s and 0\.60 s"):
        list(frames)
