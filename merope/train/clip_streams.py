"""Streams of clips from files: encoded as they come, or read from a cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.data.cache import CachedBatch, CachedSource, collate_cached
from merope.data.clip import Clip
from merope.data.curate import Curation, read_manifest
from merope.data.loader import Batch, ClipLoader, ClipSource, collate, curation_of
from merope.data.nuscenes import NuScenes, read_split
from merope.data.sampler import ClusterSampler
from merope.data.sources import NuScenesSource, PanShotSource, VideoSource, read_video_rows
from merope.errors import invalid
from merope.train.config import CachedData, FileData, NuScenesData, PanShotData, TrainConfig
from merope.train.model import Model
from merope.train.streams import Examples, Share


class ClipStream:
    """Clips of a sampler's endless sequence; the loader keeps the place."""

    def __init__(
        self,
        loader: "ClipLoader[Any, Any]",
        held_out: ClipSource[Any] | None,
        encoder: "FrameEncoder | CacheEncoder",
        batch_size: int,
        share: Share,
    ) -> None:
        self.loader, self._held_out, self.encoder = loader, held_out, encoder
        self.batch_size, self.share = batch_size, share
        self._batches: Iterator[Any] | None = None

    def step(self, step: int) -> Iterator[Examples]:
        self._batches = iter(self.loader) if self._batches is None else self._batches
        for places in self.share.places(self.batch_size):
            yield self.encoder.examples(next(self._batches), places)

    def held_out(self, count: int) -> Iterator[Examples]:
        source = self._source(count)
        for places in self.share.places(count):
            clips = [source.clip(place) for place in places]
            yield self.encoder.examples(self.loader.collate(clips, [0] * len(clips)), places)

    def example(self) -> Examples:
        return self.encoder.examples(self.loader.collate([self._source(1).clip(0)], [0]), (0,))

    def _source(self, count: int) -> ClipSource[Any]:
        if self._held_out is None or len(self._held_out) < count:
            got = "none" if self._held_out is None else len(self._held_out)
            fix = "name validation data in [data], or set run.validation_clips = 0 and run.sample_every = 0"
            raise invalid("validation clips", f"at least {count}", got, fix)
        return self._held_out

    def state_dict(self) -> dict[str, Any]:
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)  # type: ignore[arg-type]
        self._batches = None


class FrameEncoder:
    """Frames and captions through the model's VAE and text encoder; captions once each."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._text: dict[str, Tensor] = {}

    @torch.no_grad()
    def examples(self, batch: Batch, places: tuple[int, ...]) -> Examples:
        return Examples(
            names=batch.names,
            places=places,
            clean=self.model.pipeline.encode_frames(batch.frames).to(self.model.device),
            text=torch.stack([self.text(caption) for caption in batch.captions]),
            no_text=self.text(""),
            cameras=batch.cameras.to(self.model.device),
        )

    @torch.no_grad()
    def text(self, caption: str) -> Tensor:  # [L, D]
        if caption not in self._text:
            embedding, _ = self.model.pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
            self._text[caption] = embedding[0].to(self.model.device)
        return self._text[caption]


class CacheEncoder:
    """Latents and text that were encoded before."""

    def __init__(self, source: CachedSource, device: torch.device) -> None:
        self.device = device
        self.no_text = source.text("").to(device, torch.float32)

    def examples(self, batch: CachedBatch, places: tuple[int, ...]) -> Examples:
        length = max(batch.text.shape[1], len(self.no_text))
        return Examples(
            names=batch.names,
            places=places,
            clean=batch.latents.to(self.device),
            text=torch.nn.functional.pad(batch.text, (0, 0, 0, length - batch.text.shape[1])).to(self.device),
            no_text=torch.nn.functional.pad(self.no_text, (0, 0, 0, length - len(self.no_text))),
            cameras=batch.cameras.to(self.device),
        )


def clip_stream(config: TrainConfig, model: Model, share: Share) -> ClipStream:
    """The stream of a config whose data come from files."""
    data = config.data
    if isinstance(data, CachedData):
        cached = CachedSource.open(data.root)
        held_out = None if data.validation_root is None else CachedSource.open(data.validation_root)
        loader = _loader(config, cached, share, collate_cached)
        return ClipStream(loader, held_out, CacheEncoder(cached, model.device), config.run.batch_size, share)
    assert isinstance(data, FileData)
    loader = _loader(config, training_source(data), share, collate)
    return ClipStream(loader, validation_source(data), FrameEncoder(model), config.run.batch_size, share)


def training_source(data: FileData) -> ClipSource[Clip]:
    """The clips to train on."""
    if isinstance(data, NuScenesData):
        return _nuscenes(data, data.split)
    if isinstance(data, PanShotData):
        return _panshot(data, data.samples)
    return VideoSource(read_video_rows(data.manifest), data.root, data.frames, data.height, data.width)


def validation_source(data: FileData) -> ClipSource[Clip] | None:
    """Clips to validate on, if the config names any."""
    if isinstance(data, NuScenesData):
        return None if data.split_file is None else _nuscenes(data, data.validation_split)
    if isinstance(data, PanShotData):
        return None if data.validation_samples is None else _panshot(data, data.validation_samples)
    if data.validation_manifest is None:
        return None
    return VideoSource(read_video_rows(data.validation_manifest), data.root, data.frames, data.height, data.width)


def _panshot(data: PanShotData, samples: Path) -> PanShotSource:
    return PanShotSource.open(samples, data.root, data.frames, data.height, data.width, data.near_depths)


def _nuscenes(data: NuScenesData, split: str) -> NuScenesSource:
    tables = NuScenes(data.root, data.version)
    scenes = None if data.split_file is None else read_split(data.split_file, split)
    windows = tables.windows(data.frames, step=data.window_step, scenes=scenes)
    return NuScenesSource(tables, windows, data.height, data.width)


def _loader(config: TrainConfig, source: ClipSource[Any], share: Share, collate: Any) -> "ClipLoader[Any, Any]":
    """Class-balanced where a manifest has clusters, uniform over clips where there is none."""
    data = config.data
    assert isinstance(data, FileData | CachedData)
    curation = Curation(torch.zeros(len(source), dtype=torch.long), torch.arange(len(source)))
    if data.clusters is not None:
        curation = curation_of(source, read_manifest(data.clusters))
    sampler = ClusterSampler(
        curation,
        prototypes_only=data.prototypes_only,
        epoch_length=max(len(source), config.run.batch_size) // config.run.batch_size * config.run.batch_size,
        seed=config.run.seed,
        rank=share.rank,
        world_size=share.ranks,
    )
    return ClipLoader(source, sampler, share.micro_batch, data.workers, collate)
