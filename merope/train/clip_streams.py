"""Streams of clips from files: encoded as they come, or read from a cache."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from merope.curation.curate import Curation
from merope.datasets.cache import CachedBatch, CachedSource, collate_cached, without_padding
from merope.datasets.data_kind import FileData, FrameData
from merope.datasets.history_source import ClipWithHistory, HistorySource, collate_history
from merope.datasets.kinds import Opened
from merope.datasets.loader import Batch, ClipLoader, ClipSource, collate
from merope.datasets.mixture import source_curation
from merope.datasets.sampler import ClusterSampler
from merope.errors import invalid
from merope.generate.history_frames import HistoryFrames
from merope.train.config import TrainConfig
from merope.train.model import Model
from merope.train.objective import VALIDATION, history_generator
from merope.train.streams import Examples, Share
from merope.world.clips import by_view

LOG = logging.getLogger(__name__)

CAPTIONS_KEPT = 1024
"""Captions whose embeddings stay in memory, about 1 MB each."""


class ClipStream:
    """Clips of a sampler's endless sequence; the loader keeps the place."""

    def __init__(
        self,
        loader: "ClipLoader[Any, Any]",
        held_out: ClipSource[Any] | None,
        encoder: "Encoder",
        batch_size: int,
        share: Share,
    ) -> None:
        self.loader, self._held_out, self.encoder = loader, held_out, encoder
        self.batch_size, self.share = batch_size, share
        self._batches: Iterator[Any] | None = None

    def step(self, step: int) -> Iterator[Examples]:
        self._batches = iter(self.loader) if self._batches is None else self._batches
        for places in self.share.places(self.batch_size):
            yield self.encoder.examples(next(self._batches), places, step)

    def held_out(self, count: int) -> Iterator[Examples]:
        for places in self.share.places(count):
            clips = [self._held_out_clip(place, count) for place in places]
            yield self.encoder.examples(self.loader.collate(clips), places, VALIDATION)

    def example(self) -> Examples:
        return self.encoder.examples(self.loader.collate([self._held_out_clip(0, 1)]), (0,), VALIDATION)

    def _held_out_clip(self, place: int, count: int) -> Any:
        """The validation clip of a place; where it cannot be read the next one, the same every time.

        Places are spread over all clips: windows that begin one frame apart would all be of one scene.
        """
        self.check_held_out(count)
        source = self._held_out
        assert source is not None
        for index in range(place * len(source) // count, (place + 1) * len(source) // count):
            try:
                return source.clip(index)
            except Exception as error:  # whatever a broken file sets off
                reason = f"{source.name(index)}: {error}"
                LOG.warning("skipped validation clip %s", reason)
        raise invalid("validation clips", f"{count} that can be read", reason, "mend it, or validate on fewer")

    def check_held_out(self, count: int) -> None:
        """Refuse to begin what would fail at the first validation."""
        if count and (self._held_out is None or len(self._held_out) < count):
            got = "none" if self._held_out is None else len(self._held_out)
            fix = "name validation data in [data], or set run.validation_clips = 0 and run.sample_every = 0"
            raise invalid("validation clips", f"at least {count}", got, fix)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)  # type: ignore[arg-type]
        self._batches = None


class Encoder(Protocol):
    """Makes training examples of loaded clips."""

    def collate(self, clips: Any, /) -> Any:
        """Clips as the batch that `examples` takes."""

    def examples(self, batch: Any, places: tuple[int, ...], step: int) -> Examples:
        """A batch ready for the model, on its device. What is drawn for a clip follows from its place and step."""


class FrameEncoder:
    """Frames and captions through the model's VAE and text encoder. A model without one reads zeros."""

    collate = staticmethod(collate)

    def __init__(self, model: Model) -> None:
        self.model = model
        self._text = lru_cache(CAPTIONS_KEPT)(self._encode)

    @torch.no_grad()
    def examples(self, batch: Batch, places: tuple[int, ...], step: int) -> Examples:
        return Examples(
            names=batch.names,
            places=places,
            clean=self.model.pipeline.encode_frames(by_view(batch.frames, batch.cameras.views)).to(self.model.device),
            text=torch.stack([self.text(caption) for caption in batch.captions]),
            no_text=self.text(""),
            cameras=batch.cameras.to(self.model.device),
        )

    def text(self, caption: str) -> Tensor:  # [L, D]
        """The embedding of a caption, padded as the model pads."""
        short, length = self._text(caption)
        return torch.nn.functional.pad(short, (0, 0, 0, length - len(short))).to(self.model.device)

    @torch.no_grad()
    def _encode(self, caption: str) -> tuple[Tensor, int]:  # [l, D] on the CPU, L
        rows = self.model.text_rows(caption)
        return without_padding(rows).cpu(), len(rows)


class CacheEncoder:
    """Latents and text that were encoded before."""

    collate = staticmethod(collate_cached)

    def __init__(self, source: CachedSource, device: torch.device) -> None:
        self.device = device
        self.no_text = source.text("").to(device, torch.float32)

    def examples(self, batch: CachedBatch, places: tuple[int, ...], step: int) -> Examples:
        return Examples(
            names=batch.names,
            places=places,
            clean=batch.latents.to(self.device),
            text=batch.text.to(self.device),
            no_text=self.no_text,
            cameras=batch.cameras.to(self.device),
        )


