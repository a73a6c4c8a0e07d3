"""The model in training: a pipeline whose transformer carries a camera branch, and which of its weights are trained."""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn.functional import pad

from merope.adapters.attachment import attach, attached_branch
from merope.adapters.branch_config import check_causal
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.causal_wan import attach_causal, teacher_forcing
from merope.adapters.families import family_of
from merope.adapters.families.facts import Family
from merope.adapters.families.noise import Noising
from merope.adapters.history import HistoryReferences
from merope.adapters.saving import read_branch
from merope.attention.visible_cameras import teacher_forced
from merope.encodings import ENCODINGS
from merope.encodings.option_types import has_type, type_name
from merope.errors import invalid
from merope.generate.base_video import BaseVideo
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.conditions import latent_cameras
from merope.geometry.cameras import Cameras
from merope.train.adversary import Judge
from merope.train.config import TrainConfig
from merope.train.context import ContextParallel, FrameShards
from merope.train.objective import Noised, denoising_levels
from merope.train.pretrained import as_json, read_pretrained

BRANCH_SEED_OFFSET = 1
"""The branch has dice of its own, so that one seed gives every encoding the same base model."""

KIND_OF_BRANCH = (
    *("base", "encoding", "encoding_options", "integration", "compression", "blocks"),
    *("qk_norm", "carve", "translation_scale", "latitude_up", "history"),
)
"""What must agree between a saved branch and the config that goes on from it."""


