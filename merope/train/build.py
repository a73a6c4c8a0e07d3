"""From a config to the stream of its training examples."""

import math
from functools import partial

from merope.errors import invalid
from merope.train.clip_streams import clip_stream
from merope.train.config import TrainConfig, WorldData
from merope.train.history_streams import WorldHistoryStream, history_clip_stream
from merope.train.model import Model
from merope.train.parallel import Ranks
from merope.train.streams import Ahead, Share, Stream, WorldStream
from merope.world.clips import WorldClips
from merope.world.kept_renders import KeptRenders


def build_stream(config: TrainConfig, model: Model, ranks: Ranks) -> Stream:
    """The stream of a config, this rank's share of it."""
    share = Share(ranks.data_rank, ranks.data_ranks, config.run.micro_batch)
    check_shares(config, ranks.data_ranks)
    if not isinstance(config.data, WorldData):
        return (clip_stream if config.history is None else history_clip_stream)(config, model, share)
    data, clips = config.data, world_clips(config)
    if model.pipeline.vae is not None:
        fix = "give model.architecture, or a folder that such a run has written"
        raise invalid("model.pretrained", 'a pixel-space model with data.kind "world"', config.model.pretrained, fix)
    model.pipeline.strides.check(data.height, data.width, data.frames)
    text_dim = model.transformer.config["text_dim"]
    seed, batch_size = config.run.seed, config.run.batch_size
    kind = WorldStream if config.history is None else partial(WorldHistoryStream, history=config.history)
    if config.history is not None and data.keep_renders is not None:
        raise invalid("data.keep_renders", "none with [history]", data.keep_renders, "leave it out")
    kept = None if data.keep_renders is None else KeptRenders(data.keep_renders)
    stream = kind(clips, seed, batch_size, share, text_dim, model.device, data.noise_draws, kept)
    return Ahead(stream, config.run.steps) if model.device.type == "cuda" else stream


def world_clips(config: TrainConfig) -> WorldClips:
    """What the clips of a config that trains on worlds are like."""
    data = config.data
    if not isinstance(data, WorldData):
        raise invalid("data.kind", '"world"', repr(data.kind), "use a config of configs/world")
    return WorldClips(
        frames=data.frames,
        height=data.height,
        width=data.width,
        frame_rate_hz=data.frame_rate_hz,
        prefix_frames=max(config.objective.prefix_frames, 1),
        fov_deg=data.fov_deg,
        xi=data.xi,
    )


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
