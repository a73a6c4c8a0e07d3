"""BaseVideo: a model's own pipeline of diffusers, unmodified, and what its family says of clips.

Wan of one transformer has `CameraVideoPipeline`. All others are trained and run through this.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor

from merope.adapters.families import family_named, family_of
from merope.adapters.pipeline_branches import transformers_of
from merope.generate.frame_coding import FrameCoding
from merope.generate.strides import VideoStrides


def has_own_pipeline(
    index: Mapping[str, Any],  # a model_index.json
) -> bool:
    """Whether a model runs in its own pipeline, not in `CameraVideoPipeline`."""
    if not index.get("transformer"):
        return False  # and is refused there
    has_two = bool((index.get("transformer_2") or (None,))[0])
    is_of_images = str(index.get("_class_name")).endswith("ImageToVideoPipeline")
    return has_two or is_of_images or not family_named(str(index["transformer"][1])).in_camera_video


class BaseVideo(FrameCoding):
    """A pipeline and its family. Latents are normalised, [B, C, T, h, w], whatever the pipeline's own order."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.pipe: Any = pipe
        self.transformer, self.vae, self.text_encoder = self.pipe.transformer, self.pipe.vae, self.pipe.text_encoder
        self.scheduler, self.config = self.pipe.scheduler, self.pipe.config
        self.transformers: dict[str, Any] = dict(transformers_of(pipe))
        self.family = family_of(self.transformer)
        self.strides = VideoStrides.of_family(self.family, self.transformer.config, self.vae)

    def to(self, device: torch.device | str) -> None:
        """Move all parts."""
        self.pipe.to(device)

    def expert(self, level: float) -> str:
        """Name of the transformer that denoises a clip of this noise level, between 0 and 1.

        Wan2.2 A14B has one for levels down to a boundary, and another below.
        """
        boundary = self.pipe.config.get("boundary_ratio")
        is_second = "transformer_2" in self.transformers and boundary is not None and level < boundary
        return "transformer_2" if is_second else "transformer"

    @torch.no_grad()
    def encode_frames(
        self,
        frames: Tensor,  # uint8 [B, T, H, W, 3]
    ) -> Tensor:  # float32 [B, C, T_latent, h, w]
        """As `FrameCoding`; where a token spans several latent frames, the first is repeated until tokens are full."""
        latents = super().encode_frames(frames)
        missing = self.strides.latent_frames(frames.shape[1]) - latents.shape[2]
        return torch.cat((latents[:, :, :1].expand(-1, -1, missing, -1, -1), latents), dim=2)

    @torch.no_grad()
    def decode_latents(
        self,
        latents: Tensor,  # [B, C, T_latent, h, w] normalised
        num_frames: int | None = None,  # None: all
    ) -> Tensor:  # [B, 3, T, H, W] in [−1, 1]
        """Frames of normalised latents, without those that `encode_frames` repeated."""
        repeated = 0 if num_frames is None else latents.shape[2] - (num_frames - 1) // self.strides.frames - 1
        return self.family.decoded(self.vae, self._for_vae(latents[:, :, repeated:]))

    def _latent_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:  # each [1, C or 1, 1, 1, 1]
        mean, std = (torch.as_tensor(x).to(like) for x in self.family.latent_statistics(self.vae))
        return mean.reshape(1, -1, 1, 1, 1), std.reshape(1, -1, 1, 1, 1)
