"""Rendered clips in the memory of a device, and random pieces of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.draw.progress import ProgressLine
from merope.world.clips import WorldClips, as_video

RENDERED_AT_ONCE = 16
"""Clips. A GPU renders many together faster, but a training step must not wait long for them."""


@dataclass(frozen=True)
class Growth:
    """How many clips of a pool there are at a step: some before the first, then more, until it is full."""

    first: int
    per_step: float
    most: int

    def at(self, step: int) -> int:
        """They grow by as many as are rendered at once."""
        more = int(step * self.per_step) // RENDERED_AT_ONCE * RENDERED_AT_ONCE
        return min(self.most, self.first + more)


class ClipPool:
    """Clips of the procedural world as bytes, one world each. It does not matter when a clip is rendered."""

    def __init__(self, clips: WorldClips, size: int, first_seed: int, device: torch.device) -> None:
        self.clips, self.first_seed, self.device = clips, first_seed, device
        self.frames = torch.empty(size, clips.frames, clips.height, clips.width, 3, dtype=torch.uint8, device=device)
        self.rendered = 0

    def fill(self, count: int) -> None:
        """Render until there are `count` clips."""
        line = ProgressLine("rendering", count, before=self.rendered)
        while self.rendered < count:
            places = range(self.rendered, min(self.rendered + RENDERED_AT_ONCE, count))
            seeds = [self.first_seed + place for place in places]
            cameras = self.clips.cameras(seeds, self.device)
            self.frames[places.start : places.stop] = self.clips.pictures(seeds, cameras)
            self.rendered = places.stop
            line.show(self.rendered)

    def crops(
        self,
        among: int,  # the first so many clips
        count: int,
        frames: int,  # of each
        dice: torch.Generator,  # on the CPU
    ) -> Tensor:  # [count, 3, frames, H, W] in [−1, 1]
        """Consecutive frames of random clips, half of them mirrored left to right."""
        clip = torch.randint(among, (count, 1), generator=dice)
        first = torch.randint(self.clips.frames - frames + 1, (count, 1), generator=dice)
        mirrored = torch.rand(count, 1, 1, 1, 1, generator=dice) < 0.5
        drawn = (clip, first + torch.arange(frames), mirrored)
        clip, when, mirrored = (each.to(self.device, non_blocking=True) for each in drawn)  # a GPU is not waited for
        video = as_video(self.frames[clip, when])
        return torch.where(mirrored, video.flip(-1), video)

    def videos(self, at_once: int, most: int | None = None) -> Iterator[Tensor]:  # [b, 3, T, H, W] in [−1, 1]
        """All clips that are rendered, or the first `most`, whole."""
        for some in self.frames[: self.rendered][:most].split(at_once):
            yield as_video(some)
