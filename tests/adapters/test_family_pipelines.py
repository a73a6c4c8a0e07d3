"""Every family in its own, unmodified diffusers pipeline: from noise to a video, with cameras."""

import inspect
from typing import Any

import diffusers
import pytest
import torch
from family_models import CASES
from family_pipelines import PIPELINES, PROMPT, SIZE, model, unipc, wan_vace, wan_vae
from PIL import Image
from scenes import PINHOLE
from torch import Tensor
from wan_models import cameras, perturb, tiny_config

import merope


def sampled(pipe: Any, call: dict[str, Any], output_type: str = "latent") -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    dice = torch.Generator().manual_seed(0)
    return torch.as_tensor(pipe(**call, num_inference_steps=2, generator=dice, output_type=output_type).frames)


def attached(pipe: Any) -> Any:
    """The pipeline with a branch that acts as if it were trained."""
    for branch in merope.attach(pipe, tiny_config()).values():
        perturb(branch)
    return pipe


def after_a_picture(clip: merope.Cameras) -> merope.Cameras:
    """Cameras of a video behind one frame that has none."""
    poses = torch.cat((torch.eye(4)[None].double(), clip.world_from_camera))
    return merope.Cameras(poses, PINHOLE, torch.tensor([False] + [True] * clip.count))


def test_every_model_has_a_pipeline() -> None:
    assert list(PIPELINES) == list(CASES)


@pytest.mark.parametrize("name", PIPELINES)
def test_cameras_steer_the_video(name: str) -> None:
    torch.manual_seed(0)
    pipe, call = PIPELINES[name]()
    first, second = (
        after_a_picture(cameras(2, seed=seed)) if name == "wan_animate" else cameras(seed=seed) for seed in (0, 2)
    )
    base = sampled(pipe, call)
    branches = merope.attach(pipe, tiny_config())
    with merope.cameras(pipe, first):
        assert torch.equal(sampled(pipe, call), base)
        perturb(branches["transformer"])
        steered = sampled(pipe, call)
        video = sampled(pipe, call, "np")
    assert (steered - base).abs().max() > 0.1
    assert video.isfinite().all()
    assert video.shape[2:] == (call["height"], call["width"], 3)
    with merope.cameras(pipe, second):
        assert (sampled(pipe, call) - steered).abs().max() > 0.05
    if "attention_kwargs" in inspect.signature(pipe.__call__).parameters:
        assert torch.equal(sampled(pipe, {**call, "attention_kwargs": {"cameras": first}}), steered)
    with merope.cameras(pipe, first):
        pipe.enable_model_cpu_offload(device="cpu")
        torch.testing.assert_close(sampled(pipe, call), steered)
        pipe.remove_all_hooks()
    merope.detach(pipe)
    assert torch.equal(sampled(pipe, call), base)


def test_reference_images_of_vace_are_frames_without_a_camera() -> None:
    pipe, call = wan_vace()
    call = {**call, "reference_images": [Image.new("RGB", (48, 32), (40, 90, 160))]}
    base, _ = sampled(pipe, call), attached(pipe)
    with merope.cameras(pipe, after_a_picture(cameras())):
        assert (sampled(pipe, call) - base).abs().max() > 0.1
    with merope.cameras(pipe, cameras()), pytest.raises(ValueError, match="one per latent frame, 4, got 3"):
        sampled(pipe, call)


def test_diffusion_forcing_of_skyreels() -> None:
    """Asynchronous: one noise level per frame, and blocks of frames that see no later ones."""
    transformer = model("skyreels")
    pipe = diffusers.SkyReelsV2DiffusionForcingPipeline(None, None, transformer, wan_vae(), unipc())
    call = {
        **SIZE,
        **PROMPT,
        "prompt": None,
        "num_frames": 13,
        "base_num_frames": 13,
        "causal_block_size": 2,
        "ar_step": 1,
    }
    base, _ = sampled(pipe, call), attached(pipe)
    steered = sampled(pipe, {**call, "attention_kwargs": {"cameras": cameras(4)}})
    assert transformer.config.num_frame_per_block == 2
    assert (steered - base).abs().max() > 0.1
