"""A video that is written fragment by fragment."""

from pathlib import Path

import av
import pytest
import torch
from small_disk import room_for
from torch import Tensor

from merope.formats.growing_video import append_frames, fragment_ends
from merope.formats.video import read_first_frames, write_video


def grey_frames(count: int) -> Tensor:  # uint8 [count, 32, 64, 3]
    """Bars that move; grey, because the codec halves the resolution of colour."""
    bars = (torch.arange(64) // 8 * 30).to(torch.uint8).expand(32, 64)
    return torch.stack([bars.roll(k, 1) for k in range(count)])[..., None].expand(-1, -1, -1, 3).contiguous()


def grown(path: Path, frames: Tensor, fps: float, parts: tuple[int, ...]) -> None:
    first = 0
    for count in parts:
        append_frames(path, frames[first : first + count], first, fps)
        first += count


def test_it_plays_as_a_video_that_is_written_at_once(tmp_path: Path) -> None:
    frames = grey_frames(33)
    for fps in (12.5, 29.97):
        grown(tmp_path / "grown.mp4", frames, fps, (9, 12, 1, 11))
        write_video(frames, tmp_path / "once.mp4", fps)
        shown, count = read_first_frames(tmp_path / "grown.mp4", 99)
        assert count == 33
        assert (shown.int() - frames.int()).abs().float().mean(dim=(1, 2, 3)).max() < 3
        with av.open(str(tmp_path / "grown.mp4")) as mine, av.open(str(tmp_path / "once.mp4")) as other:
            assert mine.streams.video[0].average_rate == other.streams.video[0].average_rate
            times = [[float(frame.time) for frame in one.decode(video=0)] for one in (mine, other)]
        torch.testing.assert_close(torch.tensor(times[0]), torch.tensor(times[1]))


def test_every_length_plays_and_a_cut_end_is_found(tmp_path: Path) -> None:
    path = tmp_path / "grown.mp4"
    grown(path, grey_frames(9), 8.0, (3, 3, 3))
    whole, ends = path.read_bytes(), fragment_ends(path)
    assert ends[-1] == len(whole)
    for parts, end in enumerate(ends, start=1):
        path.write_bytes(whole[:end])
        assert read_first_frames(path, 99)[1] == 3 * parts
        for more in (1, 7, 8, 40, 300):
            path.write_bytes(whole[: min(end + more, len(whole))])
            assert fragment_ends(path) == ends[:parts]


def test_a_fragment_that_does_not_fit_leaves_the_video_and_the_next_one_plays(tmp_path: Path) -> None:
    path, frames = tmp_path / "grown.mp4", grey_frames(9)
    grown(path, frames, 8.0, (3,))
    before = path.read_bytes()
    with room_for(len(before) + 100), pytest.raises(OSError, match="too large"):
        append_frames(path, frames[3:6], 3, 8.0)
    assert path.read_bytes() == before
    append_frames(path, frames[3:9], 3, 8.0)
    assert read_first_frames(path, 99)[1] == 9