@dataclass(frozen=True, eq=False)
class Model:
    """What the loop trains. Transformers may be sharded; the pipeline around them encodes and samples."""

    pipeline: CameraVideoPipeline | BaseVideo
    precision: str  # "bf16" or "fp32"
    device: torch.device
    prefix_frames: int  # RGB
    causal_block_frames: int | None = None  # latent; None: bidirectional
    context: ContextParallel | None = None  # splits the frames of a clip over ranks
    teacher: WanTransformer3DModel | None = None  # the transformer as it was when the run began, for distillation
    judge: Judge | None = None  # what an adversary learns

    @property
    def transformer(self) -> Any:
        """Of two experts the first."""
        return self.pipeline.transformer

    @property
    def transformers(self) -> dict[str, Any]:
        """By name: one, or two experts for noise levels of their own (Wan2.2 A14B)."""
        return self.pipeline.transformers if isinstance(self.pipeline, BaseVideo) else {"transformer": self.transformer}

    @property
    def denoiser(self) -> nn.Module:
        """The transformer, or both experts."""
        return self.transformer if len(self.transformers) == 1 else nn.ModuleDict(self.transformers)

    @property
    def learner(self) -> nn.Module:
        """All that is trained: the denoiser, and its judge where there is one."""
        return self.denoiser if self.judge is None else nn.ModuleDict({"denoiser": self.denoiser, "judge": self.judge})

    @property
    def family(self) -> Family:
        return family_of(self.transformer)

    @property
    def noising(self) -> Noising:
        return self.family.noising(self.pipeline.scheduler)

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
        by_teacher: bool = False,
    ) -> Tensor:  # [B, C, T, H, W]
        """What the transformer predicts, the velocity in flow matching.

        A causal one is given the past, too, a second copy of the clip: noisy blocks see its blocks before them. Where
        every clip is given its first frames, it makes nothing of them: 0.
        """
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        latents, times, frames = noised.latents.to(dtype), self._times(noised), noised.latents.shape[2]
        transformer: Any = self.teacher if by_teacher else self._expert(noised)
        strides, family = self.pipeline.strides, self.family
        branch = attached_branch(transformer)
        posed = None if branch is None else latent_cameras(cameras, strides.of_cameras)
        with self._autocast():
            conditions: dict[str, Any] | None = None
            if self.causal_block_frames is not None:
                clean, noisy = teacher_forced(frames, self.causal_block_frames, noised.given)
                past_times = self.noising.timesteps(noised.past_sigma)[:, None].to(times.dtype).expand_as(times)
                latents = torch.cat((noised.past[:, :, clean].to(dtype), latents[:, :, noisy]), dim=2)
                times = torch.cat((past_times[:, clean], times[:, noisy]), dim=1)
                conditions = teacher_forcing(posed, frames, self.causal_block_frames, given=noised.given)
            elif branch is not None and posed is not None:
                sees = family.sees(transformer.config, posed.moments)
                conditions = {"cameras": branch.prepare(posed, latents, history=history, sees=sees)}
            inputs = family.video_inputs(transformer.config, latents, times, strides.pixels)
            inputs |= family.text_inputs(transformer.config, text.to(dtype))
            made: Tensor = transformer(**inputs, attention_kwargs=conditions, return_dict=False)[0]
        made = family.video({**inputs, "hidden_states": made})
        if self.causal_block_frames is None:
            return made[:, :, -frames:]
        return pad(made[:, :, noised.given - frames :], (0, 0, 0, 0, noised.given, 0))

    def _times(self, noised: Noised) -> Tensor:  # [B, T], or [B]
        """As the pipeline gives them: per frame where some are clean or the base model was trained so."""
        times = self.noising.timesteps(noised.sigma)
        has_clean_frames = self.prefix or self.causal_block_frames is not None
        return times if has_clean_frames or self.pipeline.config.get("expand_timesteps") else times[:, 0]

    def _expert(self, noised: Noised) -> Any:
        """The transformer for the noise level of a clip; two experts are trained one clip at a time."""
        if len(self.transformers) == 1:
            return self.transformer
        assert isinstance(self.pipeline, BaseVideo)
        return self.transformers[self.pipeline.expert(float(noised.sigma.max()))]

    def text_rows(self, caption: str) -> Tensor:  # [L, D]
        """What the model reads of a caption."""
        if self.pipeline.text_encoder is None:
            return self.no_text()
        own = self.pipeline.pipe if isinstance(self.pipeline, BaseVideo) else self.pipeline
        return self.family.text(own, caption)

    def no_text(self) -> Tensor:  # [L, D]
        """What it reads where there is no text at all."""
        return self.family.no_text(self.transformer.config)

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

    def branch_folder(self, folder: Path, name: str) -> Path:
        """Where the branch of a transformer is saved; those of two experts stand in folders of their names."""
        return folder if len(self.transformers) == 1 else folder / name

    def parameter_counts(self) -> tuple[int, int]:
        """Trained and all parameters of the transformers."""
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in self.denoiser.parameters()]
        return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def build_model(config: TrainConfig, device: torch.device, sharded: bool) -> Model:
    """The pipeline of a config, its branch attached and what is not trained frozen."""
    pipeline = _scratch(config) if config.model.pretrained is None else read_pretrained(config, sharded)
    objective = config.objective
    model = Model(pipeline, config.model.precision, device, objective.prefix_frames, objective.causal_block_frames)
    torch.manual_seed(config.run.seed + BRANCH_SEED_OFFSET)
    for name, transformer in model.transformers.items():
        transformer.requires_grad_(config.model.trainable == "all")
        if config.branch != "none":
            branch = attach(transformer, config.branch, dtype=torch.float32)  # a base in bf16 would round it
            if config.model.pretrained_branch is not None:
                _load_saved(model.branch_folder(config.model.pretrained_branch, name), transformer, branch)
        if objective.causal_block_frames is not None:  # any Wan, a bidirectional one as well: no weight is added
            if config.branch != "none":
                check_causal(branch)
            attach_causal(transformer)
        if config.model.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        transformer.train()
    if config.distillation is not None:
        model = replace(model, teacher=_teacher(config, pipeline, device))
    if config.adversary is not None:
        model = replace(model, judge=_judge(model, sharded).to(device))
    pipeline.to(device)
    if config.model.compile:
        # An encoding that reads tokens makes a plan in every block, outside of the graph.
        encoding = None if config.branch == "none" else ENCODINGS.get(config.branch.encoding)
        teacher = () if model.teacher is None else (model.teacher,)
        for transformer in (*model.transformers.values(), *teacher):
            transformer.compile_repeated_blocks(fullgraph=encoding is None or not encoding.content_channels)
    return model


def _teacher(
    config: TrainConfig, pipeline: CameraVideoPipeline | BaseVideo, device: torch.device
) -> WanTransformer3DModel:
    """The model as it is, for a student that is told at which noise levels it will work."""
    if isinstance(pipeline, BaseVideo):
        fix = "distil a Wan of one transformer"
        raise invalid("model.pretrained with [distillation]", "a causal Wan", type(pipeline.pipe).__name__, fix)
    _check_blocks_of_teacher(config, pipeline)
    pipeline.register_to_config(denoising_levels=denoising_levels(config))
    return deepcopy(pipeline.transformer).requires_grad_(False).eval().to(device)


