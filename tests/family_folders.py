"""Tiny models of several families as folders, with every component of their pipelines: text encoders as well."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from adapters.family_pipelines import cogvideox, hunyuan_video_15, ltx_video, model, unipc, wan_vae
from tiny_pipelines import tiny_text
from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

CROPPED = 108
"""Tokens before a prompt that HunyuanVideo-1.5 drops."""


def tiny_t5(words: int = 8) -> T5EncoderModel:
    torch.manual_seed(3)
    return T5EncoderModel(T5Config(vocab_size=words, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)).eval()


def with_text(pipe: Any, **others: Any) -> Any:
    """One T5 and its tokenizer, as LTX-Video and CogVideoX have them."""
    pipe.register_modules(tokenizer=tiny_text()[0], text_encoder=tiny_t5(), **others)
    return pipe


def v_prediction() -> diffusers.CogVideoXDDIMScheduler:
    """As in CogVideoX's folders."""
    return diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)


def a14b() -> Any:
    """Two experts, which part at 0.5."""
    tokenizer, text_encoder = tiny_text()
    experts = model("wan"), model("wan")
    torch.nn.init.normal_(experts[1].proj_out.weight, std=0.3, generator=torch.Generator().manual_seed(9))
    return diffusers.WanPipeline(tokenizer, text_encoder, wan_vae(), unipc(), *experts, boundary_ratio=0.5)


def ltx() -> Any:
    return with_text(ltx_video()[0])


def cog() -> Any:
    return with_text(cogvideox()[0], scheduler=v_prediction())


def cog_15() -> Any:
    """The largest pictures that it knows are of 2 × 4 tokens."""
    return with_text(cogvideox()[0], scheduler=v_prediction(), transformer=model("cogvideox_15", sample_width=8))


def hunyuan_15() -> Any:
    """A language model and a speller."""
    pipe = hunyuan_video_15()[0]
    torch.manual_seed(4)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10_000.0}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen2_5_VLTextConfig(vocab_size=16, num_hidden_layers=3, rope_parameters=rope, **sizes, **ids)
    tokenizer, _ = tiny_text()
    tokenizer.chat_template = "rain " * CROPPED + "{{ messages[-1]['content'] }}"
    speller = {"text_encoder_2": tiny_t5(384), "tokenizer_2": ByT5Tokenizer()}
    pipe.register_modules(text_encoder=Qwen2_5_VLTextModel(config).eval(), tokenizer=tokenizer, **speller)
    return pipe


FOLDERS = {build.__name__: build for build in (a14b, ltx, hunyuan_15, cog, cog_15)}


def write_folder(root: Path, name: str) -> Path:
    """The folder of a tiny model."""
    torch.manual_seed(0)
    FOLDERS[name]().save_pretrained(root / name)
    return root / name
