"""The folder of a pretrained model of any family, checked against the recipe before weights are read."""

import json
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import FrozenDict

from merope.adapters.families import family_named
from merope.adapters.families.facts import Family
from merope.errors import invalid
from merope.generate.base_video import BaseVideo, has_own_pipeline
from merope.generate.camera_video import CameraVideoPipeline
from merope.train.config import TrainConfig

TEXT_PARTS = ("text_encoder", "tokenizer")
"""How the names of components begin that a cache of latents and text stands for."""


def read_pretrained(config: TrainConfig, sharded: bool) -> CameraVideoPipeline | BaseVideo:
    """The pipeline. Frozen weights are kept in the precision of the arithmetic, trained and sharded ones in fp32."""
    keep_fp32 = sharded or config.model.trainable == "all" or config.model.precision == "fp32"
    of_text = torch.bfloat16 if config.model.precision == "bf16" else torch.float32
    index = _index(config)
    own = has_own_pipeline(index)
    dtypes = {
        **dict.fromkeys(_named(index, "transformer"), torch.float32 if keep_fp32 else torch.bfloat16),
        **dict.fromkeys(_named(index, "text_encoder"), of_text),
    }
    left_out: dict[str, Any] = dict.fromkeys(_named(index, *TEXT_PARTS)) if config.data.is_encoded else {}
    if own:
        _check_recipe(config, index, sharded)
    try:
        kind = DiffusionPipeline if own else CameraVideoPipeline
        pipeline = kind.from_pretrained(str(config.model.pretrained), dtype=dtypes, **left_out)
    except (OSError, ValueError) as error:
        raise _no_model(config, error) from None
    for key, size in (config.model.architecture or {}).items():
        found = pipeline.transformer.config.get(key)
        if as_json(found) != as_json(size):
            fix = "leave model.architecture out, or name a model of these sizes"
            raise invalid("model.pretrained", f"a transformer with {key} = {size}", found, fix)
    return BaseVideo(pipeline) if own else pipeline


def _index(config: TrainConfig) -> Mapping[str, Any]:
    """The model_index.json."""
    try:
        index: Mapping[str, Any] = DiffusionPipeline.load_config(config.model.pretrained)
    except (OSError, ValueError) as error:  # the second where a folder is missing: its path is no hub's name
        raise _no_model(config, error) from None
    return index


def _no_model(config: TrainConfig, error: Exception) -> ValueError:
    fix = "give the folder of a diffusers model, or its hub id where the hub can be reached"
    got = f"{config.model.pretrained} ({str(error).splitlines()[0]})"
    return invalid("model.pretrained", "a video model, such as Wan", got, fix)


def _named(index: Mapping[str, Any], *beginnings: str) -> list[str]:
    return [name for name in index if name.startswith(beginnings)]


def _check_recipe(config: TrainConfig, index: Mapping[str, Any], sharded: bool) -> None:
    """Refuse what a family does not take, or a model of two experts."""
    family = family_named(str(index["transformer"][1]))
    name, prefix = f"for {family.models}", config.objective.prefix_frames
    if family.not_trained:
        raise invalid("model.pretrained", "a family that can be trained", family.models, family.not_trained)
    if _takes_image(config, index, family):
        fix = "use the text-to-video model of the family: clips have no image to give"
        raise invalid("model.pretrained", "a model of text alone", "one that is given an image", fix)
    if prefix and family.timesteps == "clip":
        fix = "set objective.prefix_frames = 0: it has one timestep for all frames of a clip"
        raise invalid(f"objective.prefix_frames {name}", "0", prefix, fix)
    if config.objective.causal_block_frames is not None:
        got = config.objective.causal_block_frames
        fix = "causal models are made of Wan with one transformer"
        raise invalid(f"objective.causal_block_frames {name}", "left out", got, fix)
    if config.parallel.context > 1 and not family.shares_clips:
        fix = "share clips with parallel.shard: its blocks are given text and times that cannot be split by frames"
        raise invalid(f"parallel.context {name}", "1", config.parallel.context, fix)
    if config.model.compile and not family.compiles_blocks:
        fix = "diffusers cannot compile its blocks one by one; leave it out"
        raise invalid(f"model.compile {name}", "false", "true", fix)
    if index.get("transformer_2"):
        _check_experts(config, sharded)


def _check_experts(config: TrainConfig, sharded: bool) -> None:
    """A clip goes to the expert of its noise level."""
    if config.run.micro_batch != 1:
        fix = "the clips of a forward pass may belong to different experts"
        raise invalid("run.micro_batch for a model of two transformers", "1", config.run.micro_batch, fix)
    if sharded:
        fix = "ranks whose clips belong to different experts would wait for each other"
        raise invalid("ranks for a model of two transformers", "one", "several", fix)


def _takes_image(config: TrainConfig, index: Mapping[str, Any], family: Family) -> bool:
    """Whether a model is given an image beside the text."""
    kind = getattr(diffusers, family.transformer)
    sizes = kind.load_config(config.model.pretrained, subfolder="transformer")
    return bool(family.image_channels(sizes)) or bool((index.get("image_encoder") or (None,))[0])


def as_json(value: object) -> str:
    """For comparing tuples with what JSON made of them."""
    return json.dumps(value, sort_keys=True)


def forget_origin(model: Any) -> Any:  # a ModelMixin of diffusers
    """Take the folder that a model was read from out of its config, which is written with it."""
    model._internal_dict = FrozenDict({key: value for key, value in model.config.items() if key != "_name_or_path"})
    return model
