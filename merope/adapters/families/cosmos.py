"""Cosmos Predict 1, 2 and 2.5: text by cross-attention. Its forward has no attention_kwargs."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from merope.adapters.families.facts import Family
from merope.adapters.families.wan_clips import wan_vae_strides

GIVEN_LATENTS = "num_latent_conditional_frames"
"""Argument of Predict 2.5: how many latent frames of a video a clip begins with, one or two."""


class CosmosFamily(Family):
    """Predict 1 has a VAE of its own, of eight frames; 2 and 2.5 have Wan's, of four."""

    def token_stride(self, config: Mapping[str, Any]) -> int:
        """Only Predict 1 learns positions beside the rotary ones."""
        vae = 8 if config["extra_pos_embed_type"] == "learnable" else self.latent_stride
        return vae * self.patch(config)[0]

    def vae_strides(self, vae: Any) -> tuple[int, int]:
        if "dim_mult" in vae.config:
            return wan_vae_strides(vae.config)
        return vae.config.temporal_compression_ratio, vae.config.spatial_compression_ratio

    def packages(self, config: Mapping[str, Any], index: Mapping[str, Any]) -> tuple[str, ...]:
        """diffusers scales the mask of padding by torchvision. Without a checker in the folder it makes one."""
        has_checker = bool((index.get("safety_checker") or (None,))[0])
        return ("torchvision",) * bool(config["concat_padding_mask"]) + ("cosmos_guardrail",) * (not has_checker)

    def needs_frames(self, arguments: Mapping[str, inspect.Parameter]) -> bool:
        """Video2World of Predict 1 and 2, whatever their defaults; Predict 2.5 makes clips of text as well."""
        return "video" in arguments and GIVEN_LATENTS not in arguments

    def frames_taken(self, arguments: Mapping[str, inspect.Parameter]) -> int:
        if "video" not in arguments:
            return 0
        return 1 + self.latent_stride if GIVEN_LATENTS in arguments else sys.maxsize

    def first_frames(self, arguments: Mapping[str, inspect.Parameter], frames: Sequence[Any]) -> dict[str, Any]:
        """The pipeline gives them a timestep of their own."""
        latents = 1 + (len(frames) - 1) // self.latent_stride
        return {"video": list(frames)} | ({GIVEN_LATENTS: latents} if GIVEN_LATENTS in arguments else {})


COSMOS = CosmosFamily(
    transformer="CosmosTransformer3DModel",
    models="Cosmos Predict 1, 2 and 2.5",
    compiles_blocks=False,
    not_trained="its generations scale noise and latents in ways of their own (EDM), which no recipe here has",
)
