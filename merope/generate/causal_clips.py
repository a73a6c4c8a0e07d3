"""A clip as frames: of a causal model a stream of blocks, each of which sees all that came before it."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from merope.formats.video import as_bytes
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.stream import CameraStream
from merope.geometry.cameras import Cameras

OnStep = Callable[[int, int], None]
"""Told after each denoising step how many are done, of how many."""


def made_clip(
    pipe: CameraVideoPipeline,
    frames: int,
    cameras: Cameras | None,  # [frames], of a rig those of all views
    prefix: Tensor | None,  # uint8 [(views,) T0, H, W, 3]
    on_step: OnStep = lambda done, of: None,
    *,
    seed: int,
    **options: Any,
) -> Tensor:  # uint8 [views, frames, H, W, 3]
    """What the model makes of a clip's cameras after its prefix: block by block if it is causal, else all at once.

    options: those that a call of the pipeline and its streams share.
    """
    if pipe.causal_block_frames is not None:
        return streamed_clip(pipe, frames, cameras, prefix, on_step, seed=seed, **options)[None]

    def report(_: CameraVideoPipeline, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        on_step(step + 1, options["num_inference_steps"])
        return tensors

    made = pipe(
        cameras=cameras,
        prefix=prefix,
        num_frames=frames,
        generator=torch.Generator("cpu").manual_seed(seed),  # the same noise on every machine
        output_type="pt",
        return_dict=False,
        callback_on_step_end=report,
        **options,
    )[0]
    return as_bytes(made.float().movedim(2, -1)).cpu()


def streamed_clip(
    pipe: CameraVideoPipeline,
    frames: int,
    cameras: Cameras | None,  # [frames]
    prefix: Tensor | None,  # uint8 [T0, H, W, 3], whole blocks
    on_step: OnStep = lambda done, of: None,
    **options: Any,
) -> Tensor:  # uint8 [frames, H, W, 3]
    """What `pipe.stream(**options)` makes of a clip's cameras after its prefix.

    A last block that the clip does not fill is driven with the last camera held, and cut.
    """
    blocks = [block for _, block in _blocks(pipe, frames, cameras, prefix, on_step, options)]
    return torch.cat(([] if prefix is None else [prefix.cpu()]) + blocks)[:frames]


def streamed_latents(
    pipe: CameraVideoPipeline,
    frames: int,
    cameras: Cameras | None,  # [frames]
    prefix: Tensor | None,  # uint8 [T0, H, W, 3], whole blocks
    **options: Any,
) -> Tensor:  # [C, T_latent, h, w] normalised
    """The latents of the same clip."""
    made = [] if prefix is None else [pipe.encode_frames(prefix[None]).cpu()]
    for stream, _ in _blocks(pipe, frames, cameras, prefix, lambda done, of: None, options):
        assert stream.latents is not None
        made.append(stream.latents.cpu())
    return torch.cat(made, dim=2)[0, :, : pipe.strides.latent_frames(frames)]


def _blocks(
    pipe: CameraVideoPipeline,
    frames: int,
    cameras: Cameras | None,
    prefix: Tensor | None,
    on_step: OnStep,
    options: dict[str, Any],
) -> Iterator[tuple[CameraStream, Tensor]]:
    """A stream after each of its blocks, with the frames of the block. All is seen, unless options have a window."""
    window = pipe.strides.latent_frames(frames) + (pipe.causal_block_frames or 0)
    given = None if prefix is None or cameras is None else cameras.at(slice(len(prefix)))
    stream = pipe.stream(prefix=prefix, cameras=given, **{"window": window, "sink": 0} | options)
    steps = stream.settings.steps
    total = steps * blocks_left(stream, frames)
    while stream.frames < frames:
        own = None if cameras is None else held(cameras, stream.frames, stream.block_frames)
        before = steps * stream.blocks
        yield stream, stream.drive(own, on_step=lambda step, before=before: on_step(before + step, total))  # type: ignore[misc]


def blocks_left(stream: CameraStream, frames: int) -> int:
    """Blocks that a stream needs to reach so many frames."""
    after_next = max(0, frames - stream.frames - stream.block_frames)  # the next one may be shorter than the others
    return 1 + math.ceil(after_next / (stream.settings.block * stream.pipe.strides.frames))


def held(cameras: Cameras, first: int, count: int) -> Cameras:
    """Cameras from a frame on; after the end the last one stays."""
    own = cameras.at(slice(first, first + count))
    last = cameras.at(slice(cameras.count - 1, cameras.count))
    for _ in range(count - own.count):
        own = own.joined(last)
    return own
