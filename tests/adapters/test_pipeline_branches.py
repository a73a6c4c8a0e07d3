"""A pipeline in the place of its transformer: all transformers get a branch in one call; cameras from around a call."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UniPCMultistepScheduler, WanPipeline
from tiny_pipelines import tiny_vae
from torch import Tensor
from wan_models import cameras, perturb, run, tiny_config, tiny_wan

import merope
from merope.adapters.attachment import attach, attached_branch, detach, load_branch


def a14b() -> WanPipeline:
    """Wan2.2 A14B in small: one transformer for noisy steps, one for the rest."""
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=tiny_vae(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        transformer=tiny_wan(num_layers=2),
        transformer_2=tiny_wan(num_layers=2, seed=1),
        boundary_ratio=0.5,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sampled(pipe: WanPipeline, **options: Any) -> Tensor:
    text = torch.linspace(-1, 1, 40).reshape(1, 5, 8)
    return pipe(
        prompt_embeds=text,
        negative_prompt_embeds=-text,
        height=32,
        width=64,
        num_frames=9,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        **options,
    ).frames


def test_both_experts_get_a_branch_and_each_step_runs_its_own(tmp_path: Path) -> None:
    pipe, clip = a14b(), cameras()
    base = sampled(pipe)
    branches = attach(pipe, tiny_config())
    assert [branches[name] for name in branches] == [
        attached_branch(pipe.transformer),
        attached_branch(pipe.transformer_2),
    ]
    assert torch.equal(sampled(pipe, attention_kwargs={"cameras": clip}), base)
    calls: list[str] = []
    for seed, (name, branch) in enumerate(branches.items()):
        perturb(branch, seed=seed)
        branch.processors()[1].cam_qkv.register_forward_hook(lambda *_, name=name: calls.append(name))
    trained = sampled(pipe, attention_kwargs={"cameras": clip})
    switch = calls.index("transformer_2")
    assert calls == ["transformer"] * switch + ["transformer_2"] * (len(calls) - switch)
    assert 0 < switch < len(calls) == 2 * 4  # steps, with and without text
    branches.save_pretrained(tmp_path)
    assert detach(pipe)["transformer_2"] is branches["transformer_2"]
    assert torch.equal(sampled(pipe), base)
    loaded = load_branch(pipe, tmp_path)
    assert torch.equal(sampled(pipe, attention_kwargs={"cameras": clip}), trained)
    with torch.no_grad():
        for parameter in loaded["transformer_2"].parameters():
            parameter.zero_()
    assert not torch.equal(sampled(pipe, attention_kwargs={"cameras": clip}), trained)


def test_a_pipeline_gets_all_branches_or_none() -> None:
    pipe = a14b()
    attach(pipe.transformer_2, tiny_config())
    with pytest.raises(ValueError, match="without a camera branch"):
        attach(pipe, tiny_config())
    assert attached_branch(pipe.transformer) is None


def test_a_pipeline_loses_all_branches_or_none() -> None:
    pipe, clip, refused = a14b(), cameras(), []
    branch = attach(pipe.transformer, tiny_config())
    with pytest.raises(ValueError, match="transformer must be one with a camera branch, got one without"):
        detach(pipe)
    assert attached_branch(pipe.transformer) is branch
    attach(pipe.transformer_2, tiny_config())

    def detach_meanwhile(*_: Any) -> None:
        with ThreadPoolExecutor() as other, pytest.raises(ValueError, match="at rest while its branch is detached"):
            other.submit(detach, pipe).result()
        refused.append(True)

    pipe.transformer_2.blocks[0].register_forward_pre_hook(detach_meanwhile)
    run(pipe.transformer_2, clip)
    assert refused == [True]
    run(pipe.transformer, clip)
    assert detach(pipe)["transformer"] is branch


def test_a_pipeline_without_a_transformer_is_refused() -> None:
    pipe = DDPMPipeline(None, DDPMScheduler())
    for use in (attach, detach, lambda it: merope.cameras(it, cameras()).__enter__()):
        with pytest.raises(ValueError, match=r"pipeline must be one with a transformer, got DDPMPipeline; .*bases.md"):
            use(pipe)


def test_a_pipeline_with_one_transformer_takes_the_folder_of_a_branch(tmp_path: Path) -> None:
    pipe = a14b()
    pipe.register_modules(transformer_2=None)
    branch = perturb(attach(pipe.transformer, tiny_config()))
    branch.save_pretrained(tmp_path)
    expected = run(pipe.transformer, cameras())
    assert list(detach(pipe)) == ["transformer"]
    assert list(load_branch(pipe, tmp_path)) == ["transformer"]
    assert torch.equal(run(pipe.transformer, cameras()), expected)


def test_branches_of_a_subfolder_are_those_that_are_loaded(tmp_path: Path) -> None:
    pipe, saved = a14b(), {}
    for seed, place in enumerate((".", "second")):
        branches = attach(pipe, tiny_config())
        for branch in branches.values():
            perturb(branch, seed=seed)
        branches.save_pretrained(tmp_path / place)
        detach(pipe)
        saved[place] = branches["transformer"].processors()[1].cam_out.bias
    loaded = load_branch(pipe, tmp_path, subfolder="second")
    assert torch.equal(loaded["transformer"].processors()[1].cam_out.bias, saved["second"])
    detach(pipe)
    pipe.register_modules(transformer_2=None)
    for place in ("second", "second/transformer"):
        loaded = load_branch(pipe, tmp_path, subfolder=place)
        assert torch.equal(loaded["transformer"].processors()[1].cam_out.bias, saved["second"])
        detach(pipe)


def test_cameras_around_a_call() -> None:
    pipe, clip = a14b(), cameras()
    for branch in attach(pipe, tiny_config()).values():
        perturb(branch)
    expected = sampled(pipe, attention_kwargs={"cameras": clip})
    outer, inner = run(pipe.transformer, clip), run(pipe.transformer, cameras(seed=2))
    with merope.cameras(pipe, clip):
        assert torch.equal(sampled(pipe), expected)
        with merope.cameras(pipe.transformer, cameras(seed=2)):
            assert torch.equal(run(pipe.transformer), inner)
        assert torch.equal(run(pipe.transformer), outer)
        with pytest.raises(ValueError, match=r"cameras must be given once, got in attention_kwargs and by merope\.cam"):
            run(pipe.transformer, clip)
    with pytest.raises(ValueError, match=r"attention_kwargs\[\"cameras\"\] must be"):
        sampled(pipe)
    with pytest.raises(ValueError, match="one with a camera branch"), merope.cameras(tiny_wan(), clip):
        pass
