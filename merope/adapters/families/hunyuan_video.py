"""HunyuanVideo and HunyuanVideo-1.5: joint attention, text after the video, each in a stream of its own.

HunyuanVideo's later blocks, of one stream, have no branch: their output layer mixes attention with the feed-forward.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from torch import Tensor

from merope.adapters.families.facts import Family
from merope.adapters.families.text_rows import masked_rows, one_empty_row, text_and_mask
from merope.errors import invalid

GUIDANCE = 6.0
"""That models of embedded guidance are told while they learn; the default of their pipeline."""

EARLIER_IMAGES = "latent_concat"
"""How the first models of images are given theirs."""

GLYPH_ROWS = 256
"""Of the second text of 1.5, which spells what is written in quotation marks."""

IMAGE_ROWS = 729
"""Of an image of 1.5; a model of text alone has as many zeros."""


class HunyuanVideoFamily(Family):
    """Text of one encoder with a mask, and one vector of another."""

    def text(self, pipeline: Any, caption: str) -> Tensor:  # [L + 1, D + 1]
        """The vector is the last row."""
        embeddings, pooled, mask = pipeline.encode_prompt(caption)
        width = max(embeddings.shape[-1], pooled.shape[-1])
        vector = masked_rows(pooled[:1], mask.new_ones(1), width)
        return torch.cat((masked_rows(embeddings[0], mask[0], width), vector.to(embeddings)))

    def no_text(self, config: Mapping[str, Any]) -> Tensor:  # [L + 1, D + 1]
        return one_empty_row(torch.zeros(2, max(config["text_embed_dim"], config["pooled_projection_dim"]) + 1))

    def text_inputs(self, config: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:  # [B, L + 1, D + 1]
        text, mask = text_and_mask(rows[:, :-1], config["text_embed_dim"])
        pooled = rows[:, -1, : config["pooled_projection_dim"]]
        return {"encoder_hidden_states": text, "encoder_attention_mask": mask, "pooled_projections": pooled}

    def check_clip(self, config: Mapping[str, Any], frames: int, size: tuple[int, int]) -> None:
        """The first models of images make four frames that their pipeline cuts off: cameras would come too early."""
        if config["image_condition_type"] == EARLIER_IMAGES:
            fix = 'use a later one ("token_replace"), or run its own pipeline inside of merope.cameras'
            expected = "a model whose pipeline returns the first four frames, too"
            raise invalid("transformer.image_condition_type", expected, f'"{EARLIER_IMAGES}"', fix)

    def guided(self, pipe: Any, scale: float) -> dict[str, Any]:
        """By a second pass; `guidance_scale` is an input of the transformer."""
        return {"true_cfg_scale": scale}

    def timed(self, config: Mapping[str, Any], times: Tensor) -> dict[str, Any]:
        guidance = torch.full_like(times, 1000 * GUIDANCE) if config["guidance_embeds"] else None
        return {"timestep": times, "guidance": guidance}


class HunyuanVideo15Family(Family):
    """Two texts with masks. Latents come with those of an image and a mask of it, zeros without one."""

    def made_size(self, config: Mapping[str, Any], pixels: int, height: int, width: int) -> tuple[int, int]:
        """The nearest shape of about as many pixels as the model was trained with."""
        sizes = HunyuanVideo15ImageProcessor(vae_scale_factor=pixels)
        return sizes.calculate_default_height_width(height, width, config["target_size"])

    def guided(self, pipe: Any, scale: float) -> dict[str, Any]:
        """Its guidance is a component of the pipeline."""
        pipe.guider = pipe.guider.new(guidance_scale=scale)
        return {}

    def text(self, pipeline: Any, caption: str) -> Tensor:  # [L, D + 1]
        """The second text stands below the first."""
        first, mask, second, second_mask = pipeline.encode_prompt(caption)
        width = max(first.shape[-1], second.shape[-1])
        return torch.cat((masked_rows(first[0], mask[0], width), masked_rows(second[0], second_mask[0], width)))

    def no_text(self, config: Mapping[str, Any]) -> Tensor:  # [L, D + 1]
        width = max(config["text_embed_dim"], config["text_embed_2_dim"]) + 1
        return one_empty_row(torch.zeros(1 + GLYPH_ROWS, width))

    def text_inputs(self, config: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:  # [B, L, D + 1]
        text, mask = text_and_mask(rows[:, :-GLYPH_ROWS], config["text_embed_dim"])
        glyphs, glyph_mask = text_and_mask(rows[:, -GLYPH_ROWS:], config["text_embed_2_dim"])
        return {
            "encoder_hidden_states": text,
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": glyphs,
            "encoder_attention_mask_2": glyph_mask,
            "image_embeds": rows.new_zeros(len(rows), IMAGE_ROWS, config["image_embed_dim"]),
        }

    def video_inputs(self, config: Mapping[str, Any], latents: Tensor, times: Tensor, pixels: int) -> dict[str, Any]:
        no_image = torch.zeros_like(torch.cat((latents, latents[:, :1]), dim=1))
        return super().video_inputs(config, torch.cat((latents, no_image), dim=1), times, pixels)

    def image_channels(self, config: Mapping[str, Any]) -> int:
        """All its models have these, also those of text, to which they are zeros."""
        return 0


HUNYUAN_VIDEO = HunyuanVideoFamily(
    transformer="HunyuanVideoTransformer3DModel", models="HunyuanVideo", attention="attn"
)
HUNYUAN_VIDEO_15 = HunyuanVideo15Family(
    transformer="HunyuanVideo15Transformer3DModel", models="HunyuanVideo-1.5", attention="attn"
)
