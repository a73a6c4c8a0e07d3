"""Films of a phone: pixels as its sensor had them, and how it was held."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
from torch import Tensor


def write_held(path: Path, frames: Tensor, degrees: int, rate_hz: int) -> None:  # uint8 [T, H, W, 3]
    """A film whose frames are to be turned to the left by so many degrees."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate_hz)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.set_display_rotation(degrees)
        for frame in frames.contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def write_at(path: Path, frames: Tensor, times_ms: Sequence[int]) -> None:  # uint8 [T, H, W, 3]
    """A film whose frames have these times."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for image, time_ms in zip(frames.contiguous().numpy(), times_ms, strict=True):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = time_ms, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
