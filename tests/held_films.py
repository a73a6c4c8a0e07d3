"""Films of a phone: pixels as its sensor had them, and how it was held."""

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
