"""Tiny models of every family as folders, with every component of their pipelines: text encoders as well."""

from pathlib import Path
from typing import Any

import diffusers
import torch
from adapters.family_pipelines import (
    PIPELINES,
    NoGuardrail,
    cogvideox,
    hunyuan_video,
    hunyuan_video_15,
    kandinsky5,
    ltx2,
    ltx_video,
    model,
    unipc,
    wan_vae,
)
from tiny_pipelines import tiny_text
from transformers import (
    ByT5Tokenizer,
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

CROPPED = 108
"""Tokens before a prompt that HunyuanVideo-1.5 drops."""

SMALL = {"height": 4, "width": 4}


def tiny_t5(words: int = 8) -> T5EncoderModel:
    torch.manual_seed(3)
    return T5EncoderModel(T5Config(vocab_size=words, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)).eval()


def tiny_language_model(layers: int = 1) -> Qwen2_5_VLTextModel:
    """Which gives one more hidden state than it has layers."""
    torch.manual_seed(4)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10_000.0}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen2_5_VLTextConfig(vocab_size=16, num_hidden_layers=layers, rope_parameters=rope, **sizes, **ids)
    return Qwen2_5_VLTextModel(config).eval()


def tiny_clip() -> CLIPTextModel:
    torch.manual_seed(8)
    sizes = {"hidden_size": 6, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(vocab_size=8, **sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0)).eval()


def with_text(pipe: Any, **others: Any) -> Any:
    """One T5 and its tokenizer, as LTX-Video and CogVideoX have them."""
    pipe.register_modules(tokenizer=tiny_text()[0], text_encoder=tiny_t5(), **others)
    return pipe


def with_two_texts(pipe: Any, layers: int) -> Any:
    """A language model, and CLIP for one vector."""
    texts = {"text_encoder": tiny_language_model(layers), "text_encoder_2": tiny_clip()}
    pipe.register_modules(**texts, tokenizer=tiny_text()[0], tokenizer_2=tiny_text()[0])
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
    """Its positions count the rows of text that pipelines give."""
    return with_text(cogvideox()[0], scheduler=v_prediction(), transformer=model("cogvideox", max_text_seq_length=226))


def cog_15() -> Any:
    """The largest pictures that it knows are of 2 × 4 tokens."""
    return with_text(cogvideox()[0], scheduler=v_prediction(), transformer=model("cogvideox_15", sample_width=8))


def hunyuan_15() -> Any:
    """A language model and a speller."""
    pipe = hunyuan_video_15()[0]
    tokenizer, _ = tiny_text()
    tokenizer.chat_template = "rain " * CROPPED + "{{ messages[-1]['content'] }}"
    speller = {"text_encoder_2": tiny_t5(384), "tokenizer_2": ByT5Tokenizer()}
    pipe.register_modules(text_encoder=tiny_language_model(3), tokenizer=tokenizer, **speller)
    return pipe


def hunyuan() -> Any:
    return with_two_texts(hunyuan_video()[0], layers=3)


def skyreels() -> Any:
    return with_text(PIPELINES["skyreels"]()[0])


def skyreels_df() -> Any:
    """Diffusion forcing: one noise level per frame."""
    tokenizer, text_encoder = tiny_text()
    transformer = model("skyreels", inject_sample_info=True)
    return diffusers.SkyReelsV2DiffusionForcingPipeline(tokenizer, text_encoder, transformer, wan_vae(), unipc())


def i2v() -> Any:
    """Wan's image to video, with the channels of the image and its mask."""
    tokenizer, text_encoder = tiny_text()
    transformer = model("wan", in_channels=12)
    return diffusers.WanImageToVideoPipeline(tokenizer, text_encoder, wan_vae(), unipc(), transformer=transformer)


def a14b_i2v() -> Any:
    """Two experts of images."""
    parts = {name: part for name, part in i2v().components.items() if part is not None}
    return diffusers.WanImageToVideoPipeline(**parts, transformer_2=model("wan", in_channels=12), boundary_ratio=0.5)


