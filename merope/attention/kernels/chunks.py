"""How many query cameras the fused backend expands at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from merope.attention.kernels.prepared import PreparedPlan
from merope.attention.kernels.support import bytes_per_camera, multiprocessors
from merope.attention.visible_cameras import Run

QUERY_TILE = 128
"""Queries per block of cuDNN's attention on Hopper: its time steps up with every 132 blocks of so many."""
BACKWARD_BYTES = 2**29
"""Most bytes of a chunk in the backward pass. Its blocks are of keys, and one query camera has enough of them."""


@dataclass(frozen=True)
class Chunk:
    """Some samples with query cameras that see the same keys, or some of these cameras of one sample."""

    samples: slice
    cameras: range
    keys: tuple[slice, ...]  # that are expanded for the cameras
    parts: tuple[Run, ...]  # of one group's queries, which see different ones of these keys; none: they see all

    def of(self, x: Tensor) -> Tensor:  # [B, groups, …] -> [pairs, …]
        """What belongs to the chunk's pairs of a sample and a camera; a view where they are neighbours."""
        return x[self.samples, self.cameras.start : self.cameras.stop].flatten(0, 1)

    def put(self, x: Tensor, pairs: Tensor) -> None:
        """The reverse of `of`."""
        x[self.samples, self.cameras.start : self.cameras.stop] = pairs.unflatten(0, (-1, len(self.cameras)))


def camera_chunks(k: Tensor, maps: PreparedPlan, memory_budget: int, backward: bool) -> Iterator[Chunk]:
    """Chunks of (sample, camera) pairs whose expanded keys and values (and their gradients) fit the budget."""
    in_parts = maps.groups == 1 and bool(maps.runs)
    # In parts there are several calls for every chunk: the fewer chunks, the better.
    budget = min(memory_budget, BACKWARD_BYTES) if backward and not in_parts else memory_budget
    if in_parts or not maps.runs:
        every = (slice(0, k.shape[2]),)
        yield from _chunks_of(k, maps, budget, backward, range(maps.groups), every, maps.runs)
        return
    for run in maps.runs:
        cameras = range(run.cameras.start, run.cameras.stop)
        if cameras:
            yield from _chunks_of(k, maps, budget, backward, cameras, run.keys, ())


def _chunks_of(
    k: Tensor,
    maps: PreparedPlan,
    budget: int,
    backward: bool,
    cameras: range,
    keys: tuple[slice, ...],
    parts: tuple[Run, ...],
) -> Iterator[Chunk]:
    """Chunks of some cameras that have the same keys expanded."""
    batch, heads = k.shape[:2]
    seen = k[:, :, : sum(each.stop - each.start for each in keys)]
    in_place = maps.groups == 1 and maps.plain_values
    most = max(1, budget // bytes_per_camera(seen, maps.width, backward, parts, in_place))
    tiles, processors = heads * math.ceil(maps.tokens_per_group / QUERY_TILE), multiprocessors(k.device)
    if most >= len(cameras):
        step = chunk_size(batch, most // len(cameras), tiles * len(cameras), processors)
        for start in range(0, batch, step):
            yield Chunk(slice(start, min(start + step, batch)), cameras, keys, parts)
        return
    step = chunk_size(len(cameras), most, tiles, processors)
    for sample in range(batch):
        for start in range(0, len(cameras), step):
            yield Chunk(slice(sample, sample + 1), cameras[start : start + step], keys, parts)


def chunk_size(total: int, most: int, tiles_each: int, processors: int) -> int:
    """Items per chunk, at most `most`, for which all chunks take the fewest waves of tiles; the largest such."""

    def waves(size: int) -> int:
        full, rest = divmod(total, size)
        return full * math.ceil(size * tiles_each / processors) + math.ceil(rest * tiles_each / processors)

    return min(range(1, min(total, most) + 1), key=lambda size: (waves(size), -size))