class HistoryEncoder:
    """Frames with references. The dice of a clip choose: its nearest frames, or those of a neighbouring lane."""

    collate = staticmethod(collate_history)

    def __init__(self, model: Model, seed: int, conflict_rate: float) -> None:
        self.frames, self.seed, self.conflict_rate = FrameEncoder(model), seed, conflict_rate

    @torch.no_grad()
    def examples(self, batch: tuple[Batch, ClipWithHistory], places: tuple[int, ...], step: int) -> Examples:
        clips, with_history = batch
        examples, model = self.frames.examples(clips, places, step), self.frames.model
        dice = torch.rand((), dtype=torch.float64, generator=history_generator(self.seed, step, places[0]))
        donor = with_history.chosen(step != VALIDATION and float(dice) < self.conflict_rate)
        if donor is None:
            return examples
        frames = HistoryFrames(donor.frames, donor.cameras, donor.matched)
        return replace(examples, history=frames.encoded(model.pipeline.encode_frames).to(model.device))


def clip_stream(config: TrainConfig, model: Model, share: Share) -> ClipStream:
    """The stream of a config whose data come from files."""
    assert isinstance(config.data, FileData)
    source, held_out = opened_clips(config, model, config.data)
    encoder, curation = encoder_for(config, model, source), source_curation(source, config.data)
    return finished_stream(config, source, held_out, encoder, share, curation, None)


def opened_clips(config: TrainConfig, model: Model, data: FileData) -> Opened:
    """Training and validation clips, with history where it is wanted and the data know places."""
    if isinstance(data, FrameData):
        check_sizes(config, model, data.height, data.width, data.frames)
        if config.history is not None and data.knows_places:
            return data.clips_with_history(config.history.frames, model.pipeline.strides.frames)
    training, held_out = data.training_clips(), data.validation_clips()
    for cached in (training, held_out):
        if isinstance(cached, CachedSource) and isinstance(training, CachedSource) and len(cached):
            check_cache(config, model, cached, like=training)
    return training, held_out


def encoder_for(config: TrainConfig, model: Model, source: ClipSource[Any]) -> Encoder:
    if isinstance(source, CachedSource):
        return CacheEncoder(source, model.device)
    if isinstance(source, HistorySource) and config.history is not None:
        return HistoryEncoder(model, config.run.seed, config.history.conflict_rate)
    return FrameEncoder(model)


def finished_stream(
    config: TrainConfig,
    source: ClipSource[Any],
    held_out: ClipSource[Any] | None,
    encoder: Encoder,
    share: Share,
    curation: Curation,
    chances: Tensor | None,  # [clusters]
) -> ClipStream:
    """The stream of clips and their clusters, class-balanced. What looks wrong with the clips is said once."""
    if share.rank == 0:
        for doubt in source.doubts():
            LOG.warning("%s", doubt)
    batch_size = config.run.batch_size
    assert isinstance(config.data, FileData)
    sampler = ClusterSampler(
        curation,
        prototypes_only=True,
        chances=chances,
        epoch_length=max(len(source), batch_size) // batch_size * batch_size,
        seed=config.run.seed,
        rank=share.rank,
        world_size=share.ranks,
    )
    loader = ClipLoader(source, sampler, share.micro_batch, config.data.workers, encoder.collate)
    stream = ClipStream(loader, held_out, encoder, batch_size, share)
    run = config.run
    stream.check_held_out(max(run.validation_clips if run.validate_every else 0, 1 if run.sample_every else 0))
    return stream


def check_sizes(config: TrainConfig, model: Model, height: int, width: int, frames: int) -> None:
    """Refuse clips that the model cannot take, and a prefix that does not fit them, before any is read."""
    strides, prefix = model.pipeline.strides, config.objective.prefix_frames
    strides.check(height, width, frames)
    if prefix:
        strides.check_frames("objective.prefix_frames", prefix)
    if prefix >= frames:
        raise invalid("objective.prefix_frames", f"less than the {frames} frames of a clip", prefix, "use fewer")
    model.check_blocks(frames)


def check_cache(config: TrainConfig, model: Model, source: CachedSource, like: CachedSource) -> None:
    """Refuse latents and text of another kind of model. Models that share VAE and text encoder share a cache.

    Clips must have the length and size of those of `like`, the training clips.
    """
    clip, sizes = source.first_readable(), model.transformer.config
    path = (clip if source is like else like.first_readable()).trajectory
    lens = path.lens
    assert lens is not None
    check_sizes(config, model, lens.height, lens.width, path.count)
    strides = model.pipeline.strides
    frames = strides.latent_frames(path.count)
    channels, no_text = model.family.latent_channels(sizes), model.family.no_text(sizes)
    latents = (channels, frames, *strides.latent_size(lens.height, lens.width))
    for name, expected, got in (
        ("latents", latents, tuple(clip.latents.shape[-4:])),
        ("text", tuple(no_text.shape[1:]), tuple(clip.text.shape[1:])),
    ):
        if got != expected:
            fix = f"cache all clips with {config.model.pretrained} in one size; these are of {source.about()['model']}"
            raise invalid(f"{name} of {source.folder}", str(expected), got, fix)
