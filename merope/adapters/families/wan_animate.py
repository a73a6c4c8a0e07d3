"""Wan2.2 Animate: Wan's blocks, with adapters for a face between them. Its first frame of tokens is a picture."""

from merope.adapters.families.wan_clips import WanClips

WAN_ANIMATE = WanClips(
    transformer="WanAnimateTransformer3DModel",
    models="Wan2.2 Animate",
    blocks="blocks",
    recorded=("in_channels", "out_channels", "ffn_dim", "text_dim"),
    not_trained="it learns from videos of poses and faces, which clips do not have",
    not_generated="it needs videos of a pose and a face: run its own pipeline inside of merope.cameras",
)
