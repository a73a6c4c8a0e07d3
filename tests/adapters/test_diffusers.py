"""What diffusers and PEFT offer keeps working with a branch: pipelines, guidance, LoRA, backends, fused projections."""

import pytest
import torch
from accelerate import cpu_offload
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from peft import LoraConfig
from torch import Tensor
from wan_models import cameras, perturb, run, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.wan import attach, attached_branch, detach

LORA = LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)


def tiny_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()


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
    assert not any(weight.requires_grad for weight in branch.parameters())  # PEFT's doing; docs/wan.md says so
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


@pytest.mark.parametrize("way", ["sequential", "leaf_level"])
def test_offloading_comes_after_the_branch(way: str) -> None:
    """Its hooks are put on the layers that are there: weights that come later would be lost or stay away."""

    def offload(model: WanTransformer3DModel) -> None:
        device = torch.device("cpu")
        if way == "sequential":
            cpu_offload(model, device, offload_buffers=True)
        else:
            model.enable_group_offload(onload_device=device, offload_device=device, offload_type=way)

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