def _judge(model: Model, sharded: bool) -> Judge:
    """A fresh one, for the latents of a model."""
    if sharded:
        raise invalid("ranks with [adversary]", "1", "more", "train on one GPU: a judge is not sharded")
    return Judge(model.transformer.config.out_channels)


def _check_blocks_of_teacher(config: TrainConfig, pipeline: CameraVideoPipeline) -> None:
    """Refuse a model that was not trained with these blocks. One without a branch may not say it."""
    wanted, found = config.objective.causal_block_frames, pipeline.config.get("causal_block_frames")
    if config.model.pretrained_branch is not None:
        found = found or CameraBranch.load_config(config.model.pretrained_branch).get("causal_block_frames")
    if found != wanted and (found is not None or config.branch != "none"):
        fix = "train it with objective.causal_block_frames first, or give its blocks"
        raise invalid("model.pretrained with [distillation]", f"a causal model with blocks of {wanted}", found, fix)


def _load_saved(folder: Path, transformer: Any, branch: CameraBranch) -> None:
    """Fill a branch from a folder, refused if that is incomplete or of another kind than the config describes."""
    if not folder.is_dir():
        raise invalid("model.pretrained_branch", "the folder of a saved branch", folder, "train one, or leave it out")
    saved = read_branch(folder, transformer)
    differing = [name for name in KIND_OF_BRANCH if as_json(saved.config[name]) != as_json(branch.config[name])]
    if differing:
        got = ", ".join(f"{name} = {saved.config[name]}" for name in differing)
        raise invalid("model.pretrained_branch", "a branch like that of [branch]", got, "make [branch] the same")
    branch.load_state_dict(saved.state_dict())


def _scratch(config: TrainConfig) -> CameraVideoPipeline:
    """A transformer with fresh weights, over the latents of a trained VAE or in pixel space."""
    torch.manual_seed(config.run.seed)
    architecture = dict(config.model.architecture or {})
    _check_architecture(architecture)
    if "patch_size" in architecture:
        architecture["patch_size"] = tuple(architecture["patch_size"])
    try:
        transformer = WanTransformer3DModel(**architecture)
    except (ValueError, RuntimeError, AssertionError) as error:  # sizes that do not go together
        got, fix = str(error) or architecture, "compare them with those of configs/"
        raise invalid("model.architecture", "sizes of a WanTransformer3DModel", got, fix) from None
    scheduler = FlowMatchEulerDiscreteScheduler(shift=config.objective.shift)
    vae = None if config.model.vae is None else _read_vae(config.model.vae)
    return CameraVideoPipeline(None, None, vae, scheduler, transformer, expand_timesteps=True)


def _check_architecture(architecture: dict[str, Any]) -> None:
    """Refuse what torch would only notice somewhere inside of a layer."""
    hints = get_type_hints(WanTransformer3DModel.__init__)
    del hints["return"]
    for key, value in architecture.items():
        name = f"model.architecture.{key}"
        if key not in hints:
            raise invalid(name, "an argument of WanTransformer3DModel", repr(value), f"known are {', '.join(hints)}")
        if not has_type(value, hints[key]):
            raise invalid(name, type_name(hints[key]), repr(value), "write it as in configs/")
        sizes = value if isinstance(value, list | tuple) else [value]
        if hints[key] is not float and any(type(size) is int and size < 1 for size in sizes):
            raise invalid(name, "at least 1", value, "write it as in configs/")


def _read_vae(folder: Path) -> AutoencoderKLWan:
    fix = "name `trained/vae` of a run of merope train with a [vae] table"
    if not (folder / "config.json").is_file():  # diffusers would look for it on the hub
        raise invalid("model.vae", "the folder of an AutoencoderKLWan", folder, fix)
    try:
        return AutoencoderKLWan.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    except (OSError, ValueError) as error:
        raise invalid("model.vae", "a complete AutoencoderKLWan", str(error).splitlines()[0], fix) from None
