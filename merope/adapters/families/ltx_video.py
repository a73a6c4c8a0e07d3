"""LTX-Video: latents arrive as packed tokens, their grid beside them. Eight RGB frames per latent frame."""

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor

from merope.adapters.families.facts import Family
from merope.errors import invalid

GRID = ("num_frames", "height", "width")
"""Arguments of the forward: token frames, rows and columns."""


class PackedFamily(Family):
    """A family whose pipelines cut patches themselves."""

    def patch(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        """What arrives is tokens already."""
        return 1, 1, 1

    def video(self, arguments: Mapping[str, Any]) -> Tensor:  # [B, channels, T, H, W]
        """The tokens on their grid."""
        tokens: Tensor = arguments["hidden_states"]  # [B, N, channels]
        grid = tuple(arguments.get(name) for name in GRID)
        if None in grid or prod(grid) != tokens.shape[1]:  # type: ignore[arg-type]
            expected = f"num_frames · height · width tokens of {grid}"
            fix = "pass the three sizes; tokens of further conditions have no cameras and are not supported"
            raise invalid("hidden_states", expected, tokens.shape[1], fix)
        return tokens.unflatten(1, grid).movedim(-1, 1)


LTX_VIDEO = PackedFamily(
    transformer="LTXVideoTransformer3DModel", models="LTX-Video", latent_stride=8, doubles_batch=True
)
