"""Streams of training examples: clean latents, text and cameras, split over ranks so that any split gives one sequence.

Place d of a step's global batch goes to data rank d mod W. A stream hands out micro-batches together with these places,
from which everything random about a clip is drawn (merope.train.objective).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from merope.adapters.history import HistoryReferences
from merope.geometry.cameras import Cameras
from merope.train.config import HistorySection
from merope.train.objective import VALIDATION, history_generator
from merope.world.clips import HELD_OUT_SEEDS, SEEDS, WorldClips, as_video, by_view
from merope.world.kept_renders import KeptRenders
from merope.world.revisits import retrieve_revisits

BYTES_AT_ONCE = 1 << 32
"""Of clips that are rendered together; the loop holds twice as much."""
MOST_STEPS_AT_ONCE = 32


@dataclass(frozen=True, eq=False)
class Examples:
    """B clips, ready for the model."""

    names: tuple[str, ...]
    places: tuple[int, ...]  # in the global batch of the step
    clean: Tensor  # [B · views, C, T, H, W] latents, or pixels in [−1, 1]
    text: Tensor  # [B, L, D]
    no_text: Tensor  # [L, D], the empty prompt
    cameras: Cameras  # [B, RGB frames of all views]
    history: HistoryReferences | None = None  # what was retrieved for them; None where nothing was
    sources: tuple[int, ...] = ()  # of a mixture: the number of each clip's source


class Stream(Protocol):
    """Training clips, step after step, and a fixed set of others for validation."""

    def step(self, step: int) -> Iterator[Examples]:
        """This rank's micro-batches of a step. Steps are asked for in order."""

    def held_out(self, count: int) -> Iterator[Examples]:
        """This rank's share of the first `count` validation clips, always the same."""

    def example(self) -> Examples:
        """The first validation clip alone, on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain numbers, the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Share:
    """Which places of a global batch a rank takes, a few at a time."""

    rank: int
    ranks: int
    micro_batch: int

    def places(self, count: int) -> Iterator[tuple[int, ...]]:
        own = range(self.rank, count, self.ranks)
        for start in range(0, len(own), self.micro_batch):
            yield tuple(own[start : start + self.micro_batch])


Wanted = tuple[int, Sequence[int], tuple[int, ...]]
"""A micro-batch to be rendered: step, seeds of the worlds, places in the global batch."""


@dataclass(frozen=True)
class WorldStream:
    """Fresh worlds, rendered on the device. The stream has no state: a clip follows from seed, step and place."""

    clips: WorldClips
    seed: int
    batch_size: int
    share: Share
    no_text: Tensor  # [L, D]
    device: torch.device
    noise_draws: int = 1  # neighbouring places that share a clip
    kept: KeptRenders | None = None
    encode: Callable[[Tensor], Tensor] = as_video  # uint8 [B, T, H, W, 3] of a view each -> what the model learns

    @property
    def steps_at_once(self) -> int:
        """Steps that `steps` should be asked for together: no more than fit a few GiB."""
        clips, each = self.batch_size // self.share.ranks, self.clips
        step_bytes = clips * each.views * each.frames * each.height * each.width * 3 * torch.float32.itemsize
        return min(max(BYTES_AT_ONCE // step_bytes, 1), MOST_STEPS_AT_ONCE)

    def step(self, step: int) -> Iterator[Examples]:
        yield from self._examples(self._wanted(step))

    def steps(self, numbers: Sequence[int]) -> list[list[Examples]]:
        """The micro-batches of several steps, from one render: few clips take a GPU as long as many."""
        wanted = [self._wanted(number) for number in numbers]
        rendered = iter(self._examples([each for those in wanted for each in those]))
        return [[next(rendered) for _ in those] for those in wanted]

    def held_out(self, count: int) -> Iterator[Examples]:
        for places in self.share.places(count):
            yield from self._examples([(VALIDATION, places, places)])

    def example(self) -> Examples:
        return self._examples([(VALIDATION, (0,), (0,))])[0]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def _training_seed(self, step: int, clip: int) -> int:
        state = np.random.SeedSequence((self.seed, step, clip, 1)).generate_state(1, np.uint64)[0]
        seed = SEEDS + int(state >> 2)
        return seed if seed % SEEDS >= HELD_OUT_SEEDS else seed + HELD_OUT_SEEDS

    def _wanted(self, step: int) -> list[Wanted]:
        """The micro-batches of a step."""
        return [
            (step, [self._training_seed(step, place // self.noise_draws) for place in places], places)
            for places in self.share.places(self.batch_size)
        ]

    def _examples(self, wanted: Sequence[Wanted]) -> list[Examples]:
        return self._render(wanted)

    def _render(
        self,
        wanted: Sequence[Wanted],
        clear_of: Tensor | None = None,  # [worlds, N, 4, 4] poses that must be free, those of the clips by default
    ) -> list[Examples]:
        """Micro-batches whose clips are rendered at once, each world once."""
        number = {seed: n for n, seed in enumerate(dict.fromkeys(seed for _, seeds, _ in wanted for seed in seeds))}
        cameras = self.clips.cameras(list(number), self.device)
        frames = self._draw(list(number), cameras, clear_of).to(self.device)
        clean = self.encode(by_view(frames, cameras.views)).unflatten(0, (-1, cameras.views))
        examples = []
        for _, seeds, places in wanted:
            shown = torch.tensor([number[seed] for seed in seeds], device=self.device)
            examples.append(self._labelled(seeds, places, clean[shown], cameras.world_from_camera[shown]))
        return examples

    def _labelled(
        self,
        seeds: Sequence[int],
        places: tuple[int, ...],
        clean: Tensor,  # [B, views, C, T, H, W]
        poses: Tensor,  # [B, views · RGB frames, 4, 4]
    ) -> Examples:
        """Clips with their names, places and cameras; worlds have no text."""
        return Examples(
            names=tuple(f"world {seed}" for seed in seeds),
            places=places,
            clean=clean.flatten(0, 1),
            text=self.no_text.expand(len(seeds), -1, -1),
            no_text=self.no_text,
            cameras=Cameras(poses, self.clips.lenses(seeds).to(self.device), None, torch.float32, self.clips.views),
        )

    def _draw(self, seeds: list[int], cameras: Cameras, clear_of: Tensor | None) -> Tensor:  # uint8 [B, T, H, W, 3]
        if self.kept is None or clear_of is not None:
            return self.clips.pictures(seeds, cameras, clear_of)
        return self.kept.clips(self.clips, seeds, lambda: self.clips.pictures(seeds, cameras))


@dataclass(frozen=True)
class WorldHistoryStream(WorldStream):
    """Fresh worlds, each with frames of other drives through it. In validation these are the nearest ones."""

    history: HistorySection = field(default_factory=HistorySection)

    @property
    def steps_at_once(self) -> int:
        """One: together they take no less time."""
        return 1

    def _examples(self, wanted: Sequence[Wanted]) -> list[Examples]:
        """One clip at a time: references stand in different places of every world."""
        return [self._with_history(seed, place, step) for step, (seed,), (place,) in wanted]

    def _with_history(self, world: int, place: int, step: int) -> Examples:
        """A clip and its references, both seen in a world without what stands in the way of any drive."""
        conflict_rate = 0.0 if step == VALIDATION else self.history.conflict_rate
        dice = history_generator(self.seed, step, place)
        found = retrieve_revisits(self.clips, world, self.history.frames, conflict_rate, dice, self.device)
        references = HistoryReferences(found.video(self.clips, world), found.cameras, found.history.time)
        (examples,) = self._render([(step, (world,), (place,))], found.all_poses)
        return replace(examples, history=references)


class Ahead:
    """A stream without a state, some steps ahead: while a GPU trains on them, a thread prepares the next ones.

    It prepares none beyond the run's last step, and one group of steps at a time: all that an exit has to wait for.
    """

    def __init__(
        self,
        stream: WorldStream,
        steps: int,  # of the whole run
    ) -> None:
        self.stream = stream
        self.steps = steps
        self._thread = ThreadPoolExecutor(1)
        self._groups: dict[int, Future[list[list[Examples]]]] = {}

    def step(self, step: int) -> Iterator[Examples]:
        group, place = divmod(step, self.stream.steps_at_once)
        self._groups = {group: self._group(group)} | {n: f for n, f in self._groups.items() if n > group}
        examples = self._groups[group].result()[place]
        if (group + 1) * self.stream.steps_at_once < self.steps:
            self._groups[group + 1] = self._group(group + 1)
        yield from examples

    def _group(self, group: int) -> Future[list[list[Examples]]]:
        size = self.stream.steps_at_once
        steps = range(group * size, min((group + 1) * size, self.steps))
        return self._groups.get(group) or self._thread.submit(self.stream.steps, steps)

    def held_out(self, count: int) -> Iterator[Examples]:
        self._end_group()
        return self.stream.held_out(count)

    def example(self) -> Examples:
        self._end_group()
        return self.stream.example()

    def _end_group(self) -> None:
        """A VAE keeps the last chunk of a large clip in itself: of two threads each would go on from the other's."""
        wait(self._groups.values())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
