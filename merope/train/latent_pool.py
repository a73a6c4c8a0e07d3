"""Clips of the procedural world as the model learns them, made once and kept in memory for as many passes as wanted.

A clip of the miniature is 18 MB of floating-point frames and 0.4 MB of latents, so 20,000 of them fit into a GPU.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from merope.adapters.history import HistoryReferences
from merope.curation.retrieve import HISTORY_TIME_TAG
from merope.draw.progress import ProgressLine
from merope.geometry.cameras import Cameras
from merope.train.clip_pool import RENDERED_AT_ONCE, Growth
from merope.train.streams import Examples, Wanted, WorldStream
from merope.world.clips import HELD_OUT_SEEDS, WorldClips, by_view
from merope.world.kept_renders import KeptRenders
from merope.world.revisits import EarlierDrives

KEPT_AS = torch.float16
"""Latents are of the order of 1: three digits are more than a VAE's own error."""

POSES = "poses"
"""In the place of an encoder, where the drives of clips are kept beside their latents."""


class LatentPool:
    """Encoded clips, one world each, in the order of their seeds. They are the same in every run.

    Or the references of such clips, each encoded by itself.
    """

    def __init__(
        self,
        clips: WorldClips | EarlierDrives,
        size: int,
        encode: Callable[[Tensor], Tensor],  # uint8 [B, T, H, W, 3] -> [B, C, T', H', W']
        device: torch.device,
        kept: KeptRenders | None = None,
    ) -> None:
        self.clips, self.size, self.encode, self.device, self.kept = clips, size, encode, device, kept
        self.poses = torch.empty(size, clips.views * clips.frames, 4, 4, dtype=torch.float64, device=device)
        self.latents = torch.empty(0)
        self.made = 0

    @staticmethod
    def seed(number: int) -> int:
        """Of the world of a clip."""
        return HELD_OUT_SEEDS + number

    def fill(self, count: int) -> None:
        """Make clips until there are `count`."""
        if self.made >= min(count, self.size):
            return
        line = ProgressLine("rendering and encoding", count, before=self.made)
        # Groups always begin at the same places: other runs find them in the folder.
        firsts = range(self.made, min(count, self.size), RENDERED_AT_ONCE)
        groups = [range(first, min(first + RENDERED_AT_ONCE, self.size)) for first in firsts]
        done = self.made
        for is_patient in (False, True):  # what another run is making comes last: until then there is enough to do
            busy = []
            for numbers in groups:
                if not self._put(numbers, is_patient):
                    busy.append(numbers)
                    continue
                done += len(numbers)
                line.show(min(done, count))
            groups = busy
        self.made = done

    def _put(self, numbers: range, is_patient: bool) -> bool:
        """Put clips into their places; False where another run makes them and is not waited for."""
        made = self._make(numbers, is_patient)
        if made is None:
            return False
        latents, poses = made
        if not self.latents.numel():
            self.latents = self._memory(latents.shape[1:])
        self.latents[numbers.start : numbers.stop], self.poses[numbers.start : numbers.stop] = latents, poses
        return True

    def _make(
        self, numbers: range, is_patient: bool
    ) -> tuple[Tensor, Tensor] | None:  # [B, views, C, T', H', W'], [B, views · T, 4, 4]
        seeds = [self.seed(number) for number in numbers]

        @cache
        def cameras() -> Cameras:
            return self.clips.cameras(seeds, self.device)

        def latents() -> Tensor:
            return self._encoded(seeds, cameras()).to(KEPT_AS)

        def poses() -> Tensor:
            return cameras().world_from_camera

        if self.kept is None:
            return latents(), poses()
        # Poses are kept, too: the drives of 8,192 worlds take a core 16 s, in which a GPU has nothing to do.
        find, drives = self.kept.clips if is_patient else self.kept.clips_unless_busy, replace(self.kept, encoder=POSES)
        found = find(self.clips, seeds, latents)
        return None if found is None else (found, drives.clips(self.clips, seeds, poses))

    def _encoded(self, seeds: Sequence[int], cameras: Cameras) -> Tensor:  # [B, views, C, T', H', W']
        frames = by_view(self.clips.pictures(seeds, cameras), self.clips.views)
        return self.encode(frames).unflatten(0, (-1, self.clips.views))

    def made_for(
        self, seeds: Sequence[int]
    ) -> tuple[Tensor, Tensor]:  # [B, views, C, T', H', W'], [B, views · T, 4, 4]
        """Clips of any other worlds and their poses, made now and not kept."""
        cameras = self.clips.cameras(seeds, self.device)
        return self._encoded(seeds, cameras), cameras.world_from_camera

    def _memory(self, shape: torch.Size) -> Tensor:  # [size, views, C, T', H', W']
        """On the GPU if that leaves half of what is free, else in pinned memory of the CPU."""
        is_gpu, wanted = self.device.type == "cuda", self.size * shape.numel() * KEPT_AS.itemsize
        if is_gpu and wanted > torch.cuda.mem_get_info(self.device)[0] // 2:
            return torch.empty(self.size, *shape, dtype=KEPT_AS, pin_memory=True)
        return torch.empty(self.size, *shape, dtype=KEPT_AS, device=self.device)

    def drawn(
        self, numbers: list[int]
    ) -> tuple[Tensor, Tensor]:  # float32 [B, views, C, T', H', W'], [B, views · T, 4, 4]
        """Some clips and their poses."""
        latents = self.latents[torch.tensor(numbers, device=self.latents.device)]
        poses = self.poses[torch.tensor(numbers, device=self.device)]
        return latents.to(self.device, non_blocking=True).float(), poses


