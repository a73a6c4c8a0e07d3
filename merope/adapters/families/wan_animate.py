"""Wan2.2 Animate: Wan's blocks, with adapters for a face between them. Its first frame of tokens is a picture."""

from merope.adapters.families.facts import Family

WAN_ANIMATE = Family(
    transformer="WanAnimateTransformer3DModel",
    models="Wan2.2 Animate",
    blocks="blocks",
    recorded=("in_channels", "out_channels", "ffn_dim", "text_dim"),
)
