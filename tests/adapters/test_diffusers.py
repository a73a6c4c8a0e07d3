"""What diffusers and PEFT offer keeps working with a branch: pipelines, guidance, LoRA, backends, fused projections."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from peft import LoraConfig
from torch import Tensor
from wan_models import cameras, perturb, run, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.attachment import attach, attached_branch, detach

LORA = LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)


def tiny_vae() -> AutoencoderKLWan:
    statistics = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [0.5, 0.6, 0.7, 0.8]}
    return AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **statistics).eval()


def generate(pipeline: WanPipeline, **options: object) -> Tensor:
    """Latents of a guided run over two steps, 9 frames of 32 × 48 pixels."""
    generator = torch.Generator().manual_seed(3)
    prompts = {name: torch.randn(1, 5, 8, generator=generator) for name in ("prompt_embeds", "negative_prompt_embeds")}
    return pipeline(
        **{**prompts, "height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 2, "guidance_scale": 4.0},
        **{"generator": generator, "output_type": "latent", **options},
    ).frames


@pytest.mark.parametrize("expand_timesteps", [False, True])
def test_an_unmodified_pipeline_with_guidance(expand_timesteps: bool) -> None:
    transformer = tiny_wan()
    pipeline = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=tiny_vae(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        transformer=transformer,
        expand_timesteps=expand_timesteps,
    )
    pipeline.set_progress_bar_config(disable=True)
    base = generate(pipeline)
    branch = attach(transformer, tiny_config())
    assert torch.equal(generate(pipeline, attention_kwargs={"cameras": cameras()}), base)
    perturb(branch)
    ahead, faster = (generate(pipeline, attention_kwargs={"cameras": cameras(seed=s)}) for s in (0, 3))
    assert ahead.isfinite().all()
    assert (ahead - faster).abs().max() > 1e-3
    two = generate(pipeline, attention_kwargs={"cameras": cameras()}, num_videos_per_prompt=2)
    assert two.shape[0] == 2
    with pytest.raises(ValueError, match="cameras"):
        generate(pipeline)
    detach(transformer)
    assert torch.equal(generate(pipeline), base)


@pytest.mark.parametrize("expand_timesteps", [False, True])
def test_an_unmodified_image_to_video_pipeline(expand_timesteps: bool) -> None:
    """Wan2.1's, whose image comes in additional channels, and TI2V-5B's, whose image is the first latent frame."""
    latent_channels, mask_channels = 4, 4
    inputs = latent_channels if expand_timesteps else 2 * latent_channels + mask_channels
    transformer = tiny_wan(in_channels=inputs)
    pipeline = WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=tiny_vae(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        transformer=transformer,
        expand_timesteps=expand_timesteps,
    )
    pipeline.set_progress_bar_config(disable=True)
    image = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(2))
    base = generate(pipeline, image=image)
    branch = attach(transformer, tiny_config())
    assert torch.equal(generate(pipeline, image=image, attention_kwargs={"cameras": cameras()}), base)
    perturb(branch)
    ahead, faster = (generate(pipeline, image=image, attention_kwargs={"cameras": cameras(seed=s)}) for s in (0, 3))
    assert (ahead - faster).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [WanPipeline, WanImageToVideoPipeline])
def test_two_transformers_need_two_branches(kind: type[WanPipeline]) -> None:
    """Wan2.2 A14B: the expert of the later steps would ignore the cameras without a word."""
    first, second = tiny_wan(), tiny_wan(seed=1)
    pipeline = kind(
        tokenizer=None,
        text_encoder=None,
        vae=tiny_vae(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        transformer=first,
        transformer_2=second,
        boundary_ratio=0.9,
        expand_timesteps=True,
    )
    pipeline.set_progress_bar_config(disable=True)
    options = {} if kind is WanPipeline else {"image": torch.rand(1, 3, 32, 48)}
    perturb(attach(first, tiny_config()))
    with pytest.raises(ValueError, match=r"pipe\.transformer_2 must be with a camera branch.* attach one to both"):
        generate(pipeline, attention_kwargs={"cameras": cameras()}, **options)
    perturb(attach(second, tiny_config()))
    generate(pipeline, attention_kwargs={"cameras": cameras()}, **options)
    detach(first)
    with pytest.raises(ValueError, match=r"pipe\.transformer must be with a camera branch"):
        generate(pipeline, attention_kwargs={"cameras": cameras()}, **options)


@pytest.mark.parametrize("lora_first", [True, False])
def test_lora_never_touches_the_branch(lora_first: bool) -> None:
    transformer, plain = tiny_wan(), tiny_wan()
    if lora_first:
        transformer.add_adapter(LORA)
    branch = perturb(attach(transformer, tiny_config()))
    if not lora_first:
        transformer.add_adapter(LORA)
    plain.add_adapter(LORA)
    adapted = [name for name, _ in transformer.named_modules() if name.endswith("lora_A")]
    assert adapted == [name for name, _ in plain.named_modules() if name.endswith("lora_A")]
    assert len(adapted) == 4 * 2 * 4
    assert not any("lora" in name for name, _ in branch.named_parameters())
    full = run(transformer, cameras())
    scaled = transformer(**tiny_inputs(), attention_kwargs={"cameras": cameras(), "scale": 0.0})[0]
    assert (full - scaled).abs().max() > 1e-4
    transformer.disable_lora()
    assert torch.equal(run(transformer, cameras()), scaled)


def test_lora_freezes_a_branch_until_told_otherwise() -> None:
    transformer = tiny_wan()
    branch = perturb(attach(transformer, tiny_config()))
    transformer.add_adapter(LORA)
    assert not any(weight.requires_grad for weight in branch.parameters())  # PEFT's doing; docs/bases.md says so
    branch.requires_grad_(True)
    run(transformer, cameras()).square().mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in branch.parameters())
    assert all(weight.grad is not None for name, weight in transformer.named_parameters() if "lora_B" in name)


def test_attention_backends_reach_the_base_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # A model's backend becomes that of all models, and `reset_attention_backend` leaves it so: put back at the end.
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)
    transformer = tiny_wan()
    perturb(attach(transformer, tiny_config(blocks="every")))
    out = run(transformer, cameras())
    transformer.set_attention_backend("_native_math")
    try:
        backends = {block.attn1.processor.base._attention_backend for block in transformer.blocks}
        assert backends == {AttentionBackendName._NATIVE_MATH}
        assert (run(transformer, cameras()) - out).abs().max() < 1e-5
    finally:
        transformer.reset_attention_backend()
    with pytest.raises(ValueError, match="parallel_config must be None"):
        transformer.blocks[0].attn1.processor._parallel_config = object()


def test_fused_projections_give_the_same() -> None:
    transformer = tiny_wan()
    perturb(attach(transformer, tiny_config()))
    out = run(transformer, cameras())
    transformer.fuse_qkv_projections()
    assert (run(transformer, cameras()) - out).abs().max() < 1e-5


def test_the_base_model_saves_and_loads_without_the_branch(tmp_path: object) -> None:
    transformer = tiny_wan()
    base = run(transformer)
    attach(transformer, tiny_config())
    detach(transformer)
    transformer.save_pretrained(tmp_path)
    assert torch.equal(run(type(transformer).from_pretrained(tmp_path).eval()), base)


def test_saving_the_base_model_with_a_branch_on_it_is_said(tmp_path: Path) -> None:
    """diffusers drops what it does not know when it loads: nothing of the branch would come back."""
    transformer = tiny_wan()
    pipeline = WanPipeline(None, None, tiny_vae(), UniPCMultistepScheduler(), transformer)
    perturb(attach(transformer, tiny_config()))
    twin = copy.deepcopy(transformer)
    for model in (pipeline, transformer, twin):
        with pytest.warns(UserWarning, match=r"branch is saved among .* diffusers drops it"):
            model.save_pretrained(tmp_path / "with")
    assert attached_branch(WanTransformer3DModel.from_pretrained(tmp_path / "with")) is None
    detach(transformer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        transformer.save_pretrained(tmp_path / "without")


def test_layerwise_casting_leaves_the_branch_alone() -> None:
    """diffusers keeps the base model's layers in float8 between calls; the branch stays in its own precision."""
    transformer, plain = tiny_wan(), tiny_wan()
    branch = perturb(attach(transformer, tiny_config()))
    for model in (transformer, plain):
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert {parameter.dtype for parameter in branch.parameters()} == {torch.float32}
    assert transformer.blocks[0].ffn.net[2].weight.dtype == torch.float8_e4m3fn
    assert run(transformer, cameras()).isfinite().all()
    patterns = plain._skip_layerwise_casting_patterns
    late = attach(plain, tiny_config())
    assert {parameter.dtype for parameter in late.parameters()} == {torch.bfloat16}
    detach(plain)
    assert plain._skip_layerwise_casting_patterns == patterns


