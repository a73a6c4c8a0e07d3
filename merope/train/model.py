"""The model in training: a pipeline whose transformer carries a camera branch, and which of its weights are trained."""

import json
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from merope.adapters.camera_branch import CameraBranch, check_causal
from merope.adapters.causal_wan import attach_causal, teacher_forcing
from merope.adapters.history import HistoryReferences
from merope.adapters.saving import read_branch
from merope.adapters.wan import attach, attached_branch
from merope.datasets.world_data import WorldData
from merope.encodings import ENCODINGS
from merope.errors import invalid
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.conditions import latent_cameras
from merope.geometry.cameras import Cameras
from merope.train.config import TrainConfig
from merope.train.context import ContextParallel, FrameShards
from merope.train.objective import Noised, denoising_levels, token_timesteps
from merope.world.clips_file import write_clips

SHARD = "14MB"
"""Of the files of a whole pipeline: many hosts take no large ones."""

BRANCH_SEED_OFFSET = 1
"""The branch has dice of its own, so that one seed gives every encoding the same base model."""

KIND_OF_BRANCH = (
    *("base", "encoding", "encoding_options", "integration", "compression", "blocks"),
    *("qk_norm", "carve", "translation_scale", "history"),
)
"""What must agree between a saved branch and the config that goes on from it."""


@dataclass(frozen=True, eq=False)
class Model:
    """What the loop trains. The transformer may be sharded; the pipeline around it encodes and samples."""

    pipeline: CameraVideoPipeline
    precision: str  # "bf16" or "fp32"
    device: torch.device
    prefix_frames: int  # RGB
    causal_block_frames: int | None = None  # latent; None: bidirectional
    context: ContextParallel | None = None  # splits the frames of a clip over ranks
    teacher: WanTransformer3DModel | None = None  # the transformer as it was when the run began, for distillation

    @property
    def transformer(self) -> WanTransformer3DModel:
        return self.pipeline.transformer

    @property
    def has_branch(self) -> bool:
        return attached_branch(self.transformer) is not None

    @property
    def prefix(self) -> int:
        """Clean latent frames."""
        return self.pipeline.strides.latent_frames(self.prefix_frames) if self.prefix_frames else 0

    def own_frames(self, latent_frames: int) -> slice:
        """The latent frames of a clip whose loss this rank computes."""
        return slice(None) if self.context is None else FrameShards(self.context.group, latent_frames).own

    def predicted(
        self,
        noised: Noised,
        text: Tensor,  # [B, L, D]
        cameras: Cameras,  # [B, RGB frames]
        history: HistoryReferences | None = None,
    ) -> Tensor:  # [B, C, T, H, W]
        """The velocity that the transformer predicts.

        A causal one is given a clean copy of the clip, too: noisy blocks see the clean ones before them.
        """
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        latents, timesteps, frames = noised.latents.to(dtype), self._timesteps(noised), noised.latents.shape[2]
        branch = attached_branch(self.transformer)
        posed = None if branch is None else latent_cameras(cameras, self.pipeline.strides.frames)
        with self._autocast():
            conditions: dict[str, Any] | None = None
            if self.causal_block_frames is not None:
                latents = torch.cat((noised.clean.to(dtype), latents), dim=2)
                timesteps = torch.cat((torch.zeros_like(timesteps), timesteps), dim=1)
                conditions = teacher_forcing(posed, frames, self.causal_block_frames)
            elif branch is not None and posed is not None:
                conditions = {"cameras": branch.prepare(posed, latents, history=history)}
            made: Tensor = self.transformer(
                hidden_states=latents,
                timestep=timesteps,
                encoder_hidden_states=text.to(dtype),
                attention_kwargs=conditions,
                return_dict=False,
            )[0]
        return made[:, :, -frames:]

    def _timesteps(self, noised: Noised) -> Tensor:  # [B, tokens], or [B]
        """As the pipeline gives them: per token where some are clean or the base model was trained so."""
        per_token = token_timesteps(noised, self.pipeline.strides.tokens_per_frame(*noised.latents.shape[-2:]))
        has_clean_tokens = self.prefix or self.causal_block_frames is not None
        return per_token if has_clean_tokens or self.pipeline.config["expand_timesteps"] else per_token[:, 0]

    def check_blocks(self, frames: int) -> None:
        """Refuse clips and prefixes of RGB frames that do not fill the blocks of a causal model."""
        if self.causal_block_frames is None:
            return
        for name, count in (("data.frames", frames), ("objective.prefix_frames", self.prefix_frames)):
            if count:
                self.pipeline.strides.check_blocks(name, count, self.causal_block_frames)

    def _autocast(self) -> AbstractContextManager[None]:
        """Weights that are trained stay in fp32; sharded ones are cast by FSDP instead."""
        if self.precision == "fp32" or dist.is_initialized():
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def parameter_counts(self) -> tuple[int, int]:
        """Trained and all parameters of the transformer."""
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in self.transformer.parameters()]
        return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def build_model(config: TrainConfig, device: torch.device, sharded: bool) -> Model:
    """The pipeline of a config, its branch attached and what is not trained frozen."""
    pipeline = _scratch(config) if config.model.pretrained is None else _pretrained(config, sharded)
    transformer = pipeline.transformer
    transformer.requires_grad_(config.model.trainable == "all")
    if config.branch != "none":
        torch.manual_seed(config.run.seed + BRANCH_SEED_OFFSET)
        branch = attach(transformer, config.branch, dtype=torch.float32)  # a base in bf16 would round it
        if config.model.pretrained_branch is not None:
            _load_saved(config.model.pretrained_branch, transformer, branch)
    if config.objective.causal_block_frames is not None:
        _make_causal(transformer)
    teacher = None
    if config.distillation is not None:
        _check_blocks_of_teacher(config, pipeline)
        pipeline.register_to_config(denoising_levels=denoising_levels(config))
        teacher = deepcopy(transformer).requires_grad_(False).eval().to(device)
    if config.model.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    transformer.train()
    pipeline.to(device)
    if config.model.compile:
        # An encoding that reads tokens makes a plan in every block, outside of the graph.
        transformer.compile_repeated_blocks(fullgraph=not _makes_own_plans(config))
    objective = config.objective
    return Model(
        *(pipeline, config.model.precision, device, objective.prefix_frames, objective.causal_block_frames),
        teacher=teacher,
    )


