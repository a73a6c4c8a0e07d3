"""A past that the model made itself: blocks learn to come after blocks that are not quite right.

In a stream every block follows blocks of the model. With teacher forcing alone it has seen true ones only, so what is
faint in one block is fainter in the next, and the windows of a house are gone after four. Here the past of a clip is
made anew: its blocks are covered with noise, and the model makes them clear again in its own steps. They show what the
clip shows, so that the true block is still what comes next, with the faults that the model has (Guo et al., End-to-End
Training for Autoregressive Video Diffusion via Self-Resampling, 2025).

All blocks are made at once. Each step sees what the step before predicted as the past, so that faults of one block
reach those of the next.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from merope.train.config import ObjectiveSection
from merope.train.model import Model
from merope.train.objective import OWN_PAST_DRAWS, Noised, clip_generator
from merope.train.streams import Examples


def own_past_levels(objective: ObjectiveSection, seed: int, step: int) -> tuple[float, ...]:
    """Noise levels of the steps in which the past of this training step is made; none if it is the true one."""
    if not objective.own_past or objective.levels is None:
        return ()
    dice = clip_generator(seed, step, OWN_PAST_DRAWS, torch.device("cpu"))
    is_own, first = torch.rand(2, generator=dice, dtype=torch.float64).tolist()
    below_noise = objective.levels[1:]
    return below_noise[int(first * len(below_noise)) :] if is_own < objective.own_past else ()


@torch.no_grad()
def with_own_past(
    model: Model,
    examples: Examples,
    noised: Noised,
    text: Tensor,  # [B, L, D]
    levels: tuple[float, ...],
    dice: list[torch.Generator],  # [B]
) -> Noised:
    """The same clips after blocks that the model made of their own ones."""
    clean, noising = examples.clean, model.noising
    noise = torch.stack([torch.randn(clean.shape[1:], generator=each, device=clean.device) for each in dice])
    generated = noised.generated[:, None, :, None, None]

    def level_of(level: float) -> Tensor:  # [B, 1, T, 1, 1]
        return (level * generated).to(clean.dtype)

    past, state = clean, noising.noisy(clean, noise.to(clean.dtype), level_of(levels[0]))
    as_clean = torch.zeros_like(noised.past_sigma)
    for level, below in pairwise((*levels, 0.0)):
        seen = replace(noised, past=past, past_sigma=as_clean, latents=state, sigma=level * noised.generated)
        predicted = model.predicted(seen, text, examples.cameras).to(clean.dtype)
        past = noising.towards_data(state, predicted, level_of(level), level_of(0.0))
        state = noising.towards_data(state, predicted, level_of(level), level_of(below))
    return replace(noised, past=state, past_sigma=as_clean)
