"""A video that a person brings: its first frames begin a drive. Nobody knows the street that it shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.video import upright
from merope.geometry.lenses import Lens
from merope.geometry.poses import relative
from merope.geometry.trajectories import unicycle_path
from merope.studio.lens_choice import LensChoice, training_notes
from merope.studio.steering import MOST_SPEED_M_S
from merope.studio.studio_model import StudioModel
from merope.world.clips import WorldClips

MOST_VIDEO = 64 << 20  # bytes
MOST_PIXELS = 4096 * 2304  # of a frame
MOST_RATE_HZ = 240.0
RATE_SLACK = 1.01
BEGINNINGS = {b"ftyp": (4, "mov"), b"\x1aE\xdf\xa3": (0, "matroska"), b"AVI ": (8, "avi")}
"""How files begin (bytes, where), and how they are read. Others, such as playlists, could name files of the server."""
KINDS = "mp4, mov, webm, mkv or avi"
NO_TRUTH = "your own video has no true street: there is no true view, no recovered path, and no error to measure"


@dataclass(frozen=True, eq=False)
class FittedVideo:
    """The first frames of a video as a model wants them."""

    frames: Tensor  # uint8 [T, H, W, 3]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class GivenVideo:
    """The beginning of a drive without a street. The last of its cameras is the origin, and looks ahead."""

    video: FittedVideo
    world_from_camera: Tensor  # [T, 4, 4]
    moves: str  # its cameras in words
    choice: LensChoice
    clips: WorldClips

    @cached_property
    def lens(self) -> Lens:
        return self.choice.lens(self.clips)

    def first(self, count: int) -> tuple[Tensor, Tensor]:  # uint8 [count, H, W, 3], [count, 4, 4]
        return self.video.frames[-count:], self.world_from_camera[-count:]

    def route(self, path: Tensor, count: int) -> Tensor:  # [T, 4, 4] from the origin -> [count − 1 + T, 4, 4]
        """All cameras of a video that begins with these frames and goes along a path."""
        return torch.cat((self.world_from_camera[-count:], path[1:].to(self.world_from_camera)))

    def frames_along(self, route: Tensor, count: int) -> Tensor:  # [T, 4, 4] -> uint8 [count, H, W, 3]
        return self.video.frames[-count:]

    def notes(self, path: Tensor | None = None) -> list[str]:  # [T, 4, 4]
        from_first = None if path is None else relative(path[:1], path)
        cameras = f"cameras of the video: {self.moves}, a {self.choice.fov_deg:g}° {self.choice.kind}"
        return [cameras, *training_notes(self.choice, self.clips, from_first)]

    @property
    def title(self) -> str:
        return "your video"


def cameras_ahead(speed_m_s: object, frames: int, frame_rate_hz: float) -> Tensor:  # [frames, 4, 4]
    """Straight ahead at a constant speed, to the origin."""
    is_number = isinstance(speed_m_s, int | float) and not isinstance(speed_m_s, bool)
    if not is_number or not 0.0 <= speed_m_s <= MOST_SPEED_M_S:  # type: ignore[operator]
        expected = f"a number from 0 to {MOST_SPEED_M_S:g} m/s"
        raise invalid("speed of the video", expected, repr(speed_m_s)[:80], "say how fast its camera drove")
    speeds = torch.full((frames - 1,), float(speed_m_s), dtype=torch.float64)  # type: ignore[arg-type]
    poses = unicycle_path(speeds, torch.zeros_like(speeds), frame_rate_hz)
    return relative(poses[-1:], poses)


def cameras_from_path(path: Tensor, frames: int) -> Tensor:  # [T, 4, 4] -> [frames, 4, 4]
    """The first cameras of a pose file, to the origin."""
    if len(path) < frames:
        raise invalid("cameras of the video", f"at least {frames}", len(path), "use the pose file of the whole video")
    return relative(path[frames - 1 : frames], path[:frames])


def read_given(file: Path, model: StudioModel) -> FittedVideo:
    """The first frames at the rate and size of a model's clips. What does not fit is cropped, and that is said."""
    clips, count = model.clips, max(model.first_frames, model.prefix_frames)
    with _opened(file) as (container, stream):
        rate_hz, width, height = _checked(stream)
        if rate_hz * RATE_SLACK < clips.frame_rate_hz:
            fix = "film it at that rate, or faster"
            raise invalid("video", f"at least {clips.frame_rate_hz:g} frames per second", f"{rate_hz:.4g}", fix)
        every = max(rate_hz / clips.frame_rate_hz, 1.0)
        wanted = [round(k * every) for k in range(count)]
        frames = _frames(container, wanted, (height, width))
    height, width = frames[0].shape[:2]  # those of a phone may lie on their side in the file
    rows, columns = _largest(height, width, clips.height / clips.width)
    fitted = torch.stack([_scaled(frame, rows, columns, clips.height, clips.width) for frame in frames])
    notes = [f"its first {count} frames begin the drive, {(count - 1) / clips.frame_rate_hz:.2g} s"]
    if every > RATE_SLACK:
        notes.append(f"{rate_hz:.4g} frames per second: one in {every:.3g} is taken, for {clips.frame_rate_hz:g}")
    if (rows, columns) != (height, width):
        notes.append(f"frames of {width}×{height} are cropped to {columns}×{rows}: give the field of view of that part")
    return FittedVideo(fitted, tuple(notes))


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its video. The kind is told by the first bytes, and nothing but this file is read."""
    import av

    with file.open("rb") as content:
        head = content.read(12)
        kind = next((name for mark, (at, name) in BEGINNINGS.items() if head[at : at + len(mark)] == mark), None)
        if kind is None:
            raise invalid("video", f"a file of kind {KINDS}", "another one", "write it again as mp4")
        content.seek(0)
        try:
            with av.open(content, format=kind) as container:
                yield container, container.streams.video[0]
        except (av.error.FFmpegError, IndexError, OverflowError) as error:
            got = getattr(error, "strerror", None) or type(error).__name__  # a whole message names the file
            raise invalid("video", "a film that can be decoded", got, "write it again as mp4") from None


def _checked(stream: Any) -> tuple[float, int, int]:  # frames per second, width, height
    rate, width, height = stream.average_rate, stream.width, stream.height
    if not 0 < width * height <= MOST_PIXELS:
        raise invalid("video", "at most 4096×2304", f"{width}×{height}", "scale it down")
    if rate is None or not 0.0 < float(rate) <= MOST_RATE_HZ:
        expected = f"a frame rate of at most {MOST_RATE_HZ:g} per second"
        raise invalid("video", expected, "none" if rate is None else f"{float(rate):.4g}", "write it again as mp4")
    return float(rate), width, height


def _frames(container: Any, wanted: list[int], size: tuple[int, int]) -> list[Tensor]:  # each uint8 [H, W, 3]
    found: list[Tensor] = []
    for number, frame in enumerate(container.decode(video=0)):
        if (frame.height, frame.width) != size:
            raise invalid("video", f"frames of {size[1]}×{size[0]}", f"{frame.width}×{frame.height}", "write it again")
        if number == wanted[len(found)]:
            found.append(upright(frame))
        if len(found) == len(wanted):
            return found
    raise invalid("video", f"at least {wanted[-1] + 1} frames long", "fewer", "use a longer one")


def _largest(height: int, width: int, shape: float) -> tuple[int, int]:  # rows, columns
    """The largest part of a picture with this height over width."""
    rows, columns = round(width * shape), round(height / shape)
    return (rows, width) if rows <= height else (height, columns)


def _scaled(frame: Tensor, rows: int, columns: int, height: int, width: int) -> Tensor:  # uint8 [H, W, 3]
    """The middle of a frame, rows × columns of it, as a picture of another size."""
    from PIL import Image

    top, left = (frame.shape[0] - rows) // 2, (frame.shape[1] - columns) // 2
    image = Image.fromarray(np.ascontiguousarray(frame[top : top + rows, left : left + columns].numpy()))
    return torch.from_numpy(np.asarray(image.resize((width, height), Image.Resampling.LANCZOS)).copy())
