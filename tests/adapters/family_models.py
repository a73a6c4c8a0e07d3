"""Tiny random models of the real classes, one or two of every family, with three frames of 2 × 3 tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from adapters.wan_models import TINY
from torch import Tensor, nn

from merope.geometry.cameras import Cameras

FRAMES, ROWS, COLUMNS = 3, 2, 3
TEXT = 5  # tokens
HEADS = {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2}
WAN_LIKE = {**TINY, "num_layers": 2}
HUNYUAN = {**HEADS, "in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "mlp_ratio": 1.0}
COG = {**HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 8}
COG_SIZE = {"sample_width": 6, "sample_height": 4, "sample_frames": 9, "max_text_seq_length": TEXT}
MOTION = {"motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16}
FACE = {"face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2}

Inputs = dict[str, Any]
Noise = Callable[..., Tensor]


@dataclass(frozen=True)
class FamilyCase:
    """A model of a family, the arguments of its forward for a batch, and where joint text comes out of a block."""

    kind: str  # name of the class
    config: dict[str, Any]
    inputs: Callable[[int, Noise], Inputs]
    has_joint_text: bool = False
    batch_error: float = 1e-5  # between a sample in a batch and alone

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """In half precision as `from_pretrained(torch_dtype=…)` leaves it: some modules stay in float32."""
        torch.manual_seed(0)
        transformer = getattr(diffusers, self.kind)(**self.config).eval()
        noise = torch.Generator().manual_seed(3)
        for name, parameter in transformer.named_parameters():
            if not bool(parameter.any()):  # gates that start at zero would hide the branch
                nn.init.normal_(parameter, std=0.3, generator=noise)
            if not any(kept in name for kept in transformer._keep_in_fp32_modules or ()):
                parameter.data = parameter.data.to(dtype)
        return transformer

    def arguments(self, batch: int = 2, dtype: torch.dtype = torch.float32) -> Inputs:
        """Keyword arguments of a forward, all but the cameras."""
        generator = torch.Generator().manual_seed(1)
        return self.inputs(batch, lambda *shape: torch.randn(batch, *shape, generator=generator).to(dtype))


def output(transformer: Any, inputs: Inputs, cameras: Cameras | None = None) -> Tensor:
    """The predicted video, with cameras in attention_kwargs where given."""
    given = {} if cameras is None else {"attention_kwargs": {"cameras": cameras}}
    out = transformer(**inputs, **given, return_dict=False)
    return out[0] if isinstance(out, tuple) else out


def sample_of(inputs: Inputs, index: int, batch: int = 2) -> Inputs:
    """The arguments of one sample of a batch."""
    return {
        name: value[index : index + 1] if isinstance(value, Tensor) and len(value) == batch else value
        for name, value in inputs.items()
    }


def wan_like(batch: int, noise: Noise, channels: int = 4, frames: int = FRAMES, **others: Any) -> Inputs:
    latents, text = noise(channels, frames, 2 * ROWS, 2 * COLUMNS), noise(TEXT, 8)
    return {"hidden_states": latents, "timestep": torch.full((batch,), 500), "encoder_hidden_states": text, **others}


def wan_vace(batch: int, noise: Noise) -> Inputs:
    return wan_like(batch, noise, control_hidden_states=noise(6, FRAMES, 2 * ROWS, 2 * COLUMNS))


def wan_animate(batch: int, noise: Noise) -> Inputs:
    """The first of its frames is a picture; five RGB frames of a face make the other two."""
    pose = noise(4, FRAMES - 1, 2 * ROWS, 2 * COLUMNS)
    return wan_like(batch, noise, 12, pose_hidden_states=pose, face_pixel_values=noise(3, 5, 16, 16))


def packed(batch: int, noise: Noise) -> Inputs:
    return {
        "hidden_states": noise(FRAMES * ROWS * COLUMNS, 4),
        "encoder_hidden_states": noise(TEXT, 8),
        "timestep": torch.full((batch,), 500.0),
        "encoder_attention_mask": torch.ones(batch, TEXT),
        "num_frames": FRAMES,
        "height": ROWS,
        "width": COLUMNS,
    }


def ltx2(batch: int, noise: Noise) -> Inputs:
    audio = {"audio_hidden_states": noise(4, 4), "audio_encoder_hidden_states": noise(TEXT, 8), "audio_num_frames": 4}
    perturbed = {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": 0.5 + 0 * noise()}
    return {**packed(batch, noise), **audio, **perturbed, "audio_timestep": torch.full((batch,), 500.0)}


def hunyuan(batch: int, noise: Noise) -> Inputs:
    mask = torch.ones(batch, TEXT)
    mask[:, -2:] = 0
    others = {"encoder_attention_mask": mask, "pooled_projections": noise(6), "guidance": torch.full((batch,), 6.0)}
    return wan_like(batch, noise, **others)


def hunyuan_15(batch: int, noise: Noise) -> Inputs:
    mask = torch.ones(batch, TEXT)
    mask[:, -2:] = 0
    return {
        "hidden_states": noise(4, FRAMES, ROWS, COLUMNS),
        "timestep": 500 + 0 * noise(),
        "encoder_hidden_states": noise(TEXT, 8),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": noise(3, 8),
        "encoder_attention_mask_2": torch.ones(batch, 3),
        "image_embeds": 0 * noise(2, 8),
    }


def cogvideox(batch: int, noise: Noise) -> Inputs:
    latents, text = noise(FRAMES, 4, 2 * ROWS, 2 * COLUMNS), noise(TEXT, 8)
    return {"hidden_states": latents, "encoder_hidden_states": text, "timestep": torch.full((batch,), 500)}


def cogvideox_15(batch: int, noise: Noise) -> Inputs:
    """Two latent frames in a token, and the rotary embedding that the pipeline makes."""
    phases = torch.linspace(0, 3, FRAMES * ROWS * COLUMNS * 16).reshape(-1, 16)
    inputs = {**cogvideox(batch, noise), "hidden_states": noise(2 * FRAMES, 4, 2 * ROWS, 2 * COLUMNS)}
    return {**inputs, "image_rotary_emb": (phases.cos(), phases.sin())}


def cosmos(batch: int, noise: Noise) -> Inputs:
    return wan_like(batch, noise, fps=24)


def kandinsky5(batch: int, noise: Noise) -> Inputs:
    return {
        "hidden_states": noise(FRAMES, 2 * ROWS, 2 * COLUMNS, 4),
        "encoder_hidden_states": noise(TEXT, 8),
        "timestep": torch.full((batch,), 500.0),
        "pooled_projections": noise(6),
        "visual_rope_pos": [torch.arange(size) for size in (FRAMES, ROWS, COLUMNS)],
        "text_rope_pos": torch.arange(TEXT),
    }


CASES = {
    "wan": FamilyCase("WanTransformer3DModel", WAN_LIKE, wan_like),
    "wan_vace": FamilyCase(
        "WanVACETransformer3DModel", {**WAN_LIKE, "vace_layers": [0], "vace_in_channels": 6}, wan_vace
    ),
    "wan_animate": FamilyCase(
        "WanAnimateTransformer3DModel",
        {
            **WAN_LIKE,
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": None,
            **MOTION,
            **FACE,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        },
        wan_animate,
    ),
    "skyreels": FamilyCase("SkyReelsV2Transformer3DModel", WAN_LIKE, wan_like),
    "ltx_video": FamilyCase(
        "LTXVideoTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 48, "caption_channels": 8},
        packed,
    ),
    "ltx2": FamilyCase(
        "LTX2VideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 48,
            "caption_channels": 8,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 12,
            "audio_cross_attention_dim": 24,
            "perturbed_attn": True,
        },
        ltx2,
    ),
    "hunyuan_video": FamilyCase(
        "HunyuanVideoTransformer3DModel",
        {
            **HUNYUAN,
            "num_single_layers": 1,
            "text_embed_dim": 8,
            "pooled_projection_dim": 6,
            "rope_axes_dim": (8, 8, 8),
        },
        hunyuan,
        has_joint_text=True,
    ),
    "hunyuan_video_15": FamilyCase(
        "HunyuanVideo15Transformer3DModel",
        {
            **HUNYUAN,
            "text_embed_dim": 8,
            "text_embed_2_dim": 8,
            "image_embed_dim": 8,
            "rope_axes_dim": (8, 8, 8),
        },
        hunyuan_15,
        has_joint_text=True,
    ),
    "cogvideox": FamilyCase("CogVideoXTransformer3DModel", {**COG, **COG_SIZE}, cogvideox, has_joint_text=True),
    "cogvideox_15": FamilyCase(
        "CogVideoXTransformer3DModel",
        {
            **COG,
            **COG_SIZE,
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "patch_size_t": 2,
            "use_rotary_positional_embeddings": True,
            "patch_bias": False,
        },
        cogvideox_15,
        has_joint_text=True,
    ),
    "cosmos": FamilyCase(
        "CosmosTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "mlp_ratio": 1.0,
            "text_embed_dim": 8,
            "adaln_lora_dim": 4,
            "max_size": (4, 8, 8),
            "concat_padding_mask": False,
        },
        cosmos,
    ),
    "kandinsky5": FamilyCase(
        "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "in_text_dim": 8,
            "in_text_dim2": 6,
            "time_dim": 8,
            "model_dim": 48,
            "ff_dim": 32,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (8, 8, 8),
        },
        kandinsky5,
        batch_error=2e-2,  # its rotary embedding rounds to bfloat16, whatever the precision
    ),
}
