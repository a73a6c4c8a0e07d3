"""Streams of clips with retrieved history, one clip at a time: clips have different numbers of references."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from merope.adapters.history import HistoryReferences
from merope.datasets.history_source import FrameLibrary, HistoryBatch, HistorySource, collate_history
from merope.datasets.nuscenes import read_split
from merope.generate.history_frames import HistoryFrames
from merope.train.clip_streams import (
    ClipStream,
    FrameEncoder,
    check_sizes,
    held_out_needed,
    loader_of,
    nuscenes_source,
)
from merope.train.config import HistorySection, NuScenesData, TrainConfig
from merope.train.model import Model
from merope.train.objective import VALIDATION, history_generator
from merope.train.streams import Examples, Share, WorldStream
from merope.world.revisits import WorldHistory


@dataclass(frozen=True)
class WorldHistoryStream(WorldStream):
    """Fresh worlds, each with frames of other drives through it. In validation these are the nearest ones."""

    history: HistorySection = field(default_factory=HistorySection)

    def step(self, step: int) -> Iterator[Examples]:
        for (place,) in self.share.places(self.batch_size):
            seed = self._training_seed(step, place // self.noise_draws)
            yield self._with_history(seed, place, step, self.history.conflict_rate)

    @property
    def steps_at_once(self) -> int:
        """One: together they take no less time."""
        return 1

    def steps(self, numbers: Sequence[int]) -> list[list[Examples]]:
        """One clip at a time: references stand in different places of every world."""
        return [list(self.step(number)) for number in numbers]

    def held_out(self, count: int) -> Iterator[Examples]:
        for (place,) in self.share.places(count):
            yield self._with_history(place, place, VALIDATION, conflict_rate=0.0)

    def example(self) -> Examples:
        return self._with_history(0, 0, VALIDATION, conflict_rate=0.0)

    def _with_history(self, world: int, place: int, step: int, conflict_rate: float) -> Examples:
        """A clip and its references, both seen in a world without what stands in the way of any drive."""
        retrieval = WorldHistory(self.history.frames, conflict_rate)
        dice = history_generator(self.seed, step, place)
        found = retrieval.retrieve(self.clips, world, dice, self.device)
        references = HistoryReferences(found.video(self.clips, world), found.cameras, found.history.time)
        (examples,) = self._rendered([((world,), (place,))], found.all_poses)
        return replace(examples, history=references)


class HistoryClipStream(ClipStream):
    """Clips from files; the dice of a clip choose between its nearest frames and those of a neighbouring lane."""

    def __init__(self, *parts: Any, seed: int, conflict_rate: float) -> None:
        super().__init__(*parts)
        self.seed, self.conflict_rate = seed, conflict_rate

    @torch.no_grad()
    def _examples(self, batch: HistoryBatch, places: tuple[int, ...], step: int) -> Examples:
        assert isinstance(self.encoder, FrameEncoder)
        examples, model = self.encoder.examples(batch.clips, places), self.encoder.model
        dice = torch.rand((), dtype=torch.float64, generator=history_generator(self.seed, step, places[0]))
        donor = batch.with_history.chosen(step != VALIDATION and float(dice) < self.conflict_rate)
        if donor is None:
            return examples
        frames = HistoryFrames(donor.frames, donor.cameras, donor.matched)
        return replace(examples, history=frames.encoded(model.pipeline.encode_frames).to(model.device))


def history_clip_stream(config: TrainConfig, model: Model, share: Share) -> HistoryClipStream:
    """The stream of a config with [history] whose data come from files.

    History is looked for among the frames of the training split, also for validation clips: it is what was driven
    before, and training sees no frame of another split.
    """
    data, history = config.data, config.history
    assert isinstance(data, NuScenesData)
    assert history is not None
    check_sizes(config, model, data.height, data.width, data.frames)
    stride = model.pipeline.strides.frames
    source = nuscenes_source(data, data.split)
    scenes = None if data.split_file is None else read_split(data.split_file, data.split)
    library = FrameLibrary.of(source.data, scenes)
    held_out = None
    if data.split_file is not None:
        held_out = HistorySource(nuscenes_source(data, data.validation_split), library, history.frames, stride)
    loader = loader_of(config, HistorySource(source, library, history.frames, stride), share, collate_history)
    parts = (loader, held_out, FrameEncoder(model), config.run.batch_size, share)
    stream = HistoryClipStream(*parts, seed=config.run.seed, conflict_rate=history.conflict_rate)
    stream.check_held_out(held_out_needed(config.run))
    return stream