def tiny_eye(kind: Any, **changes: Any) -> Any:
    """An image encoder that sees four patches."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(kind.config_class(**sizes, image_size=4, patch_size=2, **changes)).eval()


def skyreels_i2v() -> Any:
    tokenizer, text_encoder = tiny_text()
    transformer = model("skyreels", in_channels=12, image_dim=8, added_kv_proj_dim=48)
    eye = tiny_eye(CLIPVisionModelWithProjection), CLIPImageProcessor(size=4, crop_size=4)
    return diffusers.SkyReelsV2ImageToVideoPipeline(tokenizer, text_encoder, *eye, transformer, wan_vae(), unipc())


def cog_i2v() -> Any:
    """Of 1.0: the positions of one size are learned."""
    sizes = {"sample_height": 4, "sample_width": 8, "max_text_seq_length": 226, "patch_size_t": None}
    learned = {"use_learned_positional_embeddings": True, "patch_bias": True}
    transformer = model("cogvideox_15", in_channels=8, **sizes, **learned)
    parts = tiny_text()[0], tiny_t5(), cogvideox()[0].vae, transformer, v_prediction()
    return diffusers.CogVideoXImageToVideoPipeline(*parts)


def hunyuan_i2v() -> Any:
    """Its language model sees the image, in 576 tokens."""
    tokenizer, _ = tiny_text()
    words = ["<image>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    torch.manual_seed(2)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    text = LlamaConfig(vocab_size=16, num_hidden_layers=3, num_key_value_heads=1, **sizes, **ids)
    eye = CLIPVisionConfig(image_size=48, patch_size=2, num_hidden_layers=2, **sizes)
    image = tokenizer.convert_tokens_to_ids("<image>")
    llava = LlavaConfig(text_config=text, vision_config=eye, image_token_index=image, pad_token_id=0)
    parts = {
        "text_encoder": LlavaForConditionalGeneration(llava).eval(),
        "tokenizer": tokenizer,
        "transformer": model("hunyuan_video", image_condition_type="token_replace"),
        "image_processor": CLIPImageProcessor(size=48, crop_size=48),
    }
    return diffusers.HunyuanVideoImageToVideoPipeline(**{**hunyuan().components, **parts})


def hunyuan_15_i2v() -> Any:
    """Its pipeline chooses among sizes with about as many pixels as a square of `target_size`."""
    parts = hunyuan_15().components
    transformer = model("hunyuan_video_15", in_channels=2 * 4 + 1, target_size=45)
    eye = {"image_encoder": tiny_eye(SiglipVisionModel), "feature_extractor": SiglipImageProcessor(size=SMALL)}
    return diffusers.HunyuanVideo15ImageToVideoPipeline(**{**parts, **eye, "transformer": transformer})


def kandinsky_i2v() -> Any:
    parts = {**kandinsky().components, "transformer": model("kandinsky5", visual_cond=True)}
    return diffusers.Kandinsky5I2VPipeline(**parts)


def vace() -> Any:
    return with_text(PIPELINES["wan_vace"]()[0])


def ltx_2() -> Any:
    """Text is all hidden states of a language model, here two. Guidance by skipped blocks has one to skip."""
    pipe = ltx2()[0]
    pipe.register_modules(text_encoder=tiny_language_model(1), tokenizer=tiny_text()[0])
    return pipe


def cosmos_1() -> Any:
    """Predict 1, of text."""
    return with_text(PIPELINES["cosmos"]()[0])


def cosmos_1_video() -> Any:
    """Predict 1, which goes on with frames that it is given."""
    parts = {**cosmos_1().components, "transformer": model("cosmos", in_channels=5)}
    return diffusers.CosmosVideoToWorldPipeline(**parts)


def cosmos_transformer() -> Any:
    """Of Predict 2 and 2.5: one more channel says which frames are given. Another, of padding, needs torchvision."""
    return model("cosmos", in_channels=5, extra_pos_embed_type=None)


def cosmos_2() -> Any:
    """Predict 2, which goes on with frames that it is given."""
    texts = tiny_t5(), tiny_text()[0]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    return diffusers.Cosmos2VideoToWorldPipeline(*texts, cosmos_transformer(), wan_vae(), scheduler, NoGuardrail())


def cosmos_25() -> Any:
    """Predict 2.5, of text, and of frames where there are any."""
    tokenizer, _ = tiny_text()
    tokenizer.chat_template = "{{ messages[-1]['content'][0]['text'] }}"
    texts = tiny_language_model(1), tokenizer
    return diffusers.Cosmos2_5_PredictBasePipeline(*texts, cosmos_transformer(), wan_vae(), unipc(), NoGuardrail())


def kandinsky() -> Any:
    return with_two_texts(kandinsky5()[0], layers=1)


TRAINABLE = {build.__name__: build for build in (a14b, ltx, hunyuan, hunyuan_15, cog, cog_15, skyreels)}
"""Models that `merope train` takes."""

OF_TEXT = {build.__name__: build for build in (skyreels_df, vace, ltx_2, cosmos_1, cosmos_25, kandinsky)}
"""Further models that `merope generate` runs."""

OF_FRAMES = {
    build.__name__: build
    for build in (
        *(i2v, a14b_i2v, skyreels_i2v, cog_i2v, hunyuan_i2v, hunyuan_15_i2v, kandinsky_i2v),
        *(cosmos_1_video, cosmos_2),
    )
}
"""Models that want a first frame."""

FOLDERS = TRAINABLE | OF_TEXT | OF_FRAMES


def write_folder(root: Path, name: str) -> Path:
    """The folder of a tiny model."""
    torch.manual_seed(0)
    FOLDERS[name]().save_pretrained(root / name)
    return root / name
