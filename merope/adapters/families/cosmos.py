"""Cosmos Predict 1, 2 and 2.5: text by cross-attention. Its forward has no attention_kwargs."""

from collections.abc import Mapping
from typing import Any

from merope.adapters.families.facts import Family


class CosmosFamily(Family):
    """Predict 1 has a VAE of its own, of eight frames; 2 and 2.5 have Wan's, of four."""

    def token_stride(self, config: Mapping[str, Any]) -> int:
        """Only Predict 1 learns positions beside the rotary ones."""
        vae = 8 if config["extra_pos_embed_type"] == "learnable" else self.latent_stride
        return vae * self.patch(config)[0]


COSMOS = CosmosFamily(transformer="CosmosTransformer3DModel", models="Cosmos Predict 1, 2 and 2.5")
