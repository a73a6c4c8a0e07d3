"""A clip of a causal model: as a stream of blocks, each of which sees all that came before it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.stream import CameraStream
from merope.geometry.cameras import Cameras


def streamed_clip(
    pipe: CameraVideoPipeline,
    frames: int,
    cameras: Cameras | None,  # [frames]
    prefix: Tensor | None,  # uint8 [T0, H, W, 3], whole blocks
    tell: Callable[[int], None] = lambda done: None,  # of the frames that are done
    **options: Any,
) -> Tensor:  # uint8 [frames, H, W, 3]
    """What `pipe.stream(**options)` makes of a clip's cameras after its prefix.

    A last block that the clip does not fill is driven with the last camera held, and cut.
    """
    made = [] if prefix is None else [prefix.cpu()]
    for stream, block in _blocks(pipe, frames, cameras, prefix, options):
        made.append(block)
        tell(min(stream.frames, frames))
    return torch.cat(made)[:frames]


def streamed_latents(
    pipe: CameraVideoPipeline,
    frames: int,
    cameras: Cameras | None,  # [frames]
    prefix: Tensor | None,  # uint8 [T0, H, W, 3], whole blocks
    **options: Any,
) -> Tensor:  # [C, T_latent, h, w] normalised
    """The latents of the same clip."""
    made = [] if prefix is None else [pipe.encode_frames(prefix[None]).cpu()]
    for stream, _ in _blocks(pipe, frames, cameras, prefix, options):
        assert stream.latents is not None
        made.append(stream.latents.cpu())
    return torch.cat(made, dim=2)[0, :, : pipe.strides.latent_frames(frames)]


def _blocks(
    pipe: CameraVideoPipeline, frames: int, cameras: Cameras | None, prefix: Tensor | None, options: dict[str, Any]
) -> Iterator[tuple[CameraStream, Tensor]]:
    """A stream after each of its blocks, which see all that there is, with the frames of the block."""
    window = pipe.strides.latent_frames(frames) + (pipe.causal_block_frames or 0)
    given = None if prefix is None or cameras is None else cameras.at(slice(len(prefix)))
    stream = pipe.stream(prefix=prefix, cameras=given, window=window, sink=0, **options)
    while stream.frames < frames:
        own = None if cameras is None else held(cameras, stream.frames, stream.block_frames)
        yield stream, stream.drive(own)


def held(cameras: Cameras, first: int, count: int) -> Cameras:
    """Cameras from a frame on; after the end the last one stays."""
    own = cameras.at(slice(first, first + count))
    last = cameras.at(slice(cameras.count - 1, cameras.count))
    for _ in range(count - own.count):
        own = own.joined(last)
    return own
