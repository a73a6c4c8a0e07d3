"""What a run trained, written as ordinary folders: a branch, a transformer, or a whole pipeline."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from merope.adapters.camera_branch import CameraBranch
from merope.datasets.world_data import WorldData
from merope.formats.writing import make_weights_readable
from merope.generate.base_video import BaseVideo
from merope.generate.camera_video import CameraVideoPipeline
from merope.train.config import TrainConfig
from merope.train.model import Model
from merope.train.objective import denoising_levels
from merope.train.pretrained import forget_origin
from merope.world.clips_file import write_clips

SHARD = "14MB"
"""Of the files of a whole pipeline: many hosts take no large ones."""


def export(model: Model, config: TrainConfig, average: dict[str, Tensor], folder: Path) -> None:
    """Write what was trained as ordinary folders, from any sharding: the branch, and the transformer if it changed.

    A model without a text encoder becomes a whole pipeline folder, as `merope generate --model` wants it. All ranks
    call this, the first one writes. With a moving average, that is what is written. The branch and the pipeline of a
    causal model say of how many latent frames its blocks are, and at which noise levels one of few steps works.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights: dict[str, Any] = dict(get_model_state_dict(model.learner, options=options))
    for name, value in average.items():
        weights[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    dtype = torch.bfloat16 if config.run.export_precision == "bf16" else torch.float32
    for name in model.transformers:
        prefix = ("" if model.judge is None else "denoiser.") + ("" if len(model.transformers) == 1 else f"{name}.")
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        _export_one(model, config, name, own, dtype, folder)
    make_weights_readable(folder)


def _export_one(
    model: Model, config: TrainConfig, name: str, weights: dict[str, Any], dtype: torch.dtype, folder: Path
) -> None:
    """Write what was trained of one transformer."""
    transformer, pipeline = model.transformers[name], model.pipeline
    if config.branch != "none":
        branch = CameraBranch.for_transformer(transformer, config.branch)
        branch.register_to_config(
            causal_block_frames=model.causal_block_frames, denoising_levels=denoising_levels(config)
        )
        if config.model.trainable == "all":  # it is not for the base model that training began with
            branch.register_to_config(base_model=config.branch.base_model)
        _fill(branch, weights)
        _cast(branch, dtype).save_pretrained(model.branch_folder(folder / "branch", name))
    if config.model.trainable != "all":
        return
    base = type(transformer).from_config(transformer.config)
    base.load_state_dict({key: value for key, value in weights.items() if key in base.state_dict()})
    _cast(forget_origin(base), dtype)
    is_own = isinstance(pipeline, BaseVideo)
    if is_own or pipeline.text_encoder is not None or config.data.is_encoded:  # a cache stands for the encoder
        base.save_pretrained(folder / name)
        return
    vae = None if pipeline.vae is None else _cast(forget_origin(deepcopy(pipeline.vae)), dtype)
    whole = CameraVideoPipeline(
        *(None, None, vae, pipeline.scheduler, base),
        expand_timesteps=True,
        causal_block_frames=model.causal_block_frames,
        denoising_levels=denoising_levels(config),
    )
    whole.save_pretrained(folder, max_shard_size=SHARD)
    if isinstance(config.data, WorldData):
        write_clips(folder, config.data.clips(config.objective.prefix_frames), config.sample_steps)


def _cast(model: Any, dtype: torch.dtype) -> Any:  # a ModelMixin of diffusers
    """Change the weights in place, but for the few that diffusers wants in fp32 whatever the model is in."""
    kept = set(model._keep_in_fp32_modules or ())
    for name, weight in model.named_parameters():
        if kept.isdisjoint(name.split(".")):
            weight.data = weight.data.to(dtype)
    return model


def _fill(branch: CameraBranch, weights: dict[str, Tensor]) -> None:
    """Copy a transformer's weights of the branch into one that stands alone."""
    for index, processor in branch.processors().items():
        prefix = f"{branch.family.blocks}.{index}.{branch.family.attention}.processor."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        processor.load_state_dict(own)
