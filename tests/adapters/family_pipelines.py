"""diffusers' own pipelines around the tiny models, with tiny random components; text comes as embeddings.

Every pipeline makes three frames of 2 × 3 tokens in two steps, with guidance where it has any.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import torch
from adapters.family_models import CASES, TEXT
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from PIL import Image
from tiny_pipelines import tiny_vae
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

Pipeline = tuple[Any, dict[str, Any]]  # and the arguments of a call


def embeds(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))


SIZE = {"height": 32, "width": 48, "num_frames": 9}
PROMPT = {"prompt_embeds": embeds(TEXT, 8), "negative_prompt_embeds": embeds(TEXT, 8, seed=1)}
MASKS = {"prompt_attention_mask": torch.ones(1, TEXT), "negative_prompt_attention_mask": torch.ones(1, TEXT)}


def model(name: str, **changes: Any) -> Any:
    case = CASES[name]
    return replace(case, config={**case.config, **changes}).model()


def wan_vae() -> diffusers.AutoencoderKLWan:
    """Of Wan2.1: 8 pixels, 4 frames."""
    return tiny_vae(patch_size=None, in_channels=3, out_channels=3, is_residual=False, scale_factor_spatial=8)


def hunyuan_vae() -> diffusers.AutoencoderKLHunyuanVideo:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    ).eval()


def unipc() -> diffusers.UniPCMultistepScheduler:
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)


def flow() -> diffusers.FlowMatchEulerDiscreteScheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


def wan() -> Pipeline:
    return diffusers.WanPipeline(None, None, wan_vae(), unipc(), model("wan")), {**SIZE, **PROMPT}


def wan_vace() -> Pipeline:
    """Its control has the channels of two latents and of the 8 × 8 masks of a latent pixel."""
    transformer = model("wan_vace", vace_in_channels=2 * 4 + 64)
    return diffusers.WanVACEPipeline(None, None, wan_vae(), unipc(), transformer), {**SIZE, **PROMPT}


def wan_animate() -> Pipeline:
    """One picture and five RGB frames are three frames of tokens. It wants 512 tokens of text."""
    transformer = model("wan_animate", image_dim=8, added_kv_proj_dim=48)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(7)
    encoder = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=4, patch_size=2)).eval()
    images = CLIPImageProcessor(size=4, crop_size=4)
    pipe = diffusers.WanAnimatePipeline(None, None, wan_vae(), unipc(), images, encoder, transformer)
    frame, face = Image.new("RGB", (48, 32), (40, 90, 160)), Image.new("RGB", (16, 16), (200, 120, 90))
    videos = {"image": frame, "pose_video": [frame] * 5, "face_video": [face] * 5, "segment_frame_length": 5}
    return pipe, {
        **videos,
        "height": 32,
        "width": 48,
        "prompt_embeds": embeds(512, 8),
    }


def skyreels() -> Pipeline:
    return diffusers.SkyReelsV2Pipeline(None, None, model("skyreels"), wan_vae(), unipc()), {**SIZE, **PROMPT}


def ltx_video() -> Pipeline:
    """8 frames and 16 pixels per token."""
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(4, 4, 4, 4),
        decoder_block_out_channels=(4, 4, 4, 4),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        patch_size=2,
    ).eval()
    pipe = diffusers.LTXPipeline(flow(), vae, None, None, model("ltx_video"))
    return pipe, {"height": 32, "width": 96, "num_frames": 17, **PROMPT, **MASKS}


def ltx2() -> Pipeline:
    """8 frames and 16 pixels per token; passes with perturbed attention and with video alone, beside guidance."""
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        patch_size=2,
        spatial_compression_ratio=16,
        temporal_compression_ratio=8,
    ).eval()
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1, 1, 1), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8
    ).eval()
    connectors = LTX2TextConnectors(
        caption_channels=8,
        text_proj_in_factor=2,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=4,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=4,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
    ).eval()
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=8,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1]],
    ).eval()
    pipe = diffusers.LTX2Pipeline(flow(), vae, audio_vae, None, None, connectors, model("ltx2"), vocoder)
    text = {"prompt_embeds": embeds(TEXT, 16), "negative_prompt_embeds": embeds(TEXT, 16, seed=1), **MASKS}
    return pipe, {"height": 32, "width": 96, "num_frames": 17, **text, "spatio_temporal_guidance_blocks": [1]}


def hunyuan_video_15() -> Pipeline:
    """16 pixels per token; latents come with those of an image and its mask."""
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(4, 8, 16, 32, 32), layers_per_block=1
    ).eval()
    text = {
        **PROMPT,
        "prompt_embeds_2": embeds(3, 8),
        "negative_prompt_embeds_2": embeds(3, 8, seed=1),
        "prompt_embeds_mask": torch.ones(1, TEXT),
        "negative_prompt_embeds_mask": torch.ones(1, TEXT),
        "prompt_embeds_mask_2": torch.ones(1, 3),
        "negative_prompt_embeds_mask_2": torch.ones(1, 3),
    }
    guider = diffusers.ClassifierFreeGuidance(guidance_scale=3.0)
    transformer = model("hunyuan_video_15", in_channels=2 * 4 + 1)
    pipe = diffusers.HunyuanVideo15Pipeline(None, None, transformer, vae, flow(), None, None, guider)
    return pipe, {**SIZE, **text}


def hunyuan_video() -> Pipeline:
    pipe = diffusers.HunyuanVideoPipeline(None, None, model("hunyuan_video"), hunyuan_vae(), flow(), None, None)
    pooled = {"pooled_prompt_embeds": embeds(6), "negative_pooled_prompt_embeds": embeds(6, seed=1)}
    return pipe, {**SIZE, **PROMPT, **MASKS, **pooled, "true_cfg_scale": 3.0}


def cogvideox() -> Pipeline:
    vae = diffusers.AutoencoderKLCogVideoX(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    ).eval()
    scheduler = diffusers.CogVideoXDDIMScheduler()
    return diffusers.CogVideoXPipeline(None, None, vae, model("cogvideox"), scheduler), {**SIZE, **PROMPT}


def cogvideox_15() -> Pipeline:
    """17 RGB frames are 5 latent ones; the pipeline makes 6 of these, 3 frames of tokens, and drops the first."""
    pipe, call = cogvideox()
    pipe.register_modules(transformer=model("cogvideox_15"))
    return pipe, {**call, "num_frames": 17}


class NoGuardrail(ModelMixin, ConfigMixin):
    """In the place of a safety checker of another package."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def cosmos() -> Pipeline:
    """Predict 1, whose VAE has 8 frames."""
    vae = diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
    ).eval()
    scheduler = diffusers.EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras", final_sigmas_type="sigma_min"
    )
    pipe = diffusers.CosmosTextToWorldPipeline(None, None, model("cosmos"), vae, scheduler, NoGuardrail())
    return pipe, {**SIZE, **PROMPT, "num_frames": 17}


def kandinsky5() -> Pipeline:
    pipe = diffusers.Kandinsky5T2VPipeline(model("kandinsky5"), hunyuan_vae(), None, None, None, None, flow())
    lengths = {"prompt_cu_seqlens": torch.tensor([0, TEXT]), "negative_prompt_cu_seqlens": torch.tensor([0, TEXT])}
    text = {"prompt_embeds_qwen": embeds(TEXT, 8), "negative_prompt_embeds_qwen": embeds(TEXT, 8, seed=1)}
    pooled = {"prompt_embeds_clip": embeds(6), "negative_prompt_embeds_clip": embeds(6, seed=1)}
    return pipe, {**SIZE, **lengths, **text, **pooled}


PIPELINES: dict[str, Callable[[], Pipeline]] = {
    build.__name__: build
    for build in (
        *(wan, wan_vace, wan_animate, skyreels, ltx_video, ltx2, hunyuan_video, hunyuan_video_15),
        *(cogvideox, cogvideox_15, cosmos, kandinsky5),
    )
}
