"""SkyReels V2: Wan's blocks. Diffusion forcing may let a block of frames see itself and what came before it only."""

from collections.abc import Mapping
from typing import Any

from merope.adapters.families.facts import Family
from merope.attention.visible_cameras import Visibility


class SkyReelsFamily(Family):
    """The branch sees what the model's own mask lets it see."""

    def sees(self, config: Mapping[str, Any], frames: int) -> Visibility | None:
        """Pipelines may change the size of the blocks between two calls."""
        block = config["num_frame_per_block"]
        return Visibility.block_causal(frames, block) if block > 1 else None


SKYREELS = SkyReelsFamily(
    transformer="SkyReelsV2Transformer3DModel",
    models="SkyReels V2",
    blocks="blocks",
    recorded=("in_channels", "out_channels", "ffn_dim", "text_dim"),
)
