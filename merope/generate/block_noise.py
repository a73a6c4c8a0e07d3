"""The noise of the blocks of a stream."""

import numpy as np
import torch
from torch import Tensor

OF_THE_BLOCK, OF_THE_PAST = 0, 1
"""What noise is for: the beginning of a block, or a cover of it when it is finished."""


def block_noise(seed: int, number: int, shape: tuple[int, ...], use: int = OF_THE_BLOCK) -> Tensor:  # float32
    """The noise of a block, whatever was driven before it."""
    state = np.random.SeedSequence((seed, number, use)).generate_state(1, np.uint64)[0]
    return torch.randn(shape, generator=torch.Generator().manual_seed(int(state >> 1)))
