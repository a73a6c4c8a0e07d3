"""From a config to the stream of its training examples."""

from merope.data.world_clips import WorldClips
from merope.errors import invalid
from merope.train.clip_streams import clip_stream
from merope.train.config import TrainConfig, WorldData
from merope.train.model import Model
from merope.train.parallel import Ranks
from merope.train.streams import Share, Stream, WorldStream


def build_stream(config: TrainConfig, model: Model, ranks: Ranks) -> Stream:
    """The stream of a config, this rank's share of it."""
    share = Share(ranks.data_rank, ranks.data_ranks, config.run.micro_batch)
    check_shares(config, ranks.data_ranks)
    if not isinstance(config.data, WorldData):
        return clip_stream(config, model, share)
    data = config.data
    clips = WorldClips(
        frames=data.frames,
        height=data.height,
        width=data.width,
        frame_rate_hz=data.frame_rate_hz,
        prefix_frames=max(config.objective.prefix_frames, 1),
        fov_deg=data.fov_deg,
        xi=data.xi,
    )
    model.pipeline.strides.check(data.height, data.width, data.frames)
    text_dim = model.transformer.config["text_dim"]
    return WorldStream(clips, config.run.seed, config.run.batch_size, share, text_dim, model.device)


def check_shares(config: TrainConfig, data_ranks: int) -> None:
    """All ranks must do the same number of forward passes, or they wait for each other for ever."""
    unit = data_ranks * config.run.micro_batch
    for name, count in (("batch_size", config.run.batch_size), ("validation_clips", config.run.validation_clips)):
        if count % unit:
            expected = f"a multiple of {data_ranks} data ranks × micro_batch {config.run.micro_batch}"
            raise invalid(f"run.{name}", expected, count, f"use {-(-count // unit) * unit}")
