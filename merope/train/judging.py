"""How a judge learns to tell what is true from what a model made, and what the model learns from it.

A judge gives a verdict on every place of what it is shown. Its loss is that of pairs: of one true and one made, the
true one should have the higher verdict (Jolicoeur-Martineau, 2019). Its slope is held down by small changes of what it
sees, so that the model's way to a better verdict stays smooth (Lin et al., 2025).

A judge works in fp32, whatever the model's precision. Its slope is a difference of verdicts on nearly the same thing.
In bf16 that is mostly rounding, and judges that worked in it diverged as soon as their learning rate was high.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

BELOW_ZERO = 0.2  # of what a judge's units let through

Verdicts = Callable[[Tensor], Tensor]  # [N, ...] -> [N, places]
"""A judge, with all that it sees besides."""


class Judged(NamedTuple):
    """What a judge learns of pairs, and how it does."""

    loss: Tensor  # [N]; of a judge that cannot tell 0.69
    told_apart: Tensor  # [N] 1 where it is right


def judged_pairs(
    judge: Verdicts,
    true: Tensor,  # [N, ...]
    made: Tensor,  # [N, ...]
    nudges: Tensor,  # [2, N, ...] small changes that must not change a verdict much
    slope_weight: float,
) -> Judged:
    """The judge's loss of pairs that it is shown; the model has no gradient of it."""
    pair = (true, made.detach())
    of_true, of_made = verdicts = [judge(each) for each in pair]
    size = nudges.square().mean().sqrt()
    nudged = [judge(each + nudge) for each, nudge in zip(pair, nudges, strict=True)]
    slopes = [(after - before) / size for after, before in zip(nudged, verdicts, strict=True)]
    held_down = slope_weight * (slopes[0].square() + slopes[1].square())
    loss = (softplus(of_made - of_true) + held_down).mean(1)
    return Judged(loss, (of_true.mean(1) > of_made.mean(1)).float())


def unlikeness(judge: Verdicts, true: Tensor, made: Tensor) -> Tensor:  # []
    """How much the judge prefers what is true. Its gradient is that of `made`."""
    with torch.no_grad():
        of_true = judge(true)
    return softplus(of_true - judge(made)).mean()


def aim_of_passing(
    loss: Tensor,  # of any shape, of `prediction`
    prediction: Tensor,  # [B, C, T, h, w]
    held: Tensor,  # the same without its past, of which `unlike` is made
    unlike: Tensor,  # []
    weight: float,
) -> Tensor:  # [B]
    """Zeros with the gradient of being taken for true: in every frame `weight` times as large as that of the loss."""
    (own,) = torch.autograd.grad(loss.sum(), prediction, retain_graph=True)
    (other,) = torch.autograd.grad(unlike, held)
    size, other_size = (x.float().square().sum((1, 3, 4), keepdim=True).sqrt() for x in (own, other))
    aim = torch.where(other_size > 0, other * (weight * size / other_size), 0.0)
    change = prediction.float() - prediction.detach().float()  # 0, with a gradient of 1
    return (change * aim).sum((1, 2, 3, 4))
