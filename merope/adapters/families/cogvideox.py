"""CogVideoX 1.0 and 1.5: joint attention, text before the video; frames come before channels.

The rotary embedding is an argument of the forward, and 2B has none. A token of 1.5 spans two latent frames.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from merope.adapters.families.facts import Family


class CogVideoXFamily(Family):
    """Frames before channels."""

    def video(self, arguments: Mapping[str, Any]) -> Tensor:  # [B, channels, T, H, W]
        """The latents, channels first."""
        latents: Tensor = arguments["hidden_states"]  # [B, T, channels, H, W]
        return latents.transpose(1, 2)


COGVIDEOX = CogVideoXFamily(
    transformer="CogVideoXTransformer3DModel",
    models="CogVideoX 1.0 and 1.5",
    argument="image_rotary_emb",
    doubles_batch=True,
)
