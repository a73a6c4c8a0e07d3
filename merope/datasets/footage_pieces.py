"""Footage in pieces: what a training set of videos is to be like, and the frames of a video at its rate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.video import frames_at, rate_and_size

SCALES = ("speed_m_s", "speed_logs", "camera_height_m")
"""What may give metres, one at a time."""


@dataclass(frozen=True)
class FromVideos:
    """What decides a training set, besides its videos. One of the last three gives metres."""

    fps: float = 12.0
    frames: int = 49  # of a clip
    step: int = 24  # frames between the beginnings of clips
    piece_frames: int = 121  # recovered together, at most
    height: int = 288  # of the written frames
    width: int = 512
    longest_side: int = 768  # of the frames that poses are recovered from, at most
    speed_m_s: float | None = None  # on average, in every piece
    speed_logs: Path | None = None  # folder with <video>.csv: time_s, speed_m_s
    camera_height_m: float | None = None  # above the road

    def __post_init__(self) -> None:
        given = [name for name in SCALES if getattr(self, name) is not None]
        if len(given) > 1:
            raise invalid("the scale", f"known from one of {', '.join(SCALES)}", " and ".join(given), "leave one out")
        for name in ("fps", "frames", "step", "height", "width", "longest_side", *given):
            value = getattr(self, name)
            if not isinstance(value, Path) and not value > 0:
                raise invalid(name, "positive", value, "see docs/from-videos.md")
        if self.piece_frames < self.frames or self.frames < 2:
            expected = f"at least the {self.frames} frames of a clip, which are two at least"
            raise invalid("piece_frames", expected, self.piece_frames, "recover longer pieces")
        if self.height % 2 or self.width % 2:
            raise invalid("size", "even in height and width", f"{self.height}×{self.width}", "H.264 wants it")


@dataclass(frozen=True)
class Piece:
    """A run of frames of a video at the rate of training."""

    video: str  # its stem
    number: int
    frames: Tensor  # uint8 [T, H, W, 3], at most as large as asked for
    start_s: float

    @property
    def name(self) -> str:
        return f"{self.video}-{self.number:03d}"


def pieces(file: Path, settings: FromVideos) -> Iterator[Piece]:
    """The frames nearest to the wanted times, some at a time. The last piece of a video may be short."""
    rate_hz, width, height = rate_and_size(file)
    if settings.fps > rate_hz * 1.01:
        fix = f"ask for --fps {rate_hz:g}, or leave the video out"
        raise invalid(str(file), f"at least {settings.fps:g} frames per second", f"{rate_hz:g}", fix)
    shrink = min(1.0, settings.longest_side / max(width, height))
    size = (2 * round(height * shrink / 2), 2 * round(width * shrink / 2))
    frames: list[Tensor] = []
    taken = 0
    for frame in frames_at(file, min(settings.fps, rate_hz), *size):
        frames.append(frame)
        taken += 1
        if len(frames) == settings.piece_frames:
            yield _piece(file, frames, taken, settings)
            frames = []
    if frames:
        yield _piece(file, frames, taken, settings)


def _piece(file: Path, frames: Sequence[Tensor], taken: int, settings: FromVideos) -> Piece:
    first = taken - len(frames)
    return Piece(file.stem, first // settings.piece_frames, torch.stack(list(frames)), first / settings.fps)
