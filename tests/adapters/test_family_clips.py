"""What `merope train` gives to a transformer of any family is what the family's own pipeline gives to it."""

from typing import Any

import diffusers
import pytest
import torch
from family_folders import TRAINABLE
from family_models import CASES
from family_pipelines import PIPELINES
from torch import Tensor, nn
from torch.testing import assert_close

from merope.adapters.families import FAMILIES, family_of
from merope.adapters.families.noise import FLOW_MATCHING, VPrediction
from merope.generate.base_video import BaseVideo

TRAINED = [name for name, case in CASES.items() if not FAMILIES[case.kind].not_trained]
IGNORED = {"attention_kwargs", "return_dict"}


def watched(pipe: Any, call: dict[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The arguments of the first forward of a pipeline, its last latents, and what its VAE decodes them from."""
    seen: list[dict[str, Any]] = []
    decoded: list[Tensor] = []
    pipe.set_progress_bar_config(disable=True)
    hook = pipe.transformer.register_forward_pre_hook(lambda _, a, kwargs: seen.append(kwargs), with_kwargs=True)
    decode = pipe.vae.decode
    pipe.vae.decode = lambda latents, *a, **k: decoded.append(latents) or decode(latents, *a, **k)
    once = {**call, "num_inference_steps": 1}
    pipe(**once, generator=torch.Generator().manual_seed(0))
    latents = pipe(**once, generator=torch.Generator().manual_seed(0), output_type="latent").frames
    hook.remove()
    pipe.vae.decode = decode
    return seen[0], latents, decoded[0]


@pytest.mark.parametrize("name", TRAINED)
def test_inputs_and_latents_are_those_of_the_pipeline(name: str) -> None:
    torch.manual_seed(0)
    pipe, call = PIPELINES[name]()
    for buffer in (each for key, each in pipe.vae.named_buffers() if key.startswith("latents_")):
        nn.init.uniform_(buffer, 0.5, 2.0)  # LTX-Video's are 0 and 1 in a fresh autoencoder
    given, last, decoded = watched(pipe, call)
    video, family = BaseVideo(pipe), family_of(pipe.transformer)
    config, channels = pipe.transformer.config, family.latent_channels(pipe.transformer.config)
    latents = family.video(given)[:, :channels]
    made = family.video_inputs(config, latents, given["timestep"], video.strides.pixels)
    for key, value in {**given, **made}.items():
        if key in made and key not in IGNORED:
            assert_close(value, given.get(key), msg=lambda text, key=key: f"{key}: {text}")
    unknown = {*given} - {*made} - {*family.text_inputs(config, family.no_text(config)[None])} - IGNORED
    assert all(given[key] is None for key in unknown), unknown
    grid = {**given, "hidden_states": last}
    assert_close(video._for_vae(family.video(grid))[:, :, -decoded.shape[2] :], decoded)


@pytest.mark.parametrize("name", TRAINABLE)
def test_text_is_that_of_the_pipeline(name: str) -> None:
    pipe = TRAINABLE[name]()
    family, config, video = family_of(pipe.transformer), pipe.transformer.config, BaseVideo(pipe)
    stride, size = video.strides.of_cameras, video.strides.pixels * video.strides.patch_rows
    call = {"prompt": "a street", "height": max(size, 32), "width": 32, "num_frames": 1 + stride}
    if family.text_first:  # tiny models know positions of a few tokens of text
        call["max_sequence_length"] = config.max_text_seq_length
    given, *_ = watched(pipe, call)
    rows = family.text(pipe, "a street").detach()
    for key, value in family.text_inputs(config, rows[None].float()).items():
        expected = given[key]
        assert_close(value.expand(expected.shape)[-1:], expected[-1:].to(value))  # guidance may have put "" first
    assert not torch.equal(family.text(pipe, "rain").detach(), rows)
    assert rows.shape[1] == family.no_text(config).shape[1]


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_reads_no_text_at_all(name: str) -> None:
    """The world has no captions. HunyuanVideo divides by the number of rows that are not masked."""
    torch.manual_seed(0)
    pipe, call = PIPELINES[name]()
    given, *_ = watched(pipe, call)
    family, config = family_of(pipe.transformer), pipe.transformer.config
    latents = family.video(given)[:, : family.latent_channels(config)]
    video = family.video_inputs(config, latents, given["timestep"], BaseVideo(pipe).strides.pixels)
    text = family.text_inputs(config, family.no_text(config).expand(len(latents), -1, -1))
    with torch.no_grad():
        out = pipe.transformer(**video, **text, return_dict=False)[0]
    assert out.isfinite().all()


def test_v_prediction_is_that_of_the_scheduler() -> None:
    scheduler = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction")
    noising, (clean, noise) = VPrediction(scheduler.alphas_cumprod), torch.randn(2, 3, 4)
    level = torch.tensor([[0.0], [0.4567], [0.9999]])
    times = noising.timesteps(level)
    assert times.flatten().tolist() == [0, 456, 999]
    assert_close(noising.noisy(clean, noise, level), scheduler.add_noise(clean, noise, times.flatten()))
    assert_close(noising.target(clean, noise, level), scheduler.get_velocity(clean, noise, times.flatten()))


@pytest.mark.parametrize("noising", [FLOW_MATCHING, VPrediction(diffusers.CogVideoXDDIMScheduler().alphas_cumprod)])
def test_a_right_prediction_leads_to_any_lower_level(noising: Any) -> None:
    clean, noise = torch.randn(2, 3, 4)
    high, low, none = torch.tensor(0.8), torch.tensor(0.3), torch.tensor(0.0)
    noisy, predicted = noising.noisy(clean, noise, high), noising.target(clean, noise, high)
    assert_close(noising.towards_data(noisy, predicted, high, low), noising.noisy(clean, noise, low))
    assert_close(noising.towards_data(noisy, predicted, high, none), clean)
