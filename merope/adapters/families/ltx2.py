"""LTX-2: video and audio side by side. The branch stands beside the self-attention of the video."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from merope.adapters.families.ltx_video import PackedFamily
from merope.errors import invalid


class LTX2Family(PackedFamily):
    """Packed tokens, and a mask that some pipelines put into self-attention."""

    def video(self, arguments: Mapping[str, Any]) -> Tensor:  # [B, channels, T, H, W]
        """The tokens on their grid."""
        if arguments.get("video_self_attention_mask") is not None:
            fix = "use a pipeline without one: the branch would see through it"
            raise invalid("video_self_attention_mask", "None with a camera branch", "a mask", fix)
        return super().video(arguments)

    def with_clean_frames(
        self, config: Mapping[str, Any], arguments: Mapping[str, Any], clean: Tensor
    ) -> dict[str, Any]:
        """Sound keeps the time of the whole; by default it would have that of the video."""
        given = arguments.get("audio_timestep")
        sound = arguments["timestep"] if given is None else given
        return {**super().with_clean_frames(config, arguments, clean), "audio_timestep": sound}


LTX2 = LTX2Family(
    transformer="LTX2VideoTransformer3DModel",
    models="LTX-2",
    latent_stride=8,
    doubles_batch=True,
    timesteps="token",
    pipeline="LTX2Pipeline",  # a clean prefix stands for the image of others
    not_trained="it learns video together with its sound, which clips do not have",
)
