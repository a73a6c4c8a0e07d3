"""WanVACE: Wan's blocks beside a stack of control blocks, which see no cameras."""

from merope.adapters.families.wan_clips import WanClips

WAN_VACE = WanClips(
    transformer="WanVACETransformer3DModel",
    models="Wan2.1 VACE",
    blocks="blocks",
    recorded=("in_channels", "out_channels", "ffn_dim", "text_dim"),
    branches_of=("WanTransformer3DModel",),
    not_trained="it learns from control videos, which clips do not have: train a branch on Wan2.1 of the same size",
)
