"""CogVideoX 1.0 and 1.5: joint attention, text before the video; frames come before channels.

The rotary embedding is an argument of the forward, and 2B has none. A token of 1.5 spans two latent frames.
"""

from collections.abc import Mapping
from typing import Any

from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from torch import Tensor, zeros

from merope.adapters.families.facts import Family
from merope.adapters.families.noise import VPrediction
from merope.errors import invalid

PIXELS = 8
"""Per latent one."""


class CogVideoXFamily(Family):
    """Frames before channels."""

    def video(self, arguments: Mapping[str, Any]) -> Tensor:  # [B, channels, T, H, W]
        """The latents, channels first."""
        return arguments["hidden_states"].transpose(1, 2)  # which are [B, T, channels, H, W]

    def check_clip(self, config: Mapping[str, Any], frames: int, size: tuple[int, int]) -> None:
        """Learned positions (5B image to video, 1.0) are those of one size and length."""
        if not config["use_learned_positional_embeddings"]:
            return
        learned = (config["sample_frames"], (config["sample_height"], config["sample_width"]))
        if (frames, size) != learned:
            expected = (
                f"of {learned[0]} frames and {learned[1]} latent rows and columns, whose positions it has learned"
            )
            fix = f"pass --frames {learned[0]} --size {PIXELS * learned[1][0]} {PIXELS * learned[1][1]}"
            raise invalid("the clip", expected, f"{frames} frames and {size}", fix)

    def vae_strides(self, vae: Any) -> tuple[int, int]:
        return int(vae.config.temporal_compression_ratio), 2 ** (len(vae.config.block_out_channels) - 1)

    def noising(self, scheduler: Any) -> VPrediction:
        """As its scheduler has it; all models of the family predict v."""
        if scheduler.config.prediction_type != "v_prediction":
            fix = "use the scheduler of the model's folder"
            raise invalid("scheduler.prediction_type", '"v_prediction"', scheduler.config.prediction_type, fix)
        return VPrediction(scheduler.alphas_cumprod)

    def text(self, pipeline: Any, caption: str) -> Tensor:  # [L, D]
        length = pipeline.transformer.config.max_text_seq_length
        embeddings, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=length)
        return embeddings[0]

    def no_text(self, config: Mapping[str, Any]) -> Tensor:  # [L, D]
        """Its positions count the rows of text."""
        return zeros(config["max_text_seq_length"], config["text_embed_dim"])

    def video_inputs(self, config: Mapping[str, Any], latents: Tensor, times: Tensor, pixels: int) -> dict[str, Any]:
        _, _, frames, height, width = latents.shape
        size = config["patch_size"]
        rotary = rotary_embedding(config, frames, (height // size, width // size), latents)
        return {"hidden_states": latents.transpose(1, 2), "timestep": times, "image_rotary_emb": rotary}


def rotary_embedding(
    config: Mapping[str, Any], frames: int, grid: tuple[int, int], latents: Tensor
) -> Any:  # (cosines, sines) [tokens, head_dim], or None
    """As the family's pipelines make it: 1.0 scales its grid to the one it was trained with, 1.5 cuts from it."""
    if not config["use_rotary_positional_embeddings"]:
        return None
    trained = (config["sample_height"] // config["patch_size"], config["sample_width"] // config["patch_size"])
    common = {"embed_dim": config["attention_head_dim"], "grid_size": grid, "device": latents.device}
    if config["patch_size_t"] is None:
        crops = get_resize_crop_region_for_grid(grid, trained[1], trained[0])
        return get_3d_rotary_pos_embed(**common, crops_coords=crops, temporal_size=frames)
    tokens = frames // config["patch_size_t"]
    return get_3d_rotary_pos_embed(
        **common, crops_coords=None, temporal_size=tokens, grid_type="slice", max_size=trained
    )


COGVIDEOX = CogVideoXFamily(
    transformer="CogVideoXTransformer3DModel",
    models="CogVideoX 1.0 and 1.5",
    argument="image_rotary_emb",
    doubles_batch=True,
    text_first=True,
    compiles_blocks=False,
    casts_latents=False,
)
