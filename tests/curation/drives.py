"""Paths on the ground for tests of curation."""

import numpy as np
import torch


def drives(count: int, points: int = 49, seed: int = 0) -> torch.Tensor:  # [count, points, 2]
    """Arcs of random speed and curvature, with a wobble; many are near duplicates."""
    random = np.random.default_rng(seed)
    length_m, turn = random.gamma(2.0, 6.0, count), random.normal(0.0, 0.4, count)
    s = np.linspace(0, 1, points)
    yaw = turn[:, None] * s + random.normal(0.0, 0.1, (count, 1)) * np.sin(2 * np.pi * s)
    steps = np.stack((np.sin(yaw), np.cos(yaw)), axis=-1) * (length_m / points)[:, None, None]
    return torch.from_numpy(np.cumsum(steps, axis=1) - steps[:, :1])