def _check_blocks_of_teacher(config: TrainConfig, pipeline: CameraVideoPipeline) -> None:
    """Refuse a model that was not trained with these blocks. One without a branch may not say it."""
    wanted, found = config.objective.causal_block_frames, pipeline.config.get("causal_block_frames")
    if config.model.pretrained_branch is not None:
        found = found or CameraBranch.load_config(config.model.pretrained_branch).get("causal_block_frames")
    if found != wanted and (found is not None or config.branch != "none"):
        fix = "train it with objective.causal_block_frames first, or give its blocks"
        raise invalid("model.pretrained with [distillation]", f"a causal model with blocks of {wanted}", found, fix)


def _make_causal(transformer: WanTransformer3DModel) -> None:
    """Any Wan, a bidirectional one as well: no weight is added."""
    branch = attached_branch(transformer)
    if branch is not None:
        check_causal(branch)
    attach_causal(transformer)


def _load_saved(folder: Path, transformer: WanTransformer3DModel, branch: CameraBranch) -> None:
    """Fill a branch from a folder, refused if that is incomplete or of another kind than the config describes."""
    if not folder.is_dir():
        raise invalid("model.pretrained_branch", "the folder of a saved branch", folder, "train one, or leave it out")
    saved = read_branch(folder, transformer)
    differing = [name for name in KIND_OF_BRANCH if _as_json(saved.config[name]) != _as_json(branch.config[name])]
    if differing:
        got = ", ".join(f"{name} = {saved.config[name]}" for name in differing)
        raise invalid("model.pretrained_branch", "a branch like that of [branch]", got, "make [branch] the same")
    branch.load_state_dict(saved.state_dict())


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _makes_own_plans(config: TrainConfig) -> bool:
    if config.branch == "none" or config.branch.encoding not in ENCODINGS:
        return False
    return ENCODINGS[config.branch.encoding].content_channels > 0


def _scratch(config: TrainConfig) -> CameraVideoPipeline:
    """A transformer with fresh weights, over the latents of a trained VAE or in pixel space."""
    torch.manual_seed(config.run.seed)
    architecture = dict(config.model.architecture or {})
    if "patch_size" in architecture:
        architecture["patch_size"] = tuple(architecture["patch_size"])
    try:
        transformer = WanTransformer3DModel(**architecture)
    except TypeError as error:
        fix = "use the argument names of diffusers' WanTransformer3DModel"
        raise invalid("model.architecture", "sizes of a WanTransformer3DModel", str(error), fix) from None
    scheduler = FlowMatchEulerDiscreteScheduler(shift=config.objective.shift)
    vae = None if config.model.vae is None else _read_vae(config.model.vae)
    return CameraVideoPipeline(None, None, vae, scheduler, transformer, expand_timesteps=True)