@pytest.mark.parametrize("way", ["sequential", "leaf_level", "block_level"])
def test_offloading_comes_after_the_branch(way: str) -> None:
    """Its hooks are put on the layers that are there: weights that come later would be lost or stay away."""

    def offload(model: WanTransformer3DModel) -> None:
        device = torch.device("cpu")
        if way == "sequential":
            cpu_offload(model, device, offload_buffers=True)
        else:
            model.enable_group_offload(device, device, offload_type=way, num_blocks_per_group=1)

    transformer, late = tiny_wan(), tiny_wan()
    perturb(attach(transformer, tiny_config()))
    with torch.no_grad():
        expected = run(transformer, cameras())
        offload(transformer)
        assert torch.equal(run(transformer, cameras()), expected)
    offload(late)
    with pytest.raises(ValueError, match=r"not offloaded yet.* attach or load the branch first"):
        attach(late, tiny_config())


def test_context_parallelism_before_the_branch_is_refused() -> None:
    transformer = tiny_wan()
    transformer.blocks[1].attn1.processor._parallel_config = object()
    with pytest.raises(ValueError, match="without context parallelism"):
        attach(transformer, tiny_config())


def test_a_compiled_model_gives_its_branch_back() -> None:
    transformer = tiny_wan()
    base = run(transformer)
    branch = perturb(attach(transformer, tiny_config()))
    compiled = torch.compile(transformer, backend="eager")
    assert attached_branch(compiled) is branch
    assert detach(compiled) is branch
    assert torch.equal(run(transformer), base)
