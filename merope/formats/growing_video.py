"""A video that grows: H.264 in a fragmented mp4, which plays at any time up to its last whole fragment.

Every fragment is encoded alone and appended. So a file can be gone on with after any stop, and frames that were written
stay what they are.
"""

import io
import os
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from merope.formats.video import encode
from merope.formats.writing import replacing

TICKS = 1000  # of the video's clock, times the numerator of its rate
FRAGMENT = (b"moof", b"mdat")


def append_frames(path: Path, frames: Tensor, first: int, fps: float) -> None:  # uint8 [T, H, W, 3]
    """Put a fragment at the end of a video whose next frame has the index `first`; 0 makes the file.

    An error leaves the video as it was.
    """
    encoded = _encoded(frames, first, fps)
    if first == 0:
        with replacing(path) as part:
            part.write_bytes(encoded)
        return
    places = {kind: (at, end) for kind, at, end in _boxes(io.BytesIO(encoded))}
    size = path.stat().st_size
    try:
        with path.open("ab") as file:
            file.write(b"".join(encoded[slice(*places[kind])] for kind in FRAGMENT))
    except BaseException:  # the disk is full: what follows half a fragment cannot be decoded
        os.truncate(path, size)
        raise


def fragment_ends(path: Path) -> list[int]:
    """Where each whole fragment of a video ends, in bytes; what follows the last one was cut off in the middle."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        return [end for kind, _, end in _boxes(file) if kind == b"mdat" and end <= size]


def _encoded(frames: Tensor, first: int, fps: float) -> bytes:
    """An mp4 of one fragment, without B frames, whose clock starts at the frame `first`."""
    import av

    rate = Fraction(fps).limit_denominator(1000)
    flags = {"movflags": "empty_moov+default_base_moof+frag_custom+skip_trailer"}
    clock = {"video_track_timescale": str(TICKS * rate.numerator)}
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4", container_options=flags | clock) as container:
        encode(frames, container, rate, bf="0", threads="1")  # with more threads, the bytes depend on the machine
    encoded = bytearray(buffer.getvalue())
    fragment = encoded.index(b"moof")
    struct.pack_into(">I", encoded, encoded.index(b"mfhd", fragment) + 8, first + 1)  # a number that rises
    struct.pack_into(">Q", encoded, encoded.index(b"tfdt", fragment) + 8, first * TICKS * rate.denominator)
    return bytes(encoded)


def _boxes(file: io.BufferedIOBase) -> Iterator[tuple[bytes, int, int]]:  # kind, start, end
    """The outer boxes of an mp4, the last of which may be cut off."""
    at = file.seek(0)
    while len(head := file.read(8)) == 8:
        size, kind = struct.unpack(">I4s", head)
        if size < len(head):  # no mp4 any more
            return
        yield kind, at, at + size
        at = file.seek(at + size)
