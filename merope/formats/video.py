"""Images and video as uint8 tensors: decode, scale, encode. A file that cannot be read is named."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.stores import fetched, is_remote

SLACK_S = 2e-3  # files round the times of frames to milliseconds
RATE_TOLERANCE = 0.02  # between frames of a video and poses: clocks of cameras drift
MOST_OFF = 1.05  # of a step between wanted times: how far a frame may be from its own


def as_bytes(image: Tensor) -> Tensor:  # float in [0, 1] -> uint8, same shape
    """Colours as bytes. What is not a number is refused: it would become black."""
    if not bool(image.isfinite().all()):
        raise invalid("image", "finite colours", "NaN or inf", "check the weights of the model that made it")
    return (255.0 * image).round().clamp(0.0, 255.0).to(torch.uint8).contiguous()


def read_image(path: Path, height: int, width: int) -> Tensor:  # uint8 [H, W, 3]
    """An image file, upright, scaled to the given size."""
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with fetched(path) as local, Image.open(local) as image:
            upright_image = ImageOps.exif_transpose(image)  # a phone writes into its photos how it was held
            rgb = upright_image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    except FileNotFoundError:
        raise FileNotFoundError(f"image {path} is missing; complete the download") from None
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"image {path} cannot be decoded ({error}); get the file again") from error
    return torch.from_numpy(np.asarray(rgb).copy())


def write_image(image: Tensor, path: Path, quality: int = 95) -> None:  # uint8 [H, W, 3]
    """PNG, JPEG or WebP, by the file's suffix; the last two lose what the quality lets them."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.cpu().numpy()).save(path, quality=quality)


def read_video(path: Path, indices: list[int], height: int, width: int) -> Tensor:  # uint8 [T, H, W, 3]
    """The frames of these indices (increasing), scaled. A video that ends before them is refused by name."""
    wanted, found = set(indices), []
    for index, frame in enumerate(_decoded(path)):
        if index in wanted:
            found.append(upright(frame, height, width))
        if len(found) == len(indices):
            return torch.stack(found)
    raise ValueError(
        f"video {path} ends before frame {indices[len(found)]} of {indices[-1]}; it is truncated or too short"
    )


def read_first_frames(path: Path, limit: int) -> tuple[Tensor, int]:  # uint8 [T ≤ limit, H, W, 3], frames in the file
    """The first frames of a video at their own size, and how many it has."""
    frames, count = [], 0
    for count, frame in enumerate(decoded_frames(path), start=1):
        if count <= limit:
            frames.append(frame)
    if not frames:
        raise ValueError(f"video {path} has no frames; get the file again")
    if len({frame.shape for frame in frames}) > 1:
        raise ValueError(f"video {path} has frames of different sizes; get the file again")
    return torch.stack(frames), count


def rate_and_size(video: Path) -> tuple[float, int, int]:  # frames per second, width, height
    """What a video says of itself; the size is that of its upright frames."""
    import av

    if not video.is_file():
        raise FileNotFoundError(f"video {video} is missing; check the path")
    try:
        with av.open(str(video)) as container:
            stream = container.streams.video[0]
            rate, width, height = stream.average_rate, stream.width, stream.height
            first = next(container.decode(stream), None)
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"video {video} cannot be decoded ({error}); get the file again") from error
    if rate is None:
        raise ValueError(f"video {video} does not say its frame rate; write it again as mp4")
    lies = first is not None and _quarter_turns(first) % 2
    return (float(rate), height, width) if lies else (float(rate), width, height)


def decoded_frames(path: Path, height: int | None = None, width: int | None = None) -> Iterator[Tensor]:
    """Frames one after the other, upright, scaled if a size is given."""
    return (upright(frame, height, width) for frame in _decoded(path))


def frames_at(path: Path, rate_hz: float, height: int, width: int) -> Iterator[Tensor]:
    """The frames nearest to equal times from the first one on, upright and scaled.

    Frames of a phone or a dash-cam need not be equally far apart: in the dark they take longer. Where one is missing,
    its neighbour is shown twice; where more are, the video is refused from there on.
    """
    before, before_s, taken = None, 0.0, 0
    for frame, time_s in _timed(path):
        while (wanted_s := taken / rate_hz) <= time_s + SLACK_S:
            is_nearer = before is None or abs(time_s - wanted_s) < wanted_s - before_s
            nearest, off_s = (frame, abs(time_s - wanted_s)) if is_nearer else (before, wanted_s - before_s)
            if off_s > MOST_OFF / rate_hz:
                got = f"none between {before_s:.2f} s and {time_s:.2f} s"
                raise invalid(str(path), f"{rate_hz:g} frames per second", got, "cut the video there")
            yield upright(nearest, height, width)
            taken += 1
        before, before_s = frame, time_s


def _timed(path: Path) -> Iterator[tuple[Any, float]]:  # and seconds since the first frame
    first_s = None
    for index, frame in enumerate(_decoded(path)):
        if frame.time is None:
            fix = "write it again as mp4"
            raise invalid(str(path), "frames with times", f"none for frame {index}", fix)
        first_s = frame.time if first_s is None else first_s
        yield frame, frame.time - first_s


def upright(frame: Any, height: int | None = None, width: int | None = None) -> Tensor:  # uint8 [H, W, 3]
    """A decoded frame as it is to be seen: a phone writes into its videos how it was held."""
    import numpy as np

    turns = _quarter_turns(frame)
    if turns % 2:
        height, width = width, height
    rgb = frame.to_ndarray(format="rgb24", width=width, height=height)
    return torch.from_numpy(np.ascontiguousarray(np.rot90(rgb, turns)))


def _quarter_turns(frame: Any) -> int:
    """By how many the pixels are to be turned to the left."""
    return round(frame.rotation / 90) % 4


def _decoded(path: Path) -> Iterator[Any]:
    import av

    if not is_remote(path) and not path.is_file():
        raise FileNotFoundError(f"video {path} is missing; check the path")
    try:
        with fetched(path) as local, av.open(str(local)) as container:
            yield from container.decode(video=0)
    except (av.error.FFmpegError, IndexError) as error:  # IndexError: a file without a video stream
        raise ValueError(f"video {path} cannot be decoded ({error}); get the file again") from error


def write_video(frames: Tensor, path: Path, fps: float) -> None:  # uint8 [T, H, W, 3]
    """H.264 in the container of the file's suffix (.mp4). Height and width must be even."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        encode(frames, container, Fraction(fps).limit_denominator(1000))


def encode(frames: Tensor, container: Any, rate: Fraction, **options: str) -> None:  # uint8 [T, H, W, 3]
    """Put frames into an open file as H.264. options: those of the encoder besides its quality."""
    import av

    stream = container.add_stream("libx264", rate=rate)
    stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
    stream.options = {"crf": "12", **options}
    for frame in frames.cpu().numpy():
        container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
    container.mux(stream.encode())


def write_animation(frames: Tensor, path: Path, fps: float, rest_s: float = 1.0) -> None:  # uint8 [T, H, W, 3]
    """WebP that plays for ever, as pages show it without a player; it rests on the last frame."""
    from PIL import Image

    first, *others = (Image.fromarray(frame) for frame in frames.cpu().numpy())
    durations_ms = [round(1000 / fps)] * len(others) + [round(1000 * rest_s)]
    path.parent.mkdir(parents=True, exist_ok=True)
    first.save(path, save_all=True, append_images=others, duration=durations_ms, loop=0, quality=80, method=4)
