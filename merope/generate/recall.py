"""Views from the past of a stream: frames that it made at the same place, long forgotten by its cache.

A stream that remembers keeps the latents and cameras of its blocks, up to a number of frames. Those that look at the
place of the next block are found as retrieved history is (`curation/retrieve.py`: within 10 m and 45°), and this block
sees them once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.adapters.history import HistoryReferences
from merope.adapters.key_cache import KeyCache, all_joined
from merope.curation.retrieve import HISTORY_TIME_TAG, FrameTable, HistoryIndex, Target, spread_frames
from merope.geometry.cameras import Cameras

HERE, BEFORE, NOW = "here", "before", "now"
"""Location and traversals as retrieval calls them."""

REMEMBERED = 600
"""Latent frames that views are recalled from, two and a half minutes at 16 Hz, where nobody says how many."""


@dataclass(frozen=True, eq=False)
class PastBlock:
    """A finished block of latent frames."""

    first: int  # its first latent frame, counted from the start of the stream
    latents: Tensor  # [1, C, n, h, w]
    cameras: Cameras  # [n]


@dataclass(frozen=True, eq=False)
class Views:
    """Frames of the past that look at the place of a block, oldest first."""

    frames: tuple[int, ...]  # latent frames of the stream
    matched: tuple[int, ...]  # frames of the block that they were found for
    latents: Tensor  # [1, C, n, h, w]
    cameras: Cameras  # [n]

    def references(self) -> HistoryReferences:
        """The same as retrieved history."""
        times = [frame + HISTORY_TIME_TAG for frame in self.matched]
        return HistoryReferences(self.latents, self.cameras, times)


def with_block(past: tuple[PastBlock, ...], block: PastBlock, most: int) -> tuple[PastBlock, ...]:
    """What a stream remembers after a block, at most so many latent frames; the oldest go."""
    blocks = (*past, block)
    frames = sum(each.cameras.count for each in blocks)
    while blocks and frames > most:
        frames, blocks = frames - blocks[0].cameras.count, blocks[1:]
    return blocks


def views_of_place(
    past: Sequence[PastBlock],
    cache: KeyCache,
    cameras: Cameras,  # [block], those of the next block
    most: int,
) -> Views | None:
    """The remembered frames nearest to these cameras, at most so many; None where there are none.

    Frames that the cache holds anyway are left out, and so are cameras without a pose.
    """
    forgotten = range(cache.sink, cache.count - (cache.window - cache.block))
    places = [
        (block, place)
        for block in past
        for place, posed in enumerate(_has_pose(block.cameras))
        if posed and block.first + place in forgotten
    ]
    asked = [frame for frame in spread_frames(cameras.count, most) if _has_pose(cameras)[frame]]
    if not places or not asked:
        return None
    poses = torch.stack([block.cameras.world_from_camera[place] for block, place in places]).cpu()
    moments = torch.tensor([float(block.first + place) for block, place in places])
    table = FrameTable(poses, [HERE] * len(poses), [BEFORE] * len(poses), moments)
    target = Target(cameras.world_from_camera.cpu(), HERE, NOW)
    found = HistoryIndex(table).nearest(target, asked)
    chosen = sorted(zip(found.frame.tolist(), found.target.tolist(), strict=True))
    return _views([places[row] for row, _ in chosen], tuple(frame for _, frame in chosen)) if chosen else None


def _views(places: Sequence[tuple[PastBlock, int]], matched: tuple[int, ...]) -> Views:
    cameras = all_joined([block.cameras.at(slice(place, place + 1)) for block, place in places])
    latents = torch.cat([block.latents[:, :, place : place + 1] for block, place in places], dim=2)
    return Views(tuple(block.first + place for block, place in places), matched, latents, cameras)


def _has_pose(cameras: Cameras) -> list[bool]:
    return [True] * cameras.count if cameras.has_pose is None else cameras.has_pose.tolist()
