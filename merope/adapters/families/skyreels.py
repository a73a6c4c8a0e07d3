"""SkyReels V2: Wan's blocks. Diffusion forcing may let a block of frames see itself and what came before it only."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from merope.adapters.families.wan_clips import WanClips
from merope.attention.visible_cameras import Visibility

RATE_24 = 1
"""Of its two frame rates."""

PART = "base_num_frames"
"""Argument of diffusion forcing: RGB frames of one part of a long video."""


class SkyReelsFamily(WanClips):
    """The branch sees what the model's own mask lets it see."""

    def sees(self, config: Mapping[str, Any], frames: int) -> Visibility | None:
        """Pipelines may change the size of the blocks between two calls."""
        block = config["num_frame_per_block"]
        return Visibility.block_causal(frames, block) if block > 1 else None

    def whole_clip(self, arguments: Mapping[str, inspect.Parameter], frames: int) -> dict[str, Any]:
        """All parts would be given the same cameras."""
        return {PART: frames} if PART in arguments else {}

    def timed(self, config: Mapping[str, Any], times: Tensor) -> dict[str, Any]:
        """Times per frame are an option of the forward. Models that know rates are told 24 frames per second."""
        rate = {"fps": [RATE_24] * len(times)} if config["inject_sample_info"] else {}
        forcing = {"enable_diffusion_forcing": True} if times.ndim == 2 else {}
        return {"timestep": times, **forcing, **rate}


SKYREELS = SkyReelsFamily(
    transformer="SkyReelsV2Transformer3DModel",
    models="SkyReels V2",
    blocks="blocks",
    recorded=("in_channels", "out_channels", "ffn_dim", "text_dim"),
    timesteps="frame",
)
