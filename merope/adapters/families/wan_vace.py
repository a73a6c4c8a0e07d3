"""WanVACE: Wan's blocks beside a stack of control blocks, which see no cameras."""

from merope.adapters.families.facts import Family

WAN_VACE = Family(
    transformer="WanVACETransformer3DModel",
    models="Wan2.1 VACE",
    blocks="blocks",
    recorded=("in_channels", "out_channels", "ffn_dim", "text_dim"),
)
