"""Family: what the camera branch must know of a class of video transformers. Tokens are frame-major in all of them."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from merope.adapters.conditioning import CameraArgument, CameraCondition, CameraRotary, Carrier
from merope.adapters.families.noise import FLOW_MATCHING, Noising
from merope.attention.visible_cameras import Visibility
from merope.geometry.cameras import LATENT_STRIDE

WIDE = 128
"""Channels of a head for which the fast kernels are made."""


@dataclass(frozen=True)
class Family:
    """Facts of one transformer class. Where a fact depends on more than a name, a family overrides a method.

    transformer: name of the class; subclasses belong to the family, too.
    models: what people call it.
    blocks, attention, query: attributes of the model, of a block and of its self-attention: the list of blocks, the
        self-attention, its layer that makes queries. In joint attention, text has an argument of its own.
    rope: module whose output goes to the self-attention of every block. Cameras travel on it.
    argument: in its place, an argument of the forward that goes to the self-attention of every block as it is.
    latent_stride: RGB frames per latent frame.
    doubles_batch: its pipelines put both passes of guidance into one batch, one after the other.
    integrations, has_history: what of `CameraBranchConfig` its attention supports.
    recorded: fields of the model's config that a saved branch finds again in the model it is loaded into.
    timesteps: of what a forward may be given one each. One per frame or token lets frames be clean while others are
        denoised.
    text_first: text tokens of joint attention stand before those of the video, not behind them.
    shares_clips: its blocks are such that `merope train` can split the frames of a clip over ranks.
    compiles_blocks: diffusers has `compile_repeated_blocks` for it.
    not_trained: why `merope train` does not take it; empty where it does. All methods below `video` are for training
        and for `merope analyse`, and may be left out with it.
    not_generated: why `merope generate` does not take it; empty where it does.
    pipeline: class of diffusers that it runs in, whichever one its folder names; empty for that of the folder.
    in_camera_video: its models of one transformer and of text run in `CameraVideoPipeline`.
    branches_of: further classes whose branches fit, because they have the same blocks with the same weights.
    casts_latents: its pipeline brings latents to the precision of the VAE, which may then be float32.
    """

    transformer: str
    models: str
    blocks: str = "transformer_blocks"
    attention: str = "attn1"
    query: str = "to_q"
    rope: str = "rope"
    argument: str = ""
    latent_stride: int = LATENT_STRIDE
    doubles_batch: bool = False
    integrations: tuple[str, ...] = ("parallel",)
    has_history: bool = False
    recorded: tuple[str, ...] = ("in_channels", "out_channels")
    timesteps: Literal["clip", "frame", "token"] = "clip"
    text_first: bool = False
    shares_clips: bool = False
    compiles_blocks: bool = True
    not_trained: str = ""
    not_generated: str = ""
    pipeline: str = ""
    in_camera_video: bool = False
    branches_of: tuple[str, ...] = ()
    casts_latents: bool = True

    def base(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What must agree between a branch and its base model. The first five are known to every branch."""
        return {
            "transformer": self.transformer,
            "num_layers": config["num_layers"],
            "num_attention_heads": config["num_attention_heads"],
            "attention_head_dim": config["attention_head_dim"],
            "patch_size": list(self.patch(config)),
            **{name: config[name] for name in self.recorded},
        }

    def takes_branches_of(self, other: "Family") -> bool:
        """Whether a branch that was made for another family, or this one, fits where sizes agree."""
        return other.transformer in (self.transformer, *self.branches_of)

    def patch(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        """Latent frames, rows and columns of a token."""
        size = config["patch_size"]
        return (config.get("patch_size_t") or 1, size, size) if isinstance(size, int) else tuple(size)

    def heads(self, base: Mapping[str, Any], compression: int) -> tuple[int, int]:
        """Number and channels of the heads in which a branch counts the width: wide ones, where they fill it."""
        count, dim = base["num_attention_heads"], base["attention_head_dim"]
        return (count, dim) if count * dim % (WIDE * compression) else (count * dim // WIDE, WIDE)

    def token_stride(self, config: Mapping[str, Any]) -> int:
        """RGB frames per frame of tokens: its camera is that of RGB frame `token_stride` · n."""
        return self.latent_stride * self.patch(config)[0]

    def video(self, arguments: Mapping[str, Any]) -> Tensor:  # [B, channels, T, H, W]
        """The latents among the arguments of a forward."""
        return arguments["hidden_states"]

    def sees(self, config: Mapping[str, Any], frames: int) -> Visibility | None:
        """Which frames of tokens each one sees in self-attention; None: all."""
        return None

    def carried(self, native: Any, condition: CameraCondition) -> Carrier:
        """Cameras put on the argument that carries them."""
        return CameraArgument(condition) if native is None else CameraRotary(native, condition)

    def vae_strides(self, vae: Any) -> tuple[int, int]:
        """RGB frames and pixels per latent one, of an autoencoder that may be without its weights."""
        return int(vae.temporal_compression_ratio), int(vae.spatial_compression_ratio)

    def latent_statistics(self, vae: Any) -> tuple[Any, Any]:  # [C] or a number each
        """Mean and standard deviation that latents are normalised by."""
        return 0.0, 1.0 / vae.config.scaling_factor

    def decoded(self, vae: Any, latents: Tensor) -> Tensor:  # [B, C, T, h, w] -> [B, 3, frames, H, W]
        """The frames of latents that are not normalised."""
        return vae.decode(latents, return_dict=False)[0]

    def packages(
        self,
        config: Mapping[str, Any],
        index: Mapping[str, Any],  # the model_index.json
    ) -> tuple[str, ...]:
        """Packages that a model needs beside diffusers and transformers."""
        return ()

    def check_clip(
        self,
        config: Mapping[str, Any],
        frames: int,  # RGB
        size: tuple[int, int],  # latent rows, columns
    ) -> None:
        """Refuse clips that a model cannot make, although they are of whole tokens."""

    def made_size(
        self,
        config: Mapping[str, Any],
        pixels: int,  # per latent one
        height: int,
        width: int,
    ) -> tuple[int, int]:
        """Height and width of a clip that begins with such an image, in pipelines that are not told them."""
        return height, width

    def needs_frames(self, arguments: Mapping[str, inspect.Parameter]) -> bool:
        """Whether a pipeline whose call has these arguments makes nothing of text alone."""
        return "image" in arguments and arguments["image"].default is inspect.Parameter.empty

    def frames_taken(self, arguments: Mapping[str, inspect.Parameter]) -> int:
        """With how many given frames such a pipeline can begin a clip, at most."""
        return 1 if "image" in arguments else 0

    def first_frames(
        self,
        arguments: Mapping[str, inspect.Parameter],
        frames: Sequence[Any],  # PIL images
    ) -> dict[str, Any]:
        """The arguments of a call that begins with these."""
        return {"image": frames[0]}

    def whole_clip(self, arguments: Mapping[str, inspect.Parameter], frames: int) -> dict[str, Any]:
        """The arguments of a call that makes so many RGB frames in one part, where pipelines have parts."""
        return {}

    def guided(self, pipe: Any, scale: float) -> dict[str, Any]:
        """The arguments of a pipeline's call that set its guidance by text."""
        return {"guidance_scale": scale}

    def noising(self, scheduler: Any) -> Noising:
        """How it mixes data and noise."""
        return FLOW_MATCHING

    def text(self, pipeline: Any, caption: str) -> Tensor:  # [L, D]
        """A caption as all that the transformer reads of it, by the pipeline's text encoders."""
        return pipeline.encode_prompt(caption, do_classifier_free_guidance=False)[0][0]

    def no_text(self, config: Mapping[str, Any]) -> Tensor:  # [L, D]
        """What a model reads that is given no text."""
        return torch.zeros(1, config["text_dim"])

    def text_inputs(self, config: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:  # [B, L, D]
        """The arguments of a forward that depend on the text."""
        return {"encoder_hidden_states": rows}

    def video_inputs(
        self,
        config: Mapping[str, Any],
        latents: Tensor,  # [B, channels, T, H, W] normalised
        times: Tensor,  # [B], or where frames have their own ones [B, T]
        pixels: int,  # per latent one
    ) -> dict[str, Any]:
        """The arguments of a forward that do not depend on the text, without the cameras."""
        return {"hidden_states": latents, **self.timed(config, self.spread(config, times, latents))}

    def spread(self, config: Mapping[str, Any], times: Tensor, latents: Tensor) -> Tensor:
        """Times of frames as times of their tokens, where the forward wants these."""
        if times.ndim == 1 or self.timesteps == "frame":
            return times
        _, rows, columns = self.patch(config)
        return times.repeat_interleave(latents.shape[-2] // rows * (latents.shape[-1] // columns), dim=1)

    def timed(self, config: Mapping[str, Any], times: Tensor) -> dict[str, Any]:  # [B], [B, frames] or [B, tokens]
        """The arguments of a forward that say how noisy its latents are."""
        return {"timestep": times}

    def with_clean_frames(
        self,
        config: Mapping[str, Any],
        arguments: Mapping[str, Any],
        clean: Tensor,  # [B or 1, channels, K, H, W] normalised
    ) -> dict[str, Any]:
        """The arguments of a forward with these as the first latent frames, at time 0."""
        changed = {**arguments, "hidden_states": arguments["hidden_states"].clone()}
        video, times = self.video(changed), arguments["timestep"]
        video[:, :, : clean.shape[2]] = clean.to(video)
        of_frames = times[:, None].expand(-1, video.shape[2]) if times.ndim == 1 else times
        is_noisy = torch.arange(video.shape[2], device=times.device) >= clean.shape[2]
        return changed | self.timed(config, self.spread(config, of_frames * is_noisy, video))

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        """Of the latents that it denoises, without those of further conditions."""
        return config["out_channels"] or config["in_channels"]

    def image_channels(self, config: Mapping[str, Any]) -> int:
        """Channels of an image that the model takes beside the latents; 0 for models of text alone."""
        return config["in_channels"] - self.latent_channels(config)