@dataclass(frozen=True)
class PooledStream(WorldStream):
    """Clips drawn from a pool that grows. What a place gets follows from seed and step alone."""

    pool: LatentPool = field(kw_only=True)
    growth: Growth = field(kw_only=True)
    _held_out: dict[int, list[Examples]] = field(default_factory=dict, init=False, repr=False)

    def fill(self, step: int) -> int:
        """Make the clips that a step draws from; how many there are."""
        count = self.growth.at(step)
        self.pool.fill(count)
        return count

    def step(self, step: int) -> Iterator[Examples]:
        count = self.fill(step)
        for places in self.share.places(self.batch_size):
            yield self._drawn([self._number(step, place // self.noise_draws, count) for place in places], places)

    def held_out(self, count: int) -> Iterator[Examples]:
        """The same clips every time: they are rendered and encoded once."""
        if count not in self._held_out:
            self._held_out[count] = list(super().held_out(count))
        return iter(self._held_out[count])

    def _drawn(self, numbers: list[int], places: tuple[int, ...]) -> Examples:
        return self._labelled([self.pool.seed(number) for number in numbers], places, *self.pool.drawn(numbers))

    def _number(self, step: int, draw: int, count: int) -> int:
        state = np.random.SeedSequence((self.seed, step, draw, 2)).generate_state(1, np.uint64)[0]
        return int(state) % count


@dataclass(frozen=True)
class PooledHistoryStream(PooledStream):
    """Clips drawn from a pool, with references from a pool of their own: as many for every clip."""

    earlier: EarlierDrives = field(kw_only=True)
    references: LatentPool = field(kw_only=True)  # of the same clips

    def fill(self, step: int) -> int:
        count = super().fill(step)
        self.references.fill(count)
        return count

    def _drawn(self, numbers: list[int], places: tuple[int, ...]) -> Examples:
        seeds = [self.pool.seed(number) for number in numbers]
        return self._with_history(super()._drawn(numbers, places), seeds, *self.references.drawn(numbers))

    def _examples(self, wanted: Sequence[Wanted]) -> list[Examples]:
        """Of worlds that are held out, which are in no pool."""
        return [
            self._with_history(examples, seeds, *self.references.made_for(seeds))
            for examples, (_, seeds, _) in zip(super()._examples(wanted), wanted, strict=True)
        ]

    def _with_history(
        self,
        examples: Examples,
        seeds: Sequence[int],
        latents: Tensor,  # [B, R, C, 1, H', W']
        poses: Tensor,  # [B, R, 4, 4]
    ) -> Examples:
        cameras = Cameras(poses, self.clips.lenses(seeds).to(self.device), plan_dtype=torch.float32)
        times = torch.tensor(self.earlier.matched, dtype=torch.float64, device=self.device) + HISTORY_TIME_TAG
        return replace(examples, history=HistoryReferences(latents.squeeze(3).transpose(1, 2), cameras, times))


def encoder_digest(vae: Any) -> str:  # AutoencoderKLWan
    """Tells the latents of one VAE from those of another."""
    sizes = {key: value for key, value in vae.config.items() if not key.startswith("_")}  # not where it was read from
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True, default=str).encode())
    for name, weight in sorted(vae.state_dict().items()):
        digest.update(name.encode() + weight.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
