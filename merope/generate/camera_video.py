"""CameraVideoPipeline: prompt, camera path and clean prefix to video, by masked flow matching.

Clean latent frames keep their values and the timestep 0 while the others are denoised, the scheme in which Wan2.2
TI2V-5B takes its first image, here for any number of frames (paper: 9 RGB frames, 3 latent ones).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.utils.outputs import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from merope.adapters.attachment import attached_branch
from merope.adapters.history import HistoryReferences
from merope.errors import invalid
from merope.generate.conditions import (
    Frames,
    batch_size,
    check_attention_kwargs,
    check_cameras,
    check_choices,
    check_finite,
    check_noise,
    check_prefix,
    latent_cameras,
    prefix_tensor,
)
from merope.generate.frame_coding import FrameCoding
from merope.generate.history_frames import check_history
from merope.generate.stream import open_stream, resume_stream
from merope.generate.strides import VideoStrides
from merope.generate.text import Embeddings, Text
from merope.geometry.cameras import Cameras

StepCallback = Callable[["CameraVideoPipeline", int, Tensor, dict[str, Tensor]], dict[str, Tensor]]


@dataclass
class CameraVideoOutput(BaseOutput):
    """frames: "np" float [B, T, H, W, 3] and "pt" [B, T, 3, H, W] in [0, 1], "pil" B lists of T images,
    "latent" normalised latents [B, C, T_latent, h, w]."""

    frames: Any


class CameraVideoPipeline(FrameCoding, WanPipeline):
    """Wan with a camera branch, or without one; loads the folders that `WanPipeline` loads.

    vae: None for a pixel-space model, whose latents are the RGB frames in [−1, 1] themselves.
    text_encoder, tokenizer: None for a model that is given `prompt_embeds`, or no text at all.
    expand_timesteps: the base model was trained with one timestep per token (Wan2.2 TI2V-5B).
    causal_block_frames: the model was trained to make blocks of so many latent frames, one after the other.
    denoising_levels: noise levels of the few steps that it was trained to make a block in, such as [1, 0.9, 0.75, 0.5].
    """

    transformer: Any  # the components that DiffusionPipeline sets by name
    vae: Any
    text_encoder: Any
    tokenizer: Any
    scheduler: Any
    model_cpu_offload_seq = "text_encoder->transformer->vae"
    _callback_tensor_inputs = ["latents", "prompt_embeds", "negative_prompt_embeds"]  # noqa: RUF012
    _optional_components = ["tokenizer", "text_encoder", "vae", "transformer_2"]  # noqa: RUF012

    def __init__(
        self,
        tokenizer: AutoTokenizer | None,
        text_encoder: UMT5EncoderModel | None,
        vae: AutoencoderKLWan | None,
        scheduler: FlowMatchEulerDiscreteScheduler | UniPCMultistepScheduler,
        transformer: WanTransformer3DModel,
        transformer_2: WanTransformer3DModel | None = None,
        boundary_ratio: float | None = None,
        expand_timesteps: bool = False,
        causal_block_frames: int | None = None,
        denoising_levels: list[float] | None = None,
    ) -> None:
        if not isinstance(getattr(transformer, "_orig_mod", transformer), WanTransformer3DModel):
            fix = "run the model's own pipeline with merope.cameras, see docs/bases.md"
            raise invalid("transformer", "a WanTransformer3DModel", type(transformer).__name__, fix)
        if transformer_2 is not None:
            fix = "use Wan2.2 TI2V-5B or Wan2.1: a camera branch belongs to one transformer"
            raise invalid("transformer_2", "None", "a model of two transformers", fix)
        components = (tokenizer, text_encoder, vae, scheduler, transformer, None)
        super().__init__(*components, boundary_ratio, expand_timesteps)  # type: ignore[arg-type]
        trained = {"causal_block_frames": causal_block_frames, "denoising_levels": denoising_levels}
        self.register_to_config(**{name: value for name, value in trained.items() if value is not None})
        self.strides = VideoStrides.of(transformer.config, None if vae is None else vae.config)
        self.vae_scale_factor_temporal, self.vae_scale_factor_spatial = self.strides.frames, self.strides.pixels

    stream = open_stream
    resume_stream = resume_stream

    @property
    def causal_block_frames(self) -> int | None:
        """Latent frames of a block that a causal model, or its branch, was trained with; None: whole clips."""
        return _trained(self, "causal_block_frames")

    @property
    def denoising_levels(self) -> list[float] | None:
        """Noise levels of the few steps that the model, or its branch, was trained for; None: as many as one likes."""
        return _trained(self, "denoising_levels")

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **options: Any) -> None:
        """Save the components. A camera branch is saved on its own, because base models are loaded without one."""
        if attached_branch(self.transformer) is not None:
            fix = "save it with branch = merope.detach(pipe.transformer); branch.save_pretrained(folder)"
            raise invalid("transformer", "without a camera branch", "one with a branch", fix)
        super().save_pretrained(save_directory, *args, **options)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        cameras: Cameras | None = None,
        prefix: Frames | None = None,
        history: HistoryReferences | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int = 288,
        width: int = 512,
        num_frames: int = 49,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,  # [B, C, T_latent, h, w]
        prompt_embeds: Tensor | None = None,  # [B, L, text_dim]
        negative_prompt_embeds: Tensor | None = None,  # [B, L, text_dim]
        output_type: Literal["np", "pt", "pil", "latent"] = "np",
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: StepCallback | PipelineCallback | MultiPipelineCallbacks | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        max_sequence_length: int = 512,
    ) -> CameraVideoOutput | tuple[Any]:
        """Generate B clips; whatever comes once (prompt, cameras, prefix, history) is shared by all of them.

        cameras: of every RGB frame, [num_frames, 4, 4] or [B, num_frames, 4, 4]; for a model with a camera branch.
            Latent frame n takes the camera of RGB frame 4n (n for pixel-space models).
        prefix: clean first frames, uint8 [(B,) T, H, W, 3] or PIL images; with a VAE 4k + 1 of them.
            A rig's views are neighbouring videos: video b · views + v, with a prefix of its own, is view v of clip b.
        history: retrieved images of the same place, for a branch that was made for them (`merope.HistoryFrames`).
        attention_kwargs: further ones for the transformer, such as {"scale": 0.8} for LoRA, {"sees": …} for a causal
            model (docs/streaming.md).

        A model without a text encoder needs no text. The other arguments are those of `diffusers.WanPipeline`.
        """
        if isinstance(callback_on_step_end, (PipelineCallback, MultiPipelineCallbacks)):
            callback_on_step_end_tensor_inputs = callback_on_step_end.tensor_inputs
        text = Text(prompt, negative_prompt, prompt_embeds, negative_prompt_embeds)
        clean_frames = None if prefix is None else prefix_tensor(prefix)
        self._check(text, cameras, clean_frames, height, width, num_frames, guidance_scale)
        check_choices(output_type, callback_on_step_end_tensor_inputs, self._callback_tensor_inputs)
        check_attention_kwargs(attention_kwargs or {}, self.causal_block_frames)
        views = 1 if cameras is None else cameras.views
        batch = batch_size(text.count, cameras, clean_frames) * views
        if history is not None:
            branch = attached_branch(self.transformer)
            check_history(history, branch, batch, height, width, self.strides.latent_frames(num_frames))
        shape = self._latent_shape(batch, height, width, num_frames)
        check_noise(shape, latents, generator)

        self._guidance_scale, self._attention_kwargs = guidance_scale, attention_kwargs
        self._current_timestep, self._interrupt = None, False
        device = self._execution_device
        embeddings = self._embedded(text, batch // views, max_sequence_length).repeated(views)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        latents = latents.to(device, torch.float32)
        clean = latents[:, :, :0]
        if clean_frames is not None:
            clean = self.encode_frames(clean_frames).to(device)
            clean = clean.repeat(batch // len(clean), 1, 1, 1, 1)
        if cameras is not None:
            attention_kwargs = self._with_cameras(attention_kwargs or {}, cameras, latents, history)

        self.scheduler.set_timesteps(num_inference_steps, device=device)
        self.scheduler.set_begin_index(0)
        latents = self._denoise(
            latents, clean, embeddings, attention_kwargs, callback_on_step_end, callback_on_step_end_tensor_inputs
        )
        check_finite("the sampled latents", latents)
        frames = latents if output_type == "latent" else self._decoded(latents, output_type)
        self.maybe_free_model_hooks()
        return CameraVideoOutput(frames=frames) if return_dict else (frames,)

    def _check(
        self,
        text: Text,
        cameras: Cameras | None,
        prefix: Tensor | None,  # uint8 [B, T, H, W, 3]
        height: int,
        width: int,
        num_frames: int,
        guidance_scale: float,
    ) -> None:
        """Everything that can be refused without running a model."""
        self.strides.check(height, width, num_frames)
        if prefix is not None:
            check_prefix(prefix, self.strides, height, width, num_frames)
        has_branch = attached_branch(self.transformer) is not None
        if has_branch and cameras is None:
            raise invalid("cameras", "given to a model with a camera branch", None, "pass one camera per RGB frame")
        if cameras is not None:
            if not has_branch:
                fix = "call merope.load_branch(pipe.transformer, folder) first, or leave the cameras out"
                raise invalid("cameras", "None for a model without a camera branch", "cameras", fix)
            check_cameras(cameras, height, width, num_frames)
        has_encoder = self.text_encoder is not None and self.tokenizer is not None
        text.check(has_encoder, guidance_scale > 1.0, self.transformer.config.text_dim)

    def _latent_shape(self, batch: int, height: int, width: int, num_frames: int) -> tuple[int, ...]:
        rows, columns = self.strides.latent_size(height, width)
        return batch, self.transformer.config.in_channels, self.strides.latent_frames(num_frames), rows, columns

    def _with_cameras(
        self, given: Mapping[str, Any], cameras: Cameras, latents: Tensor, history: HistoryReferences | None
    ) -> dict[str, Any]:
        """attention_kwargs with cameras and history made ready, once for all steps and both passes of guidance."""
        branch = attached_branch(self.transformer)
        assert branch is not None
        references = None if history is None else history.encoded(self.encode_frames)
        of_latents, times = latent_cameras(cameras, self.strides.frames), given.get("times")
        ready = branch.prepare(of_latents, latents.to(self.transformer.dtype), times, references, given.get("sees"))
        return {**given, "cameras": ready, "times": None}

    def _embedded(self, text: Text, batch: int, max_sequence_length: int) -> Embeddings:
        """Prompts as WanPipeline embeds them, one per clip. No text is a zero vector, which is how Wan pads."""
        dtype, device = self.transformer.dtype, self._execution_device
        if text.prompt is None and text.prompt_embeds is None:
            positive = torch.zeros(1, 1, self.transformer.config.text_dim)
            negative = text.negative_prompt_embeds
        else:
            positive, negative = self.encode_prompt(
                text.prompts,  # type: ignore[arg-type]
                text.negative_prompts,
                self.do_classifier_free_guidance,
                prompt_embeds=text.prompt_embeds,
                negative_prompt_embeds=text.negative_prompt_embeds,
                max_sequence_length=max_sequence_length,
            )
        positive = positive.to(device, dtype).expand(batch, -1, -1)
        if not self.do_classifier_free_guidance or negative is None:
            return Embeddings(positive)
        return Embeddings(positive, negative.to(device, dtype).expand(batch, -1, -1))

    def _denoise(
        self,
        latents: Tensor,  # [B, C, T, h, w] noise
        clean: Tensor,  # [B, C, K, h, w] the first K latent frames, K = 0 without a prefix
        text: Embeddings,
        attention_kwargs: Mapping[str, Any] | None,
        callback: StepCallback | PipelineCallback | MultiPipelineCallbacks | None,
        callback_inputs: Sequence[str],
    ) -> Tensor:  # [B, C, T, h, w]
        """The sampling loop. Schedulers act on each element alone, so clean frames can be put back after any step."""
        timesteps = self.scheduler.timesteps
        self._num_timesteps = len(timesteps)
        latents = _with_prefix(latents, clean)
        with self.progress_bar(total=len(timesteps)) as progress:
            for step, timestep in enumerate(timesteps):
                if self.interrupt:
                    break
                self._current_timestep = timestep
                velocity = self._velocity(step, timestep, latents, clean.shape[2], text, attention_kwargs)
                latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
                latents = _with_prefix(latents, clean)
                if callback is not None:
                    tensors: dict[str, Any] = {
                        "latents": latents,
                        "prompt_embeds": text.positive,
                        "negative_prompt_embeds": text.negative,
                    }
                    changed = callback(self, step, timestep, {name: tensors[name] for name in callback_inputs})
                    tensors |= changed or {}
                    latents = _with_prefix(tensors["latents"], clean)
                    text = Embeddings(tensors["prompt_embeds"], tensors["negative_prompt_embeds"])
                progress.update()
        self._current_timestep = None
        return latents

    def _velocity(
        self,
        step: int,
        timestep: Tensor,  # []
        latents: Tensor,  # [B, C, T, h, w]
        clean_count: int,
        text: Embeddings,
        attention_kwargs: Mapping[str, Any] | None,
    ) -> Tensor:  # [B, C, T, h, w]
        """The model's velocity, guided by text if the scale asks for it. Both passes share the cameras' plan."""
        times = self._model_timesteps(timestep, latents, clean_count)
        progress = {
            "step_index": step,
            "sigma": float(self.scheduler.sigmas[step]),
            "num_inference_steps": self._num_timesteps,
        }

        def predicted(embeddings: Tensor, name: str) -> Tensor:
            with self.transformer.cache_context(name, **progress):
                velocity: Tensor = self.transformer(
                    hidden_states=latents.to(self.transformer.dtype),
                    timestep=times,
                    encoder_hidden_states=embeddings,
                    attention_kwargs=None if attention_kwargs is None else dict(attention_kwargs),
                    return_dict=False,
                )[0]
            return velocity.to(latents.dtype)  # or schedulers would round latents to the model's bfloat16

        conditioned = predicted(text.positive, "cond")
        if text.negative is None or not self.do_classifier_free_guidance:  # callbacks may end guidance
            return conditioned
        unconditioned = predicted(text.negative, "uncond")
        return unconditioned + self.guidance_scale * (conditioned - unconditioned)

    def _model_timesteps(
        self,
        timestep: Tensor,  # []
        latents: Tensor,  # [B, C, T, h, w]
        clean_count: int,
    ) -> Tensor:  # [B], or [B, tokens]
        """One timestep per token where clean tokens exist (theirs is 0) or the model was trained so; else per clip."""
        batch, _, frames, rows, columns = latents.shape
        if clean_count == 0 and not self.config["expand_timesteps"]:
            return timestep.expand(batch)
        is_noisy = torch.arange(frames, device=latents.device) >= clean_count
        of_tokens = (is_noisy * timestep.float()).repeat_interleave(self.strides.tokens_per_frame(rows, columns))
        return of_tokens.expand(batch, -1)

    def _decoded(self, latents: Tensor, output_type: str) -> Any:
        video = self.decode_latents(latents)
        check_finite("the decoded frames", video)
        return self.video_processor.postprocess_video(video, output_type=output_type)


def _with_prefix(latents: Tensor, clean: Tensor) -> Tensor:  # [B, C, T, h, w], [B, C, K, h, w] -> [B, C, T, h, w]
    return torch.cat((clean, latents[:, :, clean.shape[2] :]), dim=2)


def _trained(pipe: CameraVideoPipeline, name: str) -> Any:
    branch = attached_branch(pipe.transformer)
    return pipe.config.get(name) or (None if branch is None else branch.config.get(name))
