"""Wan and what is built on it: text by cross-attention, one rotary embedding (cos, sin) for all blocks."""

from collections.abc import Mapping
from typing import Any

from merope.adapters.families.wan_clips import WanClips

RGB_CHANNELS = 3
"""Of a model of pixels, whose latent frames are the RGB frames themselves; Wan's VAEs make more channels."""

RECORDED = (
    *("num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim"),
    *("patch_size", "in_channels", "out_channels", "text_dim"),
)


TOLD = ("additive", "recammaster", "motionctrl", "modulation", "epipolar", "raype", "roce")
"""Ways of telling its blocks numbers of their cameras."""


class WanFamily(WanClips):
    """Wan2.1 and Wan2.2. Wan2.2 A14B is two of these transformers."""

    def base(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """As version 0.1.0 wrote it, when there was no other family."""
        return {name: list(value) if isinstance(value := config[name], tuple) else value for name in RECORDED}

    def heads(self, base: Mapping[str, Any], compression: int) -> tuple[int, int]:
        """As many as the model's."""
        return base["num_attention_heads"], base["attention_head_dim"]

    def token_stride(self, config: Mapping[str, Any]) -> int:
        return 1 if config["in_channels"] == RGB_CHANNELS else super().token_stride(config)


WAN = WanFamily(
    transformer="WanTransformer3DModel",
    models="Wan2.1, Wan2.2",
    blocks="blocks",
    integrations=("parallel", "rerope", *TOLD),
    has_history=True,
    timesteps="token",
    shares_clips=True,
    in_camera_video=True,
)

WAN_VACE = WanClips(
    transformer="WanVACETransformer3DModel",
    models="Wan2.1 VACE",
    blocks="blocks",
    recorded=("in_channels", "out_channels", "ffn_dim", "text_dim"),
    branches_of=("WanTransformer3DModel",),
    not_trained="it learns from control videos, which clips do not have: train a branch on Wan2.1 of the same size",
)
"""Wan's blocks beside a stack of control blocks, which see no cameras."""

WAN_ANIMATE = WanClips(
    transformer="WanAnimateTransformer3DModel",
    models="Wan2.2 Animate",
    blocks="blocks",
    recorded=("in_channels", "out_channels", "ffn_dim", "text_dim"),
    not_trained="it learns from videos of poses and faces, which clips do not have",
    not_generated="it needs videos of a pose and a face: run its own pipeline inside of merope.cameras",
)
"""Wan's blocks, with adapters for a face between them. Its first frame of tokens is a picture."""
