"""What CameraVideoPipeline refuses before any model runs, the sizes that it suggests, and the frames that it takes."""

from typing import Any

import pytest
import torch
from adapters.wan_models import tiny_wan
from diffusers import LTXVideoTransformer3DModel
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tiny_pipelines import (
    SHORT,
    dice,
    drive,
    tiny_pipeline,
    tiny_vae,
    video,
)

from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.conditions import prefix_tensor
from merope.generate.strides import VideoStrides
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole


def without_models(pipe: CameraVideoPipeline) -> CameraVideoPipeline:
    """The same pipeline, in which any use of a model is an error of the test."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("a model ran before the input was checked")

    for module in (pipe.transformer, pipe.vae, pipe.text_encoder):
        if module is not None:
            module.forward = touched
    if pipe.vae is not None:
        pipe.vae.encode = touched
    return pipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 12}, "num_frames must be 4k \\+ 1 frames, got 12; use 9 or 13"),
        ({"num_frames": 0}, "num_frames .* use 1"),
        ({"height": 40}, "height must be a multiple of 32.* use 32 or 64"),
        ({"width": 20}, "width must be a multiple of 32.* use 32$"),
        ({"cameras": drive(12)}, "13, one per RGB frame, got 12; the trajectory ends before the clip"),
        ({"cameras": drive(20)}, "keep the first 13"),
        ({"cameras": drive(4)}, "one per RGB frame"),
        ({"cameras": drive(13).world_from_camera}, "merope.Cameras"),
        ({"attention_kwargs": {"cameras": drive(4)}}, "pass cameras= to the pipeline"),
        ({"attention_kwargs": {"history": None}}, "pass history= to the pipeline"),
        ({"cameras": None}, "cameras must be given to a model with a camera branch"),
        (
            {"cameras": Cameras(drive(13).world_from_camera, Pinhole(9.0, 9.0, 8.0, 8.0, 16, 16))},
            "resized\\(lens, 64, 32\\)",
        ),
        (
            {"cameras": Cameras(drive(13).world_from_camera, Pinhole(30.0, 30.0, 16.0, 32.0, 32, 64))},
            "cameras.lens must be for images of 64×32, the size of the video, got 32×64",
        ),
        ({"prefix": video(6)}, "prefix frames must be 4k \\+ 1 frames, got 6; use 5 or 9"),
        ({"prefix": video(13)}, "shorter than the clip of 13 frames"),
        ({"prefix": video(5, 16, 16)}, "prefix must be of 64×32, the size of the video, got 16×16"),
        ({"prefix": video(5, height=64, width=32)}, "prefix must be of 64×32, the size of the video, got 32×64"),
        ({"prefix": video(5).float()}, "prefix must be uint8"),
        ({"prefix": []}, "at least one image"),
        ({"prompt": None}, "neither"),
        ({"prompt": 3}, "a string"),
        ({"prompt_embeds": torch.zeros(1, 4, 8)}, "given once"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 4, 9)}, "\\[B, L, 8\\]"),
        ({"prompt": ["a", "street", "rain"], "negative_prompt": ["a", "at"]}, "one per prompt"),
        ({"prompt": ["a", "rain"], "prefix": video(5).expand(3, 5, -1, -1, -1)}, "one size"),
        ({"generator": [dice(), dice()]}, "a list of 1"),
        ({"latents": torch.zeros(1, 4, 4, 2, 2)}, "latents must be \\[1, 4, 4, 2, 4\\]"),
        ({"output_type": "gif"}, "one of np, pt, pil, latent"),
        ({"callback_on_step_end_tensor_inputs": ["noise"]}, "\\['noise'\\]"),
    ],
)
def test_refused_before_any_model_runs(changes: dict[str, Any], message: str) -> None:
    pipe = without_models(tiny_pipeline())
    with pytest.raises(ValueError, match=message):
        pipe(**{"prompt": "a street", "cameras": drive(13), "prefix": video(5), **SHORT, **changes})


def test_refused_without_branch_or_text_encoder() -> None:
    with pytest.raises(ValueError, match="without a camera branch"):
        without_models(tiny_pipeline(with_branch=False))("a street", drive(13), **SHORT)
    with pytest.raises(ValueError, match=r"attention_kwargs.* must be left out"):
        without_models(tiny_pipeline(with_branch=False))("a", attention_kwargs={"cameras": drive(4)}, **SHORT)
    bare = without_models(tiny_pipeline(with_branch=False, with_text=False))
    with pytest.raises(ValueError, match="pass prompt_embeds"):
        bare("a street", **SHORT)
    with pytest.raises(ValueError, match="guidance_scale=1"):
        bare(**SHORT)


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="two transformers"):
        tiny_pipeline(transformer_2=tiny_wan(num_layers=1))
    with pytest.raises(ValueError, match=r"must be a WanTransformer3DModel, got LTXVideo.* run the model's own pipe"):
        tiny_pipeline(transformer=LTXVideoTransformer3DModel(num_layers=1, attention_head_dim=2))
    with pytest.raises(ValueError, match="in_channels must be 4, the VAE's latents, got 9"):
        tiny_pipeline(with_branch=False, transformer=tiny_wan(num_layers=1, in_channels=9))
    with pytest.raises(ValueError, match="in_channels must be 3, RGB frames"):
        tiny_pipeline(vae=None)
    with pytest.raises(ValueError, match="patch_size"):
        VideoStrides.of({"patch_size": (2, 2, 2), "in_channels": 4}, tiny_vae().config)


@pytest.mark.parametrize("size", [[1, 0, 8], (1, 2), [1, 2, -2], [1, 2.0, 2], 2, None])
def test_patches_that_no_token_has_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match=r"transformer\.patch_size must be three ints ≥ 1, got "):
        VideoStrides.of({"patch_size": size, "in_channels": 4}, tiny_vae().config)


@given(st.integers(-3, 200), st.integers(-3, 700), st.integers(-5, 200), st.sampled_from([(4, 16), (4, 8), (1, 1)]))
def test_suggested_sizes_are_valid_and_nearest(height: int, width: int, frames: int, vae: tuple[int, int]) -> None:
    strides = VideoStrides(*vae, patch_rows=2, patch_columns=2)
    step = 2 * vae[1]
    fits = height > 0 and height % step == 0 and width > 0 and width % step == 0 and frames > 0
    if fits and (frames - 1) % vae[0] == 0:
        strides.check(height, width, frames)
        return
    with pytest.raises(ValueError, match="; use ") as error:
        strides.check(height, width, frames)
    text = str(error.value)
    given = {"height": height, "width": width, "num_frames": frames}
    name = text.split(" must")[0]
    for suggestion in text.split("; use ")[1].split(" or "):
        unit = vae[0] if name == "num_frames" else step
        assert abs(int(suggestion) - given[name]) < unit or given[name] < 1
        strides.check(**{"height": step, "width": step, "num_frames": 1, name: int(suggestion)})


def test_frames_as_other_libraries_hold_them() -> None:
    """OpenCV's colours turned round are a view with a negative stride; lists of arrays and bare images are named."""
    frames = video(5).numpy()
    assert torch.equal(prefix_tensor(frames[..., ::-1])[0], torch.from_numpy(frames[..., ::-1].copy()))
    image = Image.fromarray(frames[0])
    for wrong in (list(frames), image, [[image]], ["a.png"]):
        with pytest.raises(ValueError, match="a list of PIL images, got"):
            prefix_tensor(wrong)  # type: ignore[arg-type]
