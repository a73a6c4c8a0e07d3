"""Flow matching with a clean prefix: noise that depends on the clip alone, and a loss on what is to be generated.

x_t = (1 − σ) x + σ ε, the target is ε − x; families of another kind of noise have formulas of their own. σ = 0 on clean
frames, which carry no loss. A clip has one σ; for a causal model every block has its own, because a stream makes one
block after the other. Everything random about a clip comes from (seed, step, place in the global batch), so that a run
is the same on any number of ranks and after a resume.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from merope.adapters.families.noise import FLOW_MATCHING, Noising
from merope.train.config import ObjectiveSection, TrainConfig

VALIDATION = 1 << 62
"""The step whose dice validation clips use: their noise is the same every time."""

HISTORY_DRAWS, JUDGE_DRAWS, OWN_PAST_DRAWS = 1 << 40, 1 << 41, 1 << 42
"""Where the draws of histories, of a judge and of a past of the model's own begin, beyond all places of a batch."""


@dataclass(frozen=True, eq=False)
class Noised:
    """Clips on their way between data and noise."""

    past: Tensor  # [B · views, C, T, H, W], what later blocks of a causal model see of the clip
    past_sigma: Tensor  # [B · views], its noise level
    latents: Tensor  # [B · views, C, T, H, W]
    target: Tensor  # [B · views, C, T, H, W]
    generated: Tensor  # bool [B · views, T], frames that carry noise and loss
    given: int  # first frames that are clean in every clip
    sigma: Tensor  # [B · views, T], 0 on clean frames
    drop_text: Tensor  # bool [B · views]


def clip_generator(seed: int, step: int, draw: int, device: torch.device) -> torch.Generator:
    """The dice of one clip. `draw` is its place in the global batch of the step."""
    state = np.random.SeedSequence((seed, step, draw)).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state >> 1))


def history_generator(seed: int, step: int, place: int) -> torch.Generator:
    """The dice of one clip's retrieved history, independent of those of its noise."""
    return clip_generator(seed, step, HISTORY_DRAWS + place, torch.device("cpu"))


def shifted(uniform: Tensor, shift: float) -> Tensor:
    """Noise level from a uniform number: a shift above 1 spends more training on noisy clips."""
    return shift * uniform / (1.0 + (shift - 1.0) * uniform)


def noise_levels(steps: int, shift: float) -> list[float]:
    """Noise levels at which so many steps begin, the first at 1; the last step ends at 0."""
    return shifted(torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)[:-1], shift).tolist()


def denoising_levels(config: TrainConfig) -> list[float] | None:
    """Noise levels of the steps that a run teaches its model to make do with; None: no such run."""
    if config.distillation is not None:
        return noise_levels(config.distillation.steps, config.objective.shift)
    return None if config.objective.levels is None else list(config.objective.levels)


def drawn_levels(uniform: Tensor, objective: ObjectiveSection) -> Tensor:
    """Noise levels from uniform numbers below 1: any, or one of those that are trained."""
    if objective.levels is None:
        return shifted(uniform, objective.shift)
    return uniform.new_tensor(objective.levels)[(uniform * len(objective.levels)).long()]


def add_noise(
    clean: Tensor,  # [B · views, C, T, H, W]
    prefix: int,  # clean latent frames
    objective: ObjectiveSection,
    generators: list[torch.Generator],  # [B]
    noising: Noising = FLOW_MATCHING,
) -> Noised:
    """Draw noise levels, dropouts and noise of every clip from its own generator. Views share all but the noise."""
    device, frames, views = clean.device, clean.shape[2], len(clean) // len(generators)
    block = objective.causal_block_frames or frames
    draws = 2 + -(-frames // block)  # level of the first block, two dropouts, levels of the other blocks
    dice = torch.stack([torch.rand(draws, generator=generator, device=device) for generator in generators])
    dice, shape = dice.repeat_interleave(views, dim=0), (views, *clean.shape[1:])
    noise = torch.cat([torch.randn(shape, generator=g, device=device) for g in generators]).to(clean.dtype)
    past, past_sigma = seen_past(clean, objective.past_noise, generators, noising)
    levels = drawn_levels(torch.cat((dice[:, :1], dice[:, 3:]), dim=1), objective)  # [B, blocks]
    keeps_prefix = dice[:, 1] >= objective.prefix_dropout
    is_prefix = torch.arange(frames, device=device) < prefix
    generated = ~(keeps_prefix[:, None] & is_prefix)
    sigma = levels.repeat_interleave(block, dim=1)[:, :frames] * generated
    level = sigma[:, None, :, None, None].to(clean.dtype)
    return Noised(
        past=past,
        past_sigma=past_sigma,
        latents=noising.noisy(clean, noise, level),
        target=noising.target(clean, noise, level),
        generated=generated,
        given=0 if objective.prefix_dropout else prefix,
        sigma=sigma,
        drop_text=dice[:, 2] < objective.text_dropout,
    )


def seen_past(
    clean: Tensor,  # [B · views, C, T, H, W]
    most: float,
    generators: list[torch.Generator],  # [B]
    noising: Noising,
) -> tuple[Tensor, Tensor]:  # [B · views, C, T, H, W], [B · views]
    """Clips as the past of later blocks, and their noise levels: half of them 0, the others up to `most`."""
    views = len(clean) // len(generators)
    if not most:
        return clean, clean.new_zeros(len(clean))
    dice = torch.cat([torch.rand(1, generator=generator, device=clean.device) for generator in generators])
    level = (most * (2 * dice - 1).clamp(min=0)).repeat_interleave(views)
    shape = (views, *clean.shape[1:])
    noise = torch.cat([torch.randn(shape, generator=g, device=clean.device) for g in generators]).to(clean.dtype)
    return noising.noisy(clean, noise, level[:, None, None, None, None].to(clean.dtype)), level


def loss_per_clip(
    prediction: Tensor,  # [B, C, T, H, W]
    noised: Noised,
    own: slice = slice(None),  # frames whose share of the loss is wanted
) -> Tensor:  # [B]
    """Mean squared error over the generated frames of each clip, so that every clip weighs the same.

    The shares of disjoint sets of frames add up to the loss of the clip.
    """
    error = (prediction.float() - noised.target.float()).square().mean(dim=(1, 3, 4))  # [B, T]
    return (error * noised.generated)[:, own].sum(1) / noised.generated.sum(1)
