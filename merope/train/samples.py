"""Sample videos of a run: what the first held-out clip should look like, what the model makes of it, and the path."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.draw.birdseye import birdseye_image
from merope.formats.video import as_bytes, write_video
from merope.generate.base_video import BaseVideo
from merope.generate.causal_clips import streamed_latents
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import changed
from merope.train.model import Model
from merope.train.objective import Noised
from merope.train.streams import Examples

SAMPLE_FPS = 8.0
LEAST_HEIGHT = 256
"""Small models make small pictures; they are enlarged by whole factors to be seen."""


def check_packages() -> None:
    """Fail before the first step where samples could not be written after many."""
    import av  # noqa: F401
    from PIL import Image  # noqa: F401


@torch.no_grad()
def write_sample(
    model: Model,
    examples: Examples,  # one clip
    steps: int,  # of denoising
    file: Path,
    write: bool,
) -> None:
    """Generate a clip from its prefix and cameras; all ranks take part, one writes."""
    true = decoded_views(model, examples.clean, examples.cameras.moments)
    model.denoiser.eval()
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.precision == "bf16"):
        latents = generated_latents(model, examples, true, steps)
    model.denoiser.train()
    video = decoded_views(model, latents, examples.cameras.moments)
    if write:
        path = examples.cameras.world_from_camera[0, : examples.cameras.moments].cpu()
        write_video(side_by_side(_in_column(true.cpu()), _in_column(video.cpu()), path), file, SAMPLE_FPS)


def generated_latents(
    model: Model,
    examples: Examples,  # one clip
    true: Tensor,  # uint8 [views, T, H, W, 3]
    steps: int,
) -> Tensor:  # [views, C, T_latent, h, w]
    """What the model makes of a clip's prefix, cameras and text, always from the same noise."""
    pipeline = model.pipeline
    if isinstance(pipeline, BaseVideo):
        return denoised_latents(model, examples, steps)
    pipeline.set_progress_bar_config(disable=True)
    prefix = true[:, : model.prefix_frames] if model.prefix_frames else None
    sampling: dict[str, Any] = {"prompt_embeds": examples.text, "num_inference_steps": steps, "guidance_scale": 1.0}
    sampling |= {"height": true.shape[2], "width": true.shape[3]}
    if model.causal_block_frames is not None:
        cameras = only_clip(examples.cameras) if model.has_branch else None
        first, clean = None if prefix is None else prefix[0], examples.clean[:, :, : model.prefix]
        sampling["block"] = model.causal_block_frames
        made = streamed_latents(pipeline, true.shape[1], cameras, first, **sampling)
        return torch.cat((clean, made[None, :, model.prefix :].to(clean)), dim=2)
    return pipeline(
        cameras=examples.cameras if model.has_branch else None,
        prefix=prefix,
        history=examples.history,
        num_frames=true.shape[1],
        **sampling,
        generator=torch.Generator(model.device).manual_seed(0),
        output_type="latent",
        return_dict=False,
    )[0]


def denoised_latents(
    model: Model,
    examples: Examples,  # one clip
    steps: int,
) -> Tensor:  # [1, C, T_latent, h, w]
    """The clip of a model of any family, in equal steps along its own kind of noise and without guidance."""
    clean, noising, generator = examples.clean, model.noising, torch.Generator(model.device).manual_seed(0)
    is_generated = torch.arange(clean.shape[2], device=clean.device)[None] >= model.prefix
    noise, keeps_text = torch.randn(clean.shape, generator=generator, device=clean.device), torch.zeros(1) > 0
    levels = torch.linspace(1.0, 0.0, steps + 1, device=clean.device)
    latents = torch.where(is_generated[:, None, :, None, None], noise, clean)
    for level, below in pairwise(levels):
        sigma = level * is_generated
        noised = Noised(clean, torch.zeros(1), latents, latents, is_generated, model.prefix, sigma, keeps_text)
        predicted = model.predicted(noised, examples.text, examples.cameras, examples.history).float()
        stepped = noising.towards_data(latents, predicted, level, below)
        latents = torch.where(is_generated[:, None, :, None, None], stepped, clean)
    return latents


def only_clip(cameras: Cameras) -> Cameras:  # [1, T] -> [T]
    """The cameras of a batch of one clip, without the batch."""
    lens, shape = cameras.lens, cameras.lens.batch_shape
    if len(shape) == 2:
        lens = changed(lens, lambda value: value.expand(shape)[0])
    return Cameras(cameras.world_from_camera[0], lens, plan_dtype=cameras.dtype, views=cameras.views)


def _in_column(views: Tensor) -> Tensor:  # [views, T, H, W, 3] -> [T, views · H, W, 3]
    return torch.cat(list(views), dim=1)


def side_by_side(
    true: Tensor,  # uint8 [T, H, W, 3]
    generated: Tensor,  # uint8 [T, H, W, 3]
    world_from_camera: Tensor,  # [T, 4, 4]
) -> Tensor:  # uint8 [T, H', W', 3]
    """Ground truth, generated video, and the commanded path with a mark where the camera is."""
    factor = max(1, -(-LEAST_HEIGHT // true.shape[1]))
    pair = torch.cat((true, generated), dim=2).repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    height = pair.shape[1]
    plots = [
        birdseye_image({"commanded": world_from_camera}, height, height, frame=frame) for frame in range(len(true))
    ]
    video = torch.cat((pair, torch.stack(plots)), dim=2)
    return video[:, : height // 2 * 2, : video.shape[2] // 2 * 2]


def decoded_views(
    model: Model,
    latents: Tensor,  # [views, C, T_latent, h, w]
    frames: int,  # RGB
) -> Tensor:  # uint8 [views, T, H, W, 3]
    """The frames of every view of a clip."""
    pipeline = model.pipeline
    if isinstance(pipeline, BaseVideo):
        return video_bytes(pipeline.decode_latents(latents, frames))
    return video_bytes(pipeline.decode_latents(latents))


def video_bytes(video: Tensor) -> Tensor:  # [B, 3, T, H, W] in [−1, 1] -> uint8 [B, T, H, W, 3]
    return as_bytes((video.permute(0, 2, 3, 4, 1).float() + 1) / 2)