def _read_vae(folder: Path) -> AutoencoderKLWan:
    fix = "name `trained/vae` of a run of merope train with a [vae] table"
    if not (folder / "config.json").is_file():  # diffusers would look for it on the hub
        raise invalid("model.vae", "the folder of an AutoencoderKLWan", folder, fix)
    try:
        return AutoencoderKLWan.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    except (OSError, ValueError) as error:
        raise invalid("model.vae", "a complete AutoencoderKLWan", str(error).splitlines()[0], fix) from None


def _pretrained(config: TrainConfig, sharded: bool) -> CameraVideoPipeline:
    """A Wan folder. Frozen weights are kept in the precision of the arithmetic, trained and sharded ones in fp32."""
    keep_fp32 = sharded or config.model.trainable == "all" or config.model.precision == "fp32"
    parts = {"text_encoder": None, "tokenizer": None} if config.data.is_encoded else {}
    folder = config.model.pretrained or ""
    try:
        pipeline = CameraVideoPipeline.from_pretrained(
            folder,
            dtype={
                "transformer": torch.float32 if keep_fp32 else torch.bfloat16,
                "text_encoder": torch.bfloat16 if config.model.precision == "bf16" else torch.float32,
            },
            **parts,
        )
    except (OSError, ValueError) as error:  # the second where a folder is missing: its path is no hub's name
        fix = "give the folder of a diffusers Wan model, or its hub id where the hub can be reached"
        got = f"{folder} ({str(error).splitlines()[0]})"
        raise invalid("model.pretrained", "a Wan model", got, fix) from None
    for key, size in (config.model.architecture or {}).items():
        found = pipeline.transformer.config.get(key)
        if _as_json(found) != _as_json(size):
            fix = "leave model.architecture out, or name a model of these sizes"
            raise invalid("model.pretrained", f"a transformer with {key} = {size}", found, fix)
    return pipeline


def export(model: Model, config: TrainConfig, average: dict[str, Tensor], folder: Path) -> None:
    """Write what was trained as ordinary folders, from any sharding: the branch, and the transformer if it changed.

    A model without a text encoder becomes a whole pipeline folder, as `merope generate --model` wants it. All ranks
    call this, the first one writes. With a moving average, that is what is written. The branch and the pipeline of a
    causal model say of how many latent frames its blocks are, and at which noise levels one of few steps works.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights: dict[str, Any] = dict(get_model_state_dict(model.transformer, options=options))
    for name, value in average.items():
        weights[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    dtype = torch.bfloat16 if config.run.export_precision == "bf16" else torch.float32
    if config.branch != "none":
        branch = CameraBranch.for_transformer(model.transformer, config.branch)
        branch.register_to_config(
            causal_block_frames=model.causal_block_frames, denoising_levels=denoising_levels(config)
        )
        _fill(branch, weights)
        _cast(branch, dtype).save_pretrained(folder / "branch")
    if config.model.trainable == "all":
        base = WanTransformer3DModel.from_config(model.transformer.config)
        base.load_state_dict({name: value for name, value in weights.items() if name in base.state_dict()})
        _cast(base, dtype)
        pipeline = model.pipeline
        if pipeline.text_encoder is None and not config.data.is_encoded:  # a cache stands for the encoder
            vae = None if pipeline.vae is None else _cast(deepcopy(pipeline.vae), dtype)
            whole = CameraVideoPipeline(
                *(None, None, vae, pipeline.scheduler, base),
                expand_timesteps=True,
                causal_block_frames=model.causal_block_frames,
                denoising_levels=denoising_levels(config),
            )
            whole.save_pretrained(folder, max_shard_size=SHARD)
            if isinstance(config.data, WorldData):
                write_clips(folder, config.data.clips(config.objective.prefix_frames), config.sample_steps)
        else:
            base.save_pretrained(folder / "transformer")


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
        prefix = f"blocks.{index}.attn1.processor."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        processor.load_state_dict(own)
