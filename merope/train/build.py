"""From a config to the stream of its training examples."""

import math
from functools import partial

from merope.datasets.world_data import WorldData
from merope.errors import invalid
from merope.train.clip_streams import clip_stream
from merope.train.config import TrainConfig
from merope.train.model import Model
from merope.train.parallel import Ranks
from merope.train.streams import Ahead, Share, Stream, WorldHistoryStream, WorldStream
from merope.world.clips import WorldClips
from merope.world.kept_renders import KeptRenders


def build_stream(config: TrainConfig, model: Model, ranks: Ranks) -> Stream:
    """The stream of a config, this rank's share of it. Worlds are rendered on the device, all else comes from files."""
    share = Share(ranks.data_rank, ranks.data_ranks, config.run.micro_batch)
    check_shares(config, ranks.data_ranks)
    if isinstance(config.data, WorldData):
        return world_stream(config, config.data, model, share)
    return clip_stream(config, model, share)


def world_stream(config: TrainConfig, data: WorldData, model: Model, share: Share) -> Stream:
    """Rendered worlds; on a GPU some steps ahead."""
    if model.pipeline.vae is not None:
        fix = "give model.architecture, or a folder that such a run has written"
        raise invalid("model.pretrained", 'a pixel-space model with data.kind "world"', config.model.pretrained, fix)
    if config.history is not None and data.keep_renders is not None:
        raise invalid("data.keep_renders", "none with [history]", data.keep_renders, "leave it out")
    model.pipeline.strides.check(data.height, data.width, data.frames)
    text_dim = model.transformer.config["text_dim"]
    kind = WorldStream if config.history is None else partial(WorldHistoryStream, history=config.history)
    kept = None if data.keep_renders is None else KeptRenders(data.keep_renders)
    seed, batch_size = config.run.seed, config.run.batch_size
    clips = world_clips(config)
    stream = kind(clips, seed, batch_size, share, text_dim, model.device, data.noise_draws, kept)
    return Ahead(stream, config.run.steps) if model.device.type == "cuda" else stream


def world_clips(config: TrainConfig) -> WorldClips:
    """What the clips of a config that trains on worlds are like."""
    if not isinstance(config.data, WorldData):
        raise invalid("data.kind", '"world"', repr(config.data.kind), "use a config of configs/world")
    return config.data.clips(config.objective.prefix_frames)


def check_shares(config: TrainConfig, data_ranks: int) -> None:
    """All ranks must do the same number of forward passes, or they wait for each other for ever."""
    unit = data_ranks * config.run.micro_batch
    counts = {"batch_size": config.run.batch_size, "validation_clips": config.run.validation_clips}
    for name, count in counts.items():
        if count % unit:
            expected = f"a multiple of {data_ranks} data ranks × micro_batch {config.run.micro_batch}"
            fix = f"use {-(-count // unit) * unit}"
            if not any(n % data_ranks for n in counts.values()):
                micro_batch = math.gcd(config.run.micro_batch, *(n // data_ranks for n in counts.values()))
                fix = f"use run.micro_batch={micro_batch}, which leaves the run what it is"
            raise invalid(f"run.{name}", expected, count, fix)
