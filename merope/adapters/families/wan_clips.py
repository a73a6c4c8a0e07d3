"""What Wan and the models built on it do with clips: one autoencoder, and text padded with zeros to a fixed length."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from merope.adapters.families.facts import Family
from merope.errors import invalid

TEXT_TOKENS = 512
"""Rows of text that Wan was trained with and pipelines give it; `encode_prompt` alone would give 226."""


class WanClips(Family):
    """A family with Wan's autoencoder and text encoder."""

    def vae_strides(self, vae: Any) -> tuple[int, int]:
        return wan_vae_strides(vae.config)

    def latent_statistics(self, vae: Any) -> tuple[Any, Any]:
        return vae.config.latents_mean, vae.config.latents_std

    def text(self, pipeline: Any, caption: str) -> Tensor:  # [L, D]
        embeddings, _ = pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS
        )
        return embeddings[0]


def wan_vae_strides(
    vae: Mapping[str, Any],  # config of an AutoencoderKLWan
) -> tuple[int, int]:
    """RGB frames and pixels per latent one. diffusers believes what a config says of them; the layers decide."""
    halvings = len(vae["dim_mult"]) - 1
    made = {
        "scale_factor_temporal": 2 ** sum(vae["temperal_downsample"][:halvings]),
        "scale_factor_spatial": (vae["patch_size"] or 1) * 2**halvings,
    }
    for name, stride in made.items():
        if vae[name] != stride:
            raise invalid(f"vae.{name}", f"{stride}, the stride of its layers", vae[name], "correct its config")
    return made["scale_factor_temporal"], made["scale_factor_spatial"]
