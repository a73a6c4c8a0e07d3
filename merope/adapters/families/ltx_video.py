"""LTX-Video: latents arrive as packed tokens, their grid beside them. Eight RGB frames per latent frame."""

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor, zeros

from merope.adapters.families.facts import Family
from merope.adapters.families.text_rows import masked_rows, text_and_mask
from merope.errors import invalid

GRID = ("num_frames", "height", "width")
"""Arguments of the forward: token frames, rows and columns."""

RATE_HZ = 25
"""Frames per second that its pipelines assume, unless they are told another."""

TEXT_TOKENS = 128


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

    def latent_statistics(self, vae: Any) -> tuple[Any, Any]:
        return vae.latents_mean, vae.latents_std / vae.config.scaling_factor


class LTXVideoFamily(PackedFamily):
    """One autoencoder and one text encoder, whose padding is masked."""

    def decoded(self, vae: Any, latents: Tensor) -> Tensor:  # [B, C, T, h, w] -> [B, 3, frames, H, W]
        """Decoders that denoise are told that nothing is left to be denoised."""
        time = latents.new_zeros(len(latents)) if vae.config.timestep_conditioning else None
        return vae.decode(latents, time, return_dict=False)[0]

    def text(self, pipeline: Any, caption: str) -> Tensor:  # [L, D + 1]
        embeddings, mask, *_ = pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS
        )
        return masked_rows(embeddings[0], mask[0], embeddings.shape[-1])

    def no_text(self, config: Mapping[str, Any]) -> Tensor:  # [L, D + 1]
        return zeros(1, config["caption_channels"] + 1)

    def text_inputs(self, config: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:  # [B, L, D + 1]
        text, mask = text_and_mask(rows, config["caption_channels"])
        return {"encoder_hidden_states": text, "encoder_attention_mask": mask}

    def video_inputs(self, config: Mapping[str, Any], latents: Tensor, times: Tensor, pixels: int) -> dict[str, Any]:
        grid = dict(zip(GRID, latents.shape[2:], strict=True))
        scale = (self.latent_stride / RATE_HZ, pixels, pixels)
        others = super().video_inputs(config, latents, times, pixels)
        return {**others, "hidden_states": latents.flatten(2).mT, **grid, "rope_interpolation_scale": scale}


LTX_VIDEO = LTXVideoFamily(
    transformer="LTXVideoTransformer3DModel",
    models="LTX-Video",
    latent_stride=8,
    doubles_batch=True,
    timesteps="token",
    pipeline="LTXPipeline",  # others give places of tokens, not the grid
)
