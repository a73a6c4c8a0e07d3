"""Few steps: a causal model learns to make a block in 4 steps or fewer, after blocks that it made itself.

The teacher is the model as it was when the run began. From the same noise both make every block of a clip:

- the teacher in many steps, after the *true* blocks before it, as it was trained;
- the student in few steps, after *its own* blocks, as it will be run.

After every step the student should be where the teacher is at that noise level. So one of its steps learns the sum of
several of the teacher's, and a block after imperfect blocks learns to come back to what the true ones lead to. Both are
regressions on paths that the noise decides: nothing is averaged over noise, there is no second network to be trained
against the first, and no balance to be kept.

The student's blocks are made without gradients. Then every noise level has its pass and its loss: the student's own
clip in the place of the clean copy of teacher forcing, and its own states in the place of the noisy one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from merope.adapters.causal_wan import commit, ready_block
from merope.adapters.conditioning import PAST
from merope.adapters.families.noise import TIMESTEPS
from merope.adapters.key_cache import KeyCache
from merope.generate.conditions import latent_cameras
from merope.geometry.cameras import Cameras
from merope.train.config import TrainConfig
from merope.train.model import Model
from merope.train.objective import (
    VALIDATION,
    Noised,
    clip_generator,
    denoising_levels,
    loss_per_clip,
    noise_levels,
)
from merope.train.streams import Examples


@dataclass(frozen=True, eq=False)
class BlockClips:
    """Clips that are made block by block."""

    clean: Tensor  # [B, C, T, H, W]
    noise: Tensor  # [B, C, T, H, W]
    text: Tensor  # [B, L, D]
    cameras: Cameras | None  # [B, T]
    prefix: int  # latent frames that are given
    block: int  # latent frames


def few_step_losses(config: TrainConfig, model: Model, examples: Examples, step: int) -> Iterator[Tensor]:  # [B] each
    """The loss of every clip in parts that add up to it, one for each denoising step of the student."""
    levels = denoising_levels(config)
    assert levels is not None
    assert config.distillation is not None
    assert model.teacher is not None
    finer = noise_levels(config.distillation.teacher_steps, config.objective.shift)
    drop_text, clips = _drawn(config, model, examples, step)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.precision == "bf16"):
        taught = rolled_out(model.teacher, clips, finer, own_past=False)[:: len(finer) // len(levels)]
        own = rolled_out(model.transformer, clips, levels, own_past=True)
    generated = (torch.arange(clips.clean.shape[2], device=clips.clean.device) >= clips.prefix).expand(len(own[0]), -1)
    for number, (level, after) in enumerate(pairwise((*levels, 0.0))):
        noised = Noised(
            clean=own[-1],
            latents=own[number],
            target=(own[number] - taught[number + 1]) / (level - after),
            generated=generated,
            sigma=level * generated,
            drop_text=drop_text,
        )
        prediction = model.predicted(noised, clips.text, examples.cameras)
        yield loss_per_clip(prediction, noised) / len(levels)


def _drawn(config: TrainConfig, model: Model, examples: Examples, step: int) -> tuple[Tensor, BlockClips]:
    """What is random about the clips of a micro-batch: bool [B], whose text is dropped, and their noise."""
    clean, block = examples.clean, config.objective.causal_block_frames
    assert block is not None
    dice = [clip_generator(config.run.seed, step, place, clean.device) for place in examples.places]
    draws = torch.cat([torch.rand(1, generator=each, device=clean.device) for each in dice])
    noise = torch.stack([torch.randn(clean.shape[1:], generator=each, device=clean.device) for each in dice])
    drop_text = draws < (0.0 if step == VALIDATION else config.objective.text_dropout)
    text = torch.where(drop_text[:, None, None], examples.no_text, examples.text)
    cameras = latent_cameras(examples.cameras, model.pipeline.strides.frames) if model.has_branch else None
    return drop_text, BlockClips(clean, noise.to(clean.dtype), text, cameras, model.prefix, block)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]  # or every length of a cache is compiled
def rolled_out(
    transformer: Any,  # WanTransformer3DModel
    clips: BlockClips,
    levels: Sequence[float],
    own_past: bool,
) -> list[Tensor]:  # [B, C, T, H, W] each
    """All blocks as they are at every noise level and at the end, frames of the prefix clean.

    own_past: a block sees the blocks that were made before it, else the true ones.
    """
    frames = clips.clean.shape[2]
    states = [clips.clean.clone() for _ in range(len(levels) + 1)]
    text = clips.text.to(transformer.dtype)
    cache = KeyCache(window=frames, block=clips.block)
    for start in range(0, frames, clips.block):
        place = slice(start, start + clips.block)
        cameras = None if clips.cameras is None else clips.cameras.at(place)
        ready = ready_block(transformer, cache, clips.clean[:, :, place], cameras)
        if start >= clips.prefix:
            states[0][:, :, place] = latents = clips.noise[:, :, place]
            for number, (level, after) in enumerate(pairwise((*levels, 0.0)), 1):
                timestep = torch.full((len(latents),), TIMESTEPS * level, device=latents.device)
                given = {PAST: ready}
                velocity = transformer(latents, timestep, text, attention_kwargs=given, return_dict=False)[0]
                latents = latents + (after - level) * velocity.to(latents.dtype)
                states[number][:, :, place] = latents
        if place.stop < frames:
            past = states[-1] if own_past else clips.clean
            cache = commit(transformer, cache, ready, past[:, :, place], text)
    return states
