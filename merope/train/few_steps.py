"""Few steps: a causal model learns to make a block in 4 steps or fewer, after blocks that it made itself.

The teacher is the model as it was when the run began. First the student makes a clip in few steps, every block after
*its own* blocks, as it will be run. Then the teacher makes every block once more from the same noise, in many steps and
after the same blocks of the student. It may see them with some noise on top, as it saw blocks in its training: that
covers the student's faults, so that the teacher's answer is free of them.

After every step the student should be where the teacher is at that noise level. So one of its steps learns the sum of
several of the teacher's, and a block after imperfect blocks learns not to pass on what is wrong with them. Both are
regressions on paths that the noise decides: nothing is averaged over noise, there is no second network to be trained
against the first, and no balance to be kept.

The student's blocks are made without gradients. Then every noise level has its pass and its loss: the student's own
clip in the place of the past of teacher forcing, and its own states in the place of the noisy copy.
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

    @property
    def generated(self) -> Tensor:  # bool [B, T]
        frames = torch.arange(self.clean.shape[2], device=self.clean.device)
        return (frames >= self.prefix).expand(len(self.clean), -1)

    def noised(self, past: Tensor, past_level: float, latents: Tensor, target: Tensor, level: float) -> Noised:
        """The clips at a noise level, after a past at one of its own."""
        zeros = self.clean.new_zeros(len(self.clean))
        return Noised(
            past=past,
            past_sigma=zeros + past_level,
            latents=latents,
            target=target,
            generated=self.generated,
            given=self.prefix,
            sigma=level * self.generated,
            drop_text=zeros > 0,  # the text is what it should be already
        )


def few_step_losses(config: TrainConfig, model: Model, examples: Examples, step: int) -> Iterator[Tensor]:  # [B] each
    """The loss of every clip in parts that add up to it, one for each denoising step of the student."""
    levels = denoising_levels(config)
    assert levels is not None
    assert config.distillation is not None
    finer = noise_levels(config.distillation.teacher_steps, config.objective.shift)
    clips, covering = _drawn(config, model, examples, step)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.precision == "bf16"):
        own = rolled_out(model.transformer, clips, levels)
    past_noise = config.distillation.past_noise
    past = torch.lerp(own[-1], covering, past_noise)
    taught = taught_states(model, clips, examples.cameras, past, past_noise, finer)[:: len(finer) // len(levels)]
    for number, (level, after) in enumerate(pairwise((*levels, 0.0))):
        target = (own[number] - taught[number + 1]) / (level - after)
        noised = clips.noised(own[-1], 0.0, own[number], target, level)
        yield loss_per_clip(model.predicted(noised, clips.text, examples.cameras), noised) / len(levels)


def _drawn(config: TrainConfig, model: Model, examples: Examples, step: int) -> tuple[BlockClips, Tensor]:
    """What is random about the clips of a micro-batch; and the noise [B, C, T, H, W] that covers finished blocks."""
    clean, block = examples.clean, config.objective.causal_block_frames
    assert block is not None
    dice = [clip_generator(config.run.seed, step, place, clean.device) for place in examples.places]
    draws = torch.cat([torch.rand(1, generator=each, device=clean.device) for each in dice])
    noise, covering = (
        torch.stack([torch.randn(clean.shape[1:], generator=each, device=clean.device) for each in dice])
        for _ in range(2)
    )
    drop_text = draws < (0.0 if step == VALIDATION else config.objective.text_dropout)
    text = torch.where(drop_text[:, None, None], examples.no_text, examples.text)
    cameras = latent_cameras(examples.cameras, model.pipeline.strides.frames) if model.has_branch else None
    return BlockClips(clean, noise.to(clean.dtype), text, cameras, model.prefix, block), covering.to(clean.dtype)


@torch.no_grad()
def taught_states(
    model: Model,
    clips: BlockClips,
    cameras: Cameras,  # [B, RGB frames]
    past: Tensor,  # [B, C, T, H, W]
    past_level: float,
    levels: Sequence[float],
) -> list[Tensor]:  # [B, C, T, H, W] each
    """All blocks as the teacher has them at every noise level and at the end, each after the blocks of a given past."""
    generated = clips.generated[:, None, :, None, None]
    states = [torch.where(generated, clips.noise, clips.clean)]
    for level, after in pairwise((*levels, 0.0)):
        noised = clips.noised(past, past_level, states[-1], states[-1], level)
        velocity = model.predicted(noised, clips.text, cameras, by_teacher=True).to(past.dtype)
        states.append(states[-1] + (after - level) * velocity * generated)
    return states


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]  # or every length of a cache is compiled
def rolled_out(
    transformer: Any,  # WanTransformer3DModel
    clips: BlockClips,
    levels: Sequence[float],
    past: Tensor | None = None,  # [B, C, T, H, W] what blocks come after in place of those that were made
) -> list[Tensor]:  # [B, C, T, H, W] each
    """All blocks as they are at every noise level and at the end, each after those that were made before it."""
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
            cache = commit(transformer, cache, ready, (states[-1] if past is None else past)[:, :, place], text)
    return states
