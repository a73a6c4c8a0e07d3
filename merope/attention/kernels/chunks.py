"""How many query cameras the fused backend expands at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.attention.kernels.prepared import PreparedPlan
from merope.attention.kernels.support import bytes_per_camera

QUERY_TILE = 128
"""Queries per block of cuDNN's attention on Hopper: its time steps up with every 132 blocks of so many."""
BACKWARD_BYTES = 2**29
"""Most bytes of a chunk in the backward pass. Its blocks are of keys, and one query camera has enough of them."""


@dataclass(frozen=True)
class Chunk:
    """Some samples with all their query cameras, or some query cameras of one sample."""

    samples: slice
    cameras: range
    pairs: slice  # the same among all (sample, camera) pairs


def camera_chunks(k: Tensor, maps: PreparedPlan, memory_budget: int, backward: bool) -> Iterator[Chunk]:
    """Chunks of (sample, camera) pairs whose expanded keys and values (and their gradients) fit the budget."""
    batch, heads = k.shape[:2]
    budget = min(memory_budget, BACKWARD_BYTES) if backward else memory_budget
    most = max(1, budget // bytes_per_camera(k, maps.width, backward))
    tiles = heads * math.ceil(maps.tokens_per_group / QUERY_TILE)
    if most >= maps.groups:
        step = chunk_size(batch, most // maps.groups, tiles * maps.groups, _processors(k))
        for start in range(0, batch, step):
            stop = min(start + step, batch)
            yield Chunk(slice(start, stop), range(maps.groups), slice(start * maps.groups, stop * maps.groups))
        return
    step = chunk_size(maps.groups, most, tiles, _processors(k))
    for sample in range(batch):
        for start in range(0, maps.groups, step):
            cameras = range(start, min(start + step, maps.groups))
            pairs = slice(sample * maps.groups + start, sample * maps.groups + cameras.stop)
            yield Chunk(slice(sample, sample + 1), cameras, pairs)


def chunk_size(total: int, most: int, tiles_each: int, processors: int) -> int:
    """Items per chunk, at most `most`, for which all chunks take the fewest waves of tiles; the largest such."""

    def waves(size: int) -> int:
        full, rest = divmod(total, size)
        return full * math.ceil(size * tiles_each / processors) + math.ceil(rest * tiles_each / processors)

    return min(range(1, min(total, most) + 1), key=lambda size: (waves(size), -size))


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
