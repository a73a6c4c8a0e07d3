"""From a config to the stream of its training examples."""

import math
from functools import partial

from merope.datasets.kinds import MixtureData
from merope.datasets.world_data import WorldData
from merope.errors import invalid
from merope.train.clip_pool import Growth
from merope.train.clip_streams import clip_stream
from merope.train.config import TrainConfig
from merope.train.latent_pool import LatentPool, PooledHistoryStream, PooledStream, encoder_digest
from merope.train.mixed_streams import mixed_stream
from merope.train.model import Model
from merope.train.parallel import Ranks
from merope.train.streams import Ahead, Share, Stream, WorldHistoryStream, WorldStream
from merope.world.clips import WorldClips, as_video
from merope.world.kept_renders import KeptRenders
from merope.world.revisits import EarlierDrives


def build_stream(config: TrainConfig, model: Model, ranks: Ranks) -> Stream:
    """The stream of a config, this rank's share of it. Worlds are rendered on the device, all else comes from files."""
    share = Share(ranks.data_rank, ranks.data_ranks, config.run.micro_batch)
    check_shares(config, ranks.data_ranks)
    if isinstance(config.data, WorldData):
        return world_stream(config, config.data, model, share)
    if isinstance(config.data, MixtureData):
        return mixed_stream(config, config.data, model, share)
    return clip_stream(config, model, share)


def world_stream(config: TrainConfig, data: WorldData, model: Model, share: Share) -> Stream:
    """Rendered worlds, encoded as the model learns them; without a pool, on a GPU, some steps ahead."""
    _check_history(config, data, model)
    model.pipeline.strides.check(data.height, data.width, data.frames)
    model.check_blocks(data.frames)
    no_text, clips, vae = model.no_text().to(model.device), world_clips(config), model.pipeline.vae
    common = (clips, config.run.seed, config.run.batch_size, share, no_text, model.device, data.noise_draws)
    encode = as_video if vae is None else model.pipeline.encode_frames
    if data.worlds is not None:
        encoder = "pixels" if vae is None else encoder_digest(vae)
        kept = None if data.keep_renders is None else KeptRenders(data.keep_renders, encoder)
        pool = LatentPool(clips, data.worlds, encode, model.device, kept)
        growth = Growth(data.first_worlds, data.worlds_per_step, data.worlds)
        if config.history is None:
            return PooledStream(*common, encode=encode, pool=pool, growth=growth)
        earlier = EarlierDrives(clips, config.history.frames, model.pipeline.strides.frames)
        references = LatentPool(earlier, data.worlds, encode, model.device, kept)
        return PooledHistoryStream(
            *common, encode=encode, pool=pool, growth=growth, earlier=earlier, references=references
        )
    kept = None if data.keep_renders is None else KeptRenders(data.keep_renders)
    kind = WorldStream if config.history is None else partial(WorldHistoryStream, history=config.history)
    stream = kind(*common, kept, encode)
    return Ahead(stream, config.run.steps) if model.device.type == "cuda" else stream


def _check_history(config: TrainConfig, data: WorldData, model: Model) -> None:
    """Without a pool, frames of other drives are rendered for every clip anew, as pixels."""
    if config.history is None or data.worlds is not None:
        return
    if data.keep_renders is not None:
        fix = "leave it out, or set data.worlds"
        raise invalid("data.keep_renders", "none with [history] and fresh worlds", data.keep_renders, fix)
    if model.pipeline.vae is not None:
        fix = "set data.worlds, which keeps references as latents"
        raise invalid('[history] with data.kind "world"', "a pixel-space model", "a model with a VAE", fix)


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
