"""Between data and noise: how a family mixes them, what its transformer predicts, and one step back towards data."""

from dataclasses import dataclass

import torch
from torch import Tensor

TIMESTEPS = 1000
"""Transformers take noise levels on this scale."""


class Noising:
    """Flow matching: straight from data to noise, and the velocity is predicted. Other kinds override all of it.

    Levels are between 0, data, and 1, noise; they have any shape that broadcasts with the latents.
    """

    def noisy(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Latents on their way."""
        return (1 - level) * clean + level * noise

    def target(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """What the transformer is to predict of them."""
        return noise - clean

    def timesteps(self, level: Tensor) -> Tensor:
        """Levels as the transformer takes them."""
        return TIMESTEPS * level

    def towards_data(self, latents: Tensor, predicted: Tensor, level: Tensor, below: Tensor) -> Tensor:
        """The latents at a lower level, by what was predicted of them."""
        return latents + (below - level) * predicted


FLOW_MATCHING = Noising()


@dataclass(frozen=True, eq=False)
class VPrediction(Noising):
    """A diffusion of whole timesteps: √ᾱ·data + √(1 − ᾱ)·noise. What is predicted is √ᾱ·noise − √(1 − ᾱ)·data."""

    data_shares: Tensor  # [timesteps] ᾱ of a scheduler of diffusers

    def noisy(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        data, other = self._amounts(level)
        return data * clean + other * noise

    def target(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        data, other = self._amounts(level)
        return data * noise - other * clean

    def timesteps(self, level: Tensor) -> Tensor:
        """Indices of `data_shares`."""
        count = len(self.data_shares)
        return (level * count).floor().clamp(0, count - 1).long()

    def towards_data(self, latents: Tensor, predicted: Tensor, level: Tensor, below: Tensor) -> Tensor:
        """A step of DDIM. Level 0 is data without noise, below the lowest timestep."""
        data, other = self._amounts(level)
        clean, noise = data * latents - other * predicted, data * predicted + other * latents
        return torch.where(below > 0, self.noisy(clean, noise, below), clean)

    def _amounts(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """Of data and of noise."""
        share = self.data_shares.to(level.device)[self.timesteps(level)]
        return share.sqrt().to(level.dtype), (1 - share).sqrt().to(level.dtype)
