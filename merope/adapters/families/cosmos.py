"""Cosmos Predict 1, 2 and 2.5: text by cross-attention. Its forward has no attention_kwargs."""

from collections.abc import Mapping
from typing import Any

from merope.adapters.families.facts import Family
from merope.adapters.families.wan_clips import wan_vae_strides


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


COSMOS = CosmosFamily(
    transformer="CosmosTransformer3DModel",
    models="Cosmos Predict 1, 2 and 2.5",
    compiles_blocks=False,
    not_trained="its generations scale noise and latents in ways of their own (EDM), which no recipe here has",
)
