"""What is learnt of a micro-batch: losses by the name that they have in the log, with their gradients."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from merope.train.adversary import LOSS, Blocks, Part, judged_parts
from merope.train.config import ObjectiveSection, TrainConfig
from merope.train.few_steps import few_step_losses
from merope.train.model import Model
from merope.train.objective import (
    JUDGE_DRAWS,
    OWN_PAST_DRAWS,
    VALIDATION,
    Noised,
    add_noise,
    clip_generator,
    loss_per_clip,
)
from merope.train.own_past import own_past_levels, with_own_past
from merope.train.streams import Examples


def loss_parts(config: TrainConfig, model: Model, examples: Examples, step: int) -> Iterator[Part]:
    """What is learnt of a micro-batch. Parts named `LOSS` add up to the loss of every clip."""
    if config.distillation is not None:
        yield from map(_as_loss, few_step_losses(config, model, examples, step))
    elif model.judge is None or step == VALIDATION:
        yield LOSS, clip_losses(config, model, examples, step)
    else:
        yield from adversary_parts(config, model, examples, step)


def _as_loss(part: Tensor) -> Part:  # not a loop's variable, which would hold a part's graph while the next is made
    return LOSS, part


def clip_losses(config: TrainConfig, model: Model, examples: Examples, step: int) -> Tensor:  # [B]
    """The flow-matching loss of every clip of a micro-batch."""
    noised, prediction = _predicted(config, model, examples, step)
    per_view = loss_per_clip(prediction, noised, model.own_frames(prediction.shape[2]))
    return per_view.unflatten(0, (-1, examples.cameras.views)).mean(1)


def adversary_parts(config: TrainConfig, model: Model, examples: Examples, step: int) -> Iterator[Part]:
    """The same with the aim to be taken for true, and what the judge learns."""
    assert config.adversary is not None
    assert config.objective.causal_block_frames is not None
    assert model.judge is not None
    noised, prediction = _predicted(config, model, examples, step)
    blocks = Blocks(examples.clean, noised, config.objective.causal_block_frames)
    dice = clip_generator(config.run.seed, step, JUDGE_DRAWS + examples.places[0], model.device)
    nudges = torch.randn((2, *blocks.true.shape), generator=dice, device=model.device)
    flow_loss, weight = loss_per_clip(prediction, noised), config.adversary.weight_at(step)
    yield from judged_parts(model.judge, blocks, noised, prediction, flow_loss, weight, nudges)


def _predicted(config: TrainConfig, model: Model, examples: Examples, step: int) -> tuple[Noised, Tensor]:
    """The clips of a micro-batch with noise, and what the model makes of them."""
    seed, device = config.run.seed, examples.clean.device

    def dice(first: int = 0) -> list[torch.Generator]:
        return [clip_generator(seed, step, first + place, device) for place in examples.places]

    objective = _objective(config, examples, step)
    noised = add_noise(examples.clean, model.prefix, objective, dice(), model.noising)
    text = examples.text.repeat_interleave(examples.cameras.views, 0)
    text = torch.where(noised.drop_text[:, None, None], examples.no_text, text)
    if levels := own_past_levels(objective, seed, step):
        noised = with_own_past(model, examples, noised, text, levels, dice(OWN_PAST_DRAWS + 1))
    return noised, model.predicted(noised, text, examples.cameras, examples.history)


def _objective(config: TrainConfig, examples: Examples, step: int) -> ObjectiveSection:
    """Nothing is dropped in validation; clips with a usable history lose their prefix more often (paper, Appendix)."""
    if step == VALIDATION:
        return replace(config.objective, text_dropout=0.0, prefix_dropout=0.0, past_noise=0.0, own_past=0.0)
    if config.history is None or examples.history is None:
        return config.objective
    dropout = max(config.history.prefix_dropout, config.objective.prefix_dropout)
    return replace(config.objective, prefix_dropout=dropout)
