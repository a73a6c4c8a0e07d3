"""Muon over stacks of matrices is Muon."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import Muon

from merope.train.muon import StackedMuon, orthogonal

SHAPES = [(12, 20), (20, 12), (12, 20), (16, 16), (12, 20)]


def of_pytorch(weights: list[Tensor]) -> Muon:
    return Muon(weights, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


def of_ours(weights: list[Tensor]) -> Muon:
    return StackedMuon(weights, lr=0.01, weight_decay=0.1)


def matrices(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def descend(optimiser: torch.optim.Optimizer, weights: list[Tensor], steps: range) -> None:
    for step in steps:
        for weight, gradient in zip(weights, matrices(100 + step), strict=True):
            weight.grad = gradient.detach()
        optimiser.step()


def test_steps_are_those_of_pytorch() -> None:
    ours, theirs = matrices(0), matrices(0)
    descend(of_ours(ours), ours, range(4))
    descend(of_pytorch(theirs), theirs, range(4))
    for begun, mine, other in zip(matrices(0), ours, theirs, strict=True):
        # The iteration runs in bfloat16. Where its sums have another order, some roundings of 0.4 % differ.
        assert (mine - other).norm() < 0.03 * (other - begun).norm()


@pytest.mark.parametrize("first", [of_ours, of_pytorch])
def test_state_goes_on_in_both(first: Callable[[list[Tensor]], Muon]) -> None:
    """A run that began with PyTorch's class goes on with ours."""
    apart, at_once = matrices(1), matrices(1)
    begun = first(apart)
    descend(begun, apart, range(2))
    gone_on = of_ours(apart)
    gone_on.load_state_dict(begun.state_dict())
    descend(gone_on, apart, range(2, 4))
    descend(of_ours(at_once), at_once, range(4))
    for start, mine, other in zip(matrices(1), apart, at_once, strict=True):
        assert (mine - other).norm() < 0.03 * (other - start).norm()


def test_weights_without_gradient_stay() -> None:
    weights = matrices(2)
    weights[0].grad = torch.ones_like(weights[0])
    before = [weight.detach().clone() for weight in weights]
    of_ours(weights).step()
    assert [torch.equal(a, b) for a, b in zip(before, weights, strict=True)] == [False, True, True, True, True]


def test_directions_are_nearly_orthogonal() -> None:
    wide = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(3))
    for wanted in (wide, wide.mT):
        found = torch.linalg.svdvals(orthogonal(wanted, (3.4445, -4.7750, 2.0315), 5, 1e-7).float())
        assert found.min() > 0.5
        assert found.max() < 1.3
