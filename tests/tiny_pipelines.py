"""Tiny random pipelines with every real component: text encoder, tokenizer, VAE, transformer, scheduler."""

from typing import Any

import torch
from adapters.wan_models import perturb, tiny_config, tiny_wan
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from scenes import curved_drive, straight_drive
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from merope.adapters.attachment import attach
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole

HEIGHT, WIDTH = 32, 64  # one row of two tokens with TI2V's strides
LENS = Pinhole(50.0, 50.0, WIDTH / 2, HEIGHT / 2, WIDTH, HEIGHT)
SIZE = {"height": HEIGHT, "width": WIDTH}
SHORT = {**SIZE, "num_frames": 13, "num_inference_steps": 2}
WORDS = ["<pad>", "</s>", "<unk>", "a", "street", "at", "night", "rain"]


def tiny_text() -> tuple[PreTrainedTokenizerFast, UMT5EncoderModel]:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    torch.manual_seed(5)
    config = UMT5Config(vocab_size=len(WORDS), d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return tokenizer, UMT5EncoderModel(config).eval()


def tiny_vae(seed: int = 6, **changes: Any) -> AutoencoderKLWan:
    """TI2V-5B's strides: 16 pixels, 4 frames."""
    torch.manual_seed(seed)
    sizes = {
        "base_dim": 3,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "scale_factor_temporal": 4,
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [0.5, 0.6, 0.7, 0.8],
    }
    return AutoencoderKLWan(**sizes | changes).eval()


def miniature_vae() -> AutoencoderKLWan:
    """The miniature's strides: 8 pixels, 4 frames."""
    layers = {"dim_mult": [1, 2, 2], "temperal_downsample": [True, True], "is_residual": False, "base_dim": 4}
    return tiny_vae(2, **layers, scale_factor_spatial=8)


def tiny_pipeline(with_branch: bool = True, with_text: bool = True, **changes: Any) -> CameraVideoPipeline:
    """TI2V-5B in small; its branch is perturbed so that cameras matter."""
    tokenizer, text_encoder = tiny_text() if with_text else (None, None)
    transformer = tiny_wan(num_layers=2)
    if with_branch:
        perturb(attach(transformer, tiny_config()))
    components = {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "vae": tiny_vae(),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=5.0
        ),
        "transformer": transformer,
        "expand_timesteps": True,
    }
    return quiet(CameraVideoPipeline(**{**components, **changes}))


def pixel_pipeline(with_branch: bool = True) -> CameraVideoPipeline:
    """A model of RGB frames: no VAE, no text."""
    transformer = tiny_wan(num_layers=2, in_channels=3, out_channels=3)
    if with_branch:
        perturb(attach(transformer, tiny_config()))
    return quiet(CameraVideoPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(shift=3.0), transformer))


def quiet(pipeline: CameraVideoPipeline) -> CameraVideoPipeline:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def drive(count: int, bend: bool = False) -> Cameras:
    """One camera per RGB frame."""
    return Cameras(curved_drive(count, step_m=0.4) if bend else straight_drive(count, step_m=0.4), LENS)


def video(count: int, height: int = HEIGHT, width: int = WIDTH, seed: int = 0) -> Tensor:  # uint8 [T, H, W, 3]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8, generator=generator)


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def euler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def latents_of(pipe: CameraVideoPipeline, *args: Any, **options: Any) -> Tensor:  # [B, C, T, h, w]
    return pipe(*args, **{**SHORT, "generator": dice(), "output_type": "latent", **options}).frames
