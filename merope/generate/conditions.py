"""What a clip is conditioned on and asked for, checked before any model runs: cameras, clean prefix, noise, output."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from merope.errors import invalid
from merope.generate.strides import VideoStrides
from merope.geometry.cameras import Cameras

if TYPE_CHECKING:
    from PIL.Image import Image

Frames = Tensor | np.ndarray | Sequence["Image"]
"""uint8 [T, H, W, 3], one batch dimension more, or PIL images."""

OUTPUT_TYPES = ("np", "pt", "pil", "latent")


def check_cameras(cameras: Cameras, height: int, width: int, num_frames: int) -> None:
    """Refuse cameras that are not those of the clip's RGB frames."""
    if not isinstance(cameras, Cameras):
        raise invalid("cameras", "merope.Cameras", type(cameras).__name__, "pass Cameras(world_from_camera, lens)")
    if cameras.moments != num_frames:
        shorter = "the trajectory ends before the clip: lengthen it or ask for fewer frames"
        fix = shorter if cameras.moments < num_frames else f"keep the first {num_frames}"
        raise invalid("cameras", f"{num_frames}, one per RGB frame", cameras.moments, fix)
    lens = cameras.lens
    if (lens.height, lens.width) != (height, width):
        fix = f"if the images are scaled, use merope.geometry.lens_batches.resized(lens, {width}, {height})"
        expected = f"for images of {width}×{height}, the size of the video"
        raise invalid("cameras.lens", expected, f"{lens.width}×{lens.height}", fix)


def check_attention_kwargs(names: Iterable[str], causal_block_frames: int | None) -> None:
    """Refuse what diffusers' own pipelines pass on: it would be overwritten here, or ignored without a branch.

    A causal model would see the future, which it never saw in training.
    """
    if causal_block_frames is not None and "sees" not in names:
        got = f"a causal model of blocks of {causal_block_frames} latent frames"
        fix = 'use pipe.stream, or merope generate, which streams; or pass attention_kwargs={"sees": …}'
        raise invalid("the model of pipe(…)", "one that sees whole clips", got, fix)
    for name in ("cameras", "history"):
        if name in names:
            fix = f"pass {name}= to the pipeline, cameras those of every RGB frame"
            raise invalid(f'attention_kwargs["{name}"]', "left out", name, fix)


def latent_cameras(cameras: Cameras, frame_stride: int) -> Cameras:
    """The cameras of the latent frames: those of RGB frames 0, stride, 2·stride, …"""
    return cameras if frame_stride == 1 else cameras.at(slice(None, None, frame_stride))


def prefix_tensor(prefix: Frames, name: str = "prefix") -> Tensor:  # uint8 [B or 1, T, H, W, 3]
    """Clean frames in one layout, whichever way they came. `name` is what messages call them."""
    if isinstance(prefix, Tensor):
        frames = prefix
    elif isinstance(prefix, np.ndarray):
        frames = torch.from_numpy(np.ascontiguousarray(prefix))  # torch refuses flipped views, such as BGR to RGB
    else:
        frames = _from_images(prefix, name)
    if frames.dtype != torch.uint8 or frames.ndim not in (4, 5) or frames.shape[-1] != 3 or 0 in frames.shape:
        got = f"{str(frames.dtype).removeprefix('torch.')} {list(frames.shape)}"
        fix = "pass RGB frames of 0…255, colours last"
        raise invalid(name, "uint8 [T, H, W, 3] or [B, T, H, W, 3], or PIL images", got, fix)
    return frames if frames.ndim == 5 else frames[None]


def _from_images(images: Sequence["Image"], name: str) -> Tensor:  # uint8 [T, H, W, 3]
    from PIL.Image import Image

    if not isinstance(images, list | tuple) or not all(isinstance(image, Image) for image in images):
        is_row = isinstance(images, list | tuple) and len(images) > 0
        got = f"{type(images).__name__} of {type(images[0]).__name__}" if is_row else type(images).__name__
        raise invalid(name, "uint8 [T, H, W, 3] or a list of PIL images", got, "stack arrays; put one image in a list")
    sizes = sorted({image.size for image in images})
    if len(sizes) != 1:
        raise invalid(name, "at least one image, all of one size", sizes, "scale the images alike")
    return torch.from_numpy(np.stack([np.asarray(image.convert("RGB")) for image in images]))


