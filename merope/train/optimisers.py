"""What updates the weights: AdamW, Muon for matrices where it is wanted, learning rates, and a moving average."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from merope.errors import invalid
from merope.train.config import TrainConfig
from merope.train.muon import StackedMuon
from merope.train.vae_config import VaeTrainConfig

BLOCK = re.compile(r"(^|\.)(blocks|\w*transformer_blocks)\.\d+\.")
"""In the names of weights of a transformer's blocks."""


def build_optimisers(config: TrainConfig | VaeTrainConfig, model: nn.Module) -> list[Optimizer]:
    """AdamW over what is trained. With optimiser.matrices = "muon" the matrices of the blocks have Muon instead.

    Muon's steps are scaled to the size of AdamW's, so that one learning rate and weight decay serve both.
    """
    settings = config.optimiser
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    of_muon = [name for name in trained if settings.matrices == "muon" and _is_block_matrix(name, trained[name])]
    matrices = [trained.pop(name) for name in of_muon]
    optimisers: list[Optimizer] = []
    if any(isinstance(matrix, DTensor) for matrix in matrices):
        fix = "train on one rank, or leave it out: Muon needs whole matrices"
        raise invalid("optimiser.matrices", '"adamw" on several ranks', '"muon"', fix)
    if matrices:
        optimisers.append(StackedMuon(matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay))
    if trained:
        optimisers.append(
            AdamW(
                trained.values(),
                lr=settings.learning_rate,
                betas=settings.betas,
                eps=settings.epsilon,
                weight_decay=settings.weight_decay,
                fused=all(parameter.is_cuda for parameter in trained.values()),
            )
        )
    return optimisers


def _is_block_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a weight maps hidden states to hidden states. The first and the last layers are left to AdamW."""
    return parameter.ndim == 2 and BLOCK.search(name) is not None


def begin_step(optimisers: Sequence[Optimizer], rate: float) -> None:
    """Set the learning rate and forget the gradients."""
    for optimiser in optimisers:
        optimiser.zero_grad(set_to_none=True)
        for group in optimiser.param_groups:
            group["lr"] = rate


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of a step: constant, with a straight rise at the start and a straight fall to the end where they are wanted."""
    settings, left = config.optimiser, config.run.steps - step
    rise = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    fall = min(1.0, left / settings.decay_steps) if settings.decay_steps else 1.0
    return settings.learning_rate * rise * fall


def moving_average(config: TrainConfig | VaeTrainConfig, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained weights by name, none when no average is wanted."""
    if config.optimiser.ema_decay is None:
        return {}
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def update_average(average: dict[str, Tensor], model: nn.Module, decay: float | None, step: int) -> None:
    """Move the average after a step. Young averages forget faster, because they begin with untrained weights."""
    if decay is not None:
        decay = min(decay, (1 + step) / (10 + step))
        trained = [parameter.detach() for name, parameter in model.named_parameters() if name in average]
        torch._foreach_lerp_(list(average.values()), trained, 1.0 - decay)  # in the order of named_parameters