def check_prefix_count(count: int, strides: VideoStrides, num_frames: int) -> None:
    """Refuse a number of clean frames that does not fill latent frames, or leaves nothing to generate."""
    strides.check_frames("the number of prefix frames", count)
    if count >= num_frames:
        fix = "ask for more frames or give fewer"
        raise invalid("prefix", f"shorter than the clip of {num_frames} frames", f"{count} frames", fix)


def check_prefix(
    frames: Tensor,  # uint8 [B, T, H, W, 3]
    strides: VideoStrides,
    height: int,
    width: int,
    num_frames: int,
) -> None:
    """Refuse a prefix that does not fill latent frames, is of another size, or leaves nothing to generate."""
    check_prefix_count(frames.shape[1], strides, num_frames)
    check_size("prefix", tuple(frames.shape[2:4]), height, width)


def check_size(name: str, got: tuple[int, ...], height: int, width: int) -> None:
    """Refuse pictures, or a lens for pictures, of another height and width than the video's."""
    if got != (height, width):
        fix = "scale the frames, and the lens alike with merope.geometry.lens_batches.resized"
        raise invalid(name, f"of {width}×{height}, the size of the video", f"{got[1]}×{got[0]}", fix)


def batch_size(
    prompt_count: int,
    cameras: Cameras | None,
    prefix: Tensor | None,  # uint8 [B · views, T, H, W, 3]
) -> int:
    """Clips to generate: what comes once is shared, all else must come equally often. A rig is one clip."""
    views = 1 if cameras is None else cameras.views
    counts = {"prompts": prompt_count}
    if cameras is not None and cameras.world_from_camera.ndim == 4:
        counts["cameras"] = cameras.world_from_camera.shape[0]
    if prefix is not None:
        if prefix.shape[0] % views:
            fix = "give the first frames of every view, those of a clip next to each other"
            raise invalid("prefix", f"one for each of the rig's {views} views", prefix.shape[0], fix)
        counts["prefix"] = prefix.shape[0] // views
    batch = max(counts.values())
    if any(count not in (1, batch) for count in counts.values()):
        raise invalid("the batch", "one size, or 1 for what all clips share", counts, "pass as many of each")
    return batch


def check_noise(
    shape: tuple[int, ...], latents: Tensor | None, generator: torch.Generator | list[torch.Generator] | None
) -> None:
    """Refuse the caller's noise, or sources of it, that do not fit the latents [B, C, T, h, w]."""
    if latents is not None and latents.shape != shape:
        fix = "leave it out, or make it for this batch, size and number of frames"
        raise invalid("latents", str(list(shape)), list(latents.shape), fix)
    if isinstance(generator, list) and len(generator) != shape[0]:
        raise invalid("generator", f"one, or a list of {shape[0]}", len(generator), "pass one per clip")


def check_choices(output_type: str, callback_inputs: Sequence[str], known_inputs: Sequence[str]) -> None:
    """Refuse outputs that there are not, and callbacks that want them."""
    if output_type not in OUTPUT_TYPES:
        raise invalid("output_type", f"one of {', '.join(OUTPUT_TYPES)}", repr(output_type), "choose one of them")
    unknown = [name for name in callback_inputs if name not in known_inputs]
    if unknown:
        fix = "leave out the others"
        raise invalid("callback_on_step_end_tensor_inputs", f"among {list(known_inputs)}", unknown, fix)


def check_finite(name: str, made: Tensor) -> None:
    """Refuse what a model made of NaN: it would be written as black frames."""
    if not bool(made.isfinite().all()):
        fix = "check the weights of transformer, branch and VAE; float16 may overflow where bfloat16 does not"
        raise invalid(name, "finite", "NaN or inf", fix)
