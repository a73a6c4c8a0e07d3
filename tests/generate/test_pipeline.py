"""CameraVideoPipeline: masked flow matching with a clean prefix, guidance, cameras."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters.wan_models import perturb, tiny_config, tiny_wan
from diffusers import WanImageToVideoPipeline, WanPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from scenes import random_poses
from tiny_pipelines import (
    HEIGHT,
    LENS,
    SHORT,
    SIZE,
    WIDTH,
    dice,
    drive,
    euler,
    latents_of,
    pixel_pipeline,
    tiny_pipeline,
    video,
)
from torch import Tensor

from merope.adapters.attachment import attach, detach
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.conditioning import CameraCondition
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.conditions import latent_cameras
from merope.generate.strides import VideoStrides
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole


class TestPrefix:
    def test_nine_frames_are_kept_exactly_and_49_come_out(self) -> None:
        pipe, prefix = tiny_pipeline(), video(9)
        options = {**SIZE, "num_inference_steps": 2}
        latents = latents_of(pipe, "a street", drive(49), prefix, num_frames=49, **options)
        clean = pipe.encode_frames(prefix[None])
        assert latents.shape == (1, 4, 13, HEIGHT // 16, WIDTH // 16)
        assert clean.shape[2] == 3
        assert torch.equal(latents[:, :, :3], clean)
        frames = pipe(
            "a street", drive(49), prefix, num_frames=49, generator=dice(), output_type="pt", **options
        ).frames
        assert frames.shape == (1, 49, 3, HEIGHT, WIDTH)
        of_prefix = pipe.video_processor.postprocess_video(pipe.decode_latents(clean), output_type="pt")
        assert (frames[:, :9] - of_prefix).abs().max() < 1e-5  # the decoder is causal too

    def test_latents_of_the_prefix_are_those_of_the_full_clip(self) -> None:
        pipe, clip = tiny_pipeline(), video(49)[None]
        assert (pipe.encode_frames(clip[:, :9]) - pipe.encode_frames(clip)[:, :, :3]).abs().max() < 1e-5

    def test_model_sees_clean_frames_with_timestep_zero_at_every_step(self) -> None:
        pipe, prefix = tiny_pipeline(with_branch=False), video(5)
        calls: list[dict[str, Any]] = []
        hook = pipe.transformer.register_forward_pre_hook(lambda m, a, kw: calls.append(kw), with_kwargs=True)
        latents_of(pipe, "a street", prefix=prefix, num_inference_steps=3)
        hook.remove()
        assert len(calls) == 6  # three steps, two passes
        clean = pipe.encode_frames(prefix[None])
        for call, step in zip(calls, pipe.scheduler.timesteps.repeat_interleave(2), strict=True):
            assert torch.equal(call["hidden_states"][:, :, :2], clean)
            assert call["timestep"].shape == (1, 4 * 2)  # four latent frames of two tokens
            assert (call["timestep"][:, :4] == 0).all()
            assert (call["timestep"][:, 4:] == step).all()

    def test_one_frame_is_what_wan_does_with_an_image(self) -> None:
        pipe = tiny_pipeline(with_branch=False)
        components = {**pipe.components, "image_encoder": None, "image_processor": None}
        wan = WanImageToVideoPipeline(**components, expand_timesteps=True)
        wan.set_progress_bar_config(disable=True)
        image = Image.fromarray(video(1)[0].numpy())
        options = {**SHORT, "prompt": "a street", "negative_prompt": "rain", "output_type": "latent"}
        theirs = wan(image, generator=dice(), **options).frames
        ours = pipe(prefix=[image], generator=dice(), **options).frames
        assert (ours - theirs).abs().max() < 1e-5
        assert (ours - latents_of(pipe, "a street", negative_prompt="rain")).abs().max() > 1e-2

    def test_prefix_guides_what_follows(self) -> None:
        pipe = tiny_pipeline(with_branch=False)
        one, other = (latents_of(pipe, "a street", prefix=video(5, seed=seed)) for seed in (0, 1))
        assert (one[:, :, 2:] - other[:, :, 2:]).abs().max() > 1e-3

    def test_images_arrays_and_tensors_are_the_same_prefix(self) -> None:
        pipe, prefix = tiny_pipeline(with_branch=False), video(5)
        images = [Image.fromarray(frame.numpy()) for frame in prefix]
        one, two, three = (latents_of(pipe, "rain", prefix=p) for p in (prefix, prefix.numpy(), images))
        assert torch.equal(one, two)
        assert torch.equal(one, three)

    def test_half_precision_keeps_it_exact(self) -> None:
        transformer = tiny_wan(torch.bfloat16, num_layers=2)
        perturb(attach(transformer, tiny_config()))
        for scheduler in ({}, {"scheduler": euler()}):
            pipe = tiny_pipeline(with_branch=False, transformer=transformer, **scheduler)
            latents = latents_of(pipe, "a street", drive(13), video(9))
            assert latents.dtype == torch.float32
            assert torch.equal(latents[:, :, :3], pipe.encode_frames(video(9)[None]))
            generated = latents[:, :, 3:]
            assert (generated != generated.to(torch.bfloat16).float()).any()

    def test_wan21_takes_one_too(self) -> None:
        """Models without expand_timesteps: scalar timesteps from text alone, one per token with a prefix."""
        pipe = tiny_pipeline(with_branch=False, expand_timesteps=False)
        shapes: list[torch.Size] = []
        pipe.transformer.register_forward_pre_hook(
            lambda m, a, kw: shapes.append(kw["timestep"].shape), with_kwargs=True
        )
        latents_of(pipe, "a street", guidance_scale=1.0, num_inference_steps=1)
        latents = latents_of(pipe, "a street", prefix=video(5), guidance_scale=1.0, num_inference_steps=1)
        assert shapes == [(1,), (1, 8)]
        assert torch.equal(latents[:, :, :2], pipe.encode_frames(video(5)[None]))


class TestText:
    @pytest.mark.parametrize("expand_timesteps", [False, True])
    def test_without_prefix_and_cameras_it_is_wan(self, expand_timesteps: bool) -> None:
        pipe = tiny_pipeline(with_branch=False, expand_timesteps=expand_timesteps)
        wan = WanPipeline(**pipe.components, expand_timesteps=expand_timesteps)
        wan.set_progress_bar_config(disable=True)
        for kind, tolerance in (("latent", 0.0), ("pt", 1e-5)):
            options = {**SHORT, "negative_prompt": "rain", "output_type": kind}
            ours = pipe("a street at night", generator=dice(), **options).frames
            theirs = wan("a street at night", generator=dice(), **options).frames
            assert (ours - theirs).abs().max() <= tolerance

    def test_guidance_extrapolates_from_negative_to_positive(self) -> None:
        pipe = tiny_pipeline(scheduler=euler())  # one Euler step is linear in the velocity
        options = {"cameras": drive(13), "prefix": video(5), "num_inference_steps": 1}
        positive = latents_of(pipe, "a street", guidance_scale=1.0, **options)
        negative = latents_of(pipe, "rain", guidance_scale=1.0, **options)
        guided = latents_of(pipe, "a street", negative_prompt="rain", guidance_scale=4.0, **options)
        assert (positive - negative).abs().max() > 1e-4
        assert (guided - (negative + 4.0 * (positive - negative))).abs().max() < 1e-5

    def test_embeddings_stand_for_text(self) -> None:
        pipe = tiny_pipeline(with_branch=False)
        with torch.no_grad():
            positive, negative = pipe.encode_prompt("a street", "rain", max_sequence_length=512)
        bare = tiny_pipeline(with_branch=False, with_text=False)
        expected = latents_of(pipe, "a street", negative_prompt="rain")
        assert torch.equal(latents_of(bare, prompt_embeds=positive, negative_prompt_embeds=negative), expected)

    def test_no_text_is_a_zero_vector_however_long(self) -> None:
        pipe = tiny_pipeline(with_branch=False, with_text=False)
        nothing = latents_of(pipe, guidance_scale=1.0)
        padding = latents_of(pipe, prompt_embeds=torch.zeros(1, 40, 8), guidance_scale=1.0)
        assert (nothing - padding).abs().max() < 1e-5


class TestCameras:
    def test_branch_gets_every_fourth_camera_once_for_all_steps_and_passes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Cameras] = []
        prepare = CameraBranch.prepare

        def spy(branch: CameraBranch, cameras: Cameras, *rest: Any) -> Any:
            seen.append(cameras)
            return prepare(branch, cameras, *rest)

        monkeypatch.setattr(CameraBranch, "prepare", spy)
        cameras = drive(13, bend=True)
        latents_of(tiny_pipeline(), "a street", cameras, video(5), num_inference_steps=3)
        assert len(seen) == 1
        assert torch.equal(seen[0].world_from_camera, cameras.world_from_camera[::4])

    def test_path_changes_generated_frames_only(self) -> None:
        pipe, prefix = tiny_pipeline(), video(9)
        straight, bend = (latents_of(pipe, "a street", drive(13, bend), prefix) for bend in (False, True))
        assert torch.equal(straight[:, :, :3], bend[:, :, :3])
        assert (straight[:, :, 3:] - bend[:, :, 3:]).abs().max() > 1e-3

    def test_batch_of_clips_is_each_clip_alone(self) -> None:
        pipe = tiny_pipeline()
        poses = torch.stack([drive(13, bend).world_from_camera for bend in (False, True)])
        prefixes = torch.stack([video(5, seed=seed) for seed in (0, 1)])
        prompts = ["a street", "rain at night"]
        both = latents_of(pipe, prompts, Cameras(poses, LENS), prefixes, generator=[dice(3), dice(4)])
        for k in range(2):
            alone = latents_of(pipe, prompts[k], Cameras(poses[k], LENS), prefixes[k], generator=dice(3 + k))
            assert (both[k] - alone[0]).abs().max() < 1e-4

    def test_what_comes_once_is_shared(self) -> None:
        pipe = tiny_pipeline()
        generators = [dice(3), dice(4)]
        shared = latents_of(pipe, ["a street"] * 2, drive(13), video(5), generator=generators)
        noise = [latents_of(pipe, "a street", drive(13), video(5), generator=dice(3 + k)) for k in range(2)]
        assert (shared - torch.cat(noise)).abs().max() < 1e-4

    def test_compiled_transformer_knows_other_times(self) -> None:
        options = {"attention_kwargs": {"times": [0.0, 2.0, 4.0, 6.0]}}
        pipe = tiny_pipeline()
        expected = latents_of(pipe, "rain", drive(13), **options)
        assert (latents_of(pipe, "rain", drive(13)) - expected).abs().max() > 1e-4
        pipe.transformer.compile(backend="eager")
        assert torch.equal(latents_of(pipe, "rain", drive(13), **options), expected)

    @pytest.mark.parametrize("compiled", ["no", "wrapped", "in place"])
    def test_transformer_is_given_cameras_made_ready(self, compiled: str) -> None:
        """Once for all steps and passes. The stance keeps the compiler's wrapper and leaves out the compiler."""
        pipe = tiny_pipeline()
        expected = latents_of(pipe, "a street", drive(13), video(5))
        given: list[object] = []
        hook = lambda m, a, kw: given.append(kw["attention_kwargs"]["cameras"])  # noqa: E731
        pipe.transformer.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        if compiled == "in place":
            pipe.transformer.compile(backend="eager")
        elif compiled == "wrapped":
            pipe.transformer = torch.compile(pipe.transformer, backend="eager")
        with torch.compiler.set_stance("force_eager"):
            latents = latents_of(pipe, "a street", drive(13), video(5))
        assert torch.equal(latents, expected)
        assert len(given) == 4
        assert len({id(condition) for condition in given}) == 1
        assert all(isinstance(condition, CameraCondition) for condition in given)

    def test_latent_cameras_keep_what_is_known(self) -> None:
        has_pose = torch.ones(2, 9, dtype=torch.bool)
        has_pose[1, 4] = False
        lens = Pinhole(torch.arange(1.0, 10.0) * 10, 50.0, 32.0, 16.0, WIDTH, HEIGHT)
        cameras = Cameras(random_poses(2, 9).float(), lens, has_pose)
        chosen = latent_cameras(cameras, 4)
        assert chosen.given_dtype == chosen.dtype == torch.float32
        assert chosen.has_pose is not None
        assert chosen.has_pose.tolist() == [[True, True, True], [True, False, True]]
        assert chosen.lens.fx.tolist() == [10.0, 50.0, 90.0]
        assert (chosen.world_from_camera[0] - cameras.world_from_camera[0, ::4]).abs().max() < 1e-6
        assert latent_cameras(cameras, 1) is cameras


class TestPixelSpace:
    def test_any_number_of_frames_and_an_exact_prefix(self) -> None:
        pipe, prefix = pixel_pipeline(), video(3, 8, 12)
        lens = Pinhole(10.0, 10.0, 6.0, 4.0, 12, 8)
        cameras = Cameras(drive(6, bend=True).world_from_camera, lens)
        options = {"height": 8, "width": 12, "num_frames": 6, "num_inference_steps": 2, "guidance_scale": 1.0}
        frames = pipe(cameras=cameras, prefix=prefix, generator=dice(), **options).frames
        assert frames.shape == (1, 6, 8, 12, 3)
        assert np.array_equal((frames[0, :3] * 255).round().astype(np.uint8), prefix.numpy())
        straight = Cameras(drive(6).world_from_camera, lens)
        others = pipe(cameras=straight, prefix=prefix, generator=dice(), **options).frames
        assert np.abs(frames[0, 3:] - others[0, 3:]).max() > 1e-3

    def test_frames_are_their_own_latents(self) -> None:
        pipe, frames = pixel_pipeline(), video(2, 8, 12)[None]
        latents = pipe.encode_frames(frames)
        assert latents.shape == (1, 3, 2, 8, 12)
        assert torch.equal(((pipe.decode_latents(latents) + 1) * 127.5).round().byte(), frames.permute(0, 4, 1, 2, 3))
        assert pipe.decode_latents(3 * latents).abs().max() == 1


class TestDiffusersManners:
    def test_ordinary_wan_folder_loads(self, tmp_path: Path) -> None:
        pipe = tiny_pipeline(with_branch=False)
        WanPipeline(**pipe.components, expand_timesteps=True).save_pretrained(tmp_path)
        loaded = CameraVideoPipeline.from_pretrained(tmp_path)
        loaded.set_progress_bar_config(disable=True)
        assert loaded.config.expand_timesteps
        expected = latents_of(pipe, "a street", prefix=video(5))
        assert torch.equal(latents_of(loaded, "a street", prefix=video(5)), expected)

    def test_pixel_model_comes_back_without_vae_and_text(self, tmp_path: Path) -> None:
        pixel_pipeline(with_branch=False).save_pretrained(tmp_path)
        loaded = CameraVideoPipeline.from_pretrained(tmp_path)
        assert loaded.vae is None
        assert loaded.text_encoder is None
        assert loaded.strides == VideoStrides(1, 1, 2, 2)

    def test_saving_does_not_lose_a_branch_in_silence(self, tmp_path: Path) -> None:
        pipe = tiny_pipeline()
        with pytest.raises(ValueError, match=r"branch\.save_pretrained"):
            pipe.save_pretrained(tmp_path)
        detach(pipe.transformer)
        pipe.save_pretrained(tmp_path)
        assert (tmp_path / "transformer" / "config.json").exists()

    def test_output_types(self) -> None:
        pipe = tiny_pipeline(with_branch=False)
        options = {**SHORT, "num_inference_steps": 1, "num_frames": 5, "guidance_scale": 1.0}
        arrays, tensors, images = (
            pipe("rain", generator=dice(), output_type=kind, **options).frames for kind in ("np", "pt", "pil")
        )
        assert arrays.shape == (1, 5, HEIGHT, WIDTH, 3)
        assert np.allclose(arrays, tensors.permute(0, 1, 3, 4, 2).numpy(), atol=1e-6)
        assert 0 <= arrays.min() < arrays.max() <= 1
        assert len(images) == 1
        assert len(images[0]) == 5
        assert images[0][0].size == (WIDTH, HEIGHT)
        (in_tuple,) = pipe("rain", generator=dice(), return_dict=False, **options)
        assert np.array_equal(in_tuple, arrays)

    def test_callback_sees_changes_and_stops(self) -> None:
        pipe = tiny_pipeline(with_branch=False)
        clean = pipe.encode_frames(video(5)[None])
        steps: list[int] = []

        def callback(
            pipe: CameraVideoPipeline, step: int, timestep: Tensor, tensors: dict[str, Tensor]
        ) -> dict[str, Tensor]:
            assert set(tensors) == {"latents", "prompt_embeds"}
            assert torch.equal(tensors["latents"][:, :, :2], clean)
            steps.append(step)
            if step == 1:
                pipe._interrupt = True
            return {"latents": torch.full_like(tensors["latents"], 7.0)}

        latents = latents_of(
            pipe,
            "rain",
            prefix=video(5),
            num_inference_steps=4,
            callback_on_step_end=callback,
            callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
        )
        assert steps == [0, 1]
        assert (latents[:, :, 2:] == 7.0).all()
        assert torch.equal(latents[:, :, :2], clean)

    def test_callback_may_change_the_text(self) -> None:
        pipe = tiny_pipeline(with_branch=False)
        silence = lambda pipe, step, timestep, tensors: {"prompt_embeds": 0 * tensors["prompt_embeds"]}  # noqa: E731
        options = {"callback_on_step_end": silence, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
        plain = latents_of(pipe, "rain")
        assert (latents_of(pipe, "rain", **options) - plain).abs().max() > 1e-4
        assert torch.equal(
            latents_of(pipe, "rain", num_inference_steps=1, **options), latents_of(pipe, "rain", num_inference_steps=1)
        )

    def test_callback_may_end_guidance(self) -> None:
        """diffusers' dynamic guidance: a scale of 0 from some step on leaves the prompt, not the negative prompt."""
        pipe = tiny_pipeline(with_branch=False)
        wan = WanPipeline(**pipe.components, expand_timesteps=True)
        wan.set_progress_bar_config(disable=True)

        def end(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            pipe._guidance_scale = 0.0
            return tensors

        options = {"negative_prompt": "night", "guidance_scale": 4.0, "callback_on_step_end": end}
        expected = wan("rain", **{**SHORT, **options}, generator=dice(), output_type="latent").frames
        assert (latents_of(pipe, "rain", **options) - expected).abs().max() < 1e-5

    def test_lora_acts_beside_a_branch(self, tmp_path: Path) -> None:
        trained = tiny_pipeline(with_branch=False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        trained.transformer.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        layers = get_peft_model_state_dict(trained.transformer)
        CameraVideoPipeline.save_lora_weights(tmp_path, transformer_lora_layers=layers)
        pipe = tiny_pipeline()
        plain = latents_of(pipe, "rain", drive(13))
        pipe.load_lora_weights(tmp_path)
        assert (latents_of(pipe, "rain", drive(13)) - plain).abs().max() > 1e-3
        assert torch.equal(latents_of(pipe, "rain", drive(13), attention_kwargs={"scale": 0.0}), plain)

    def test_noise_can_be_given(self) -> None:
        pipe = tiny_pipeline(with_branch=False)
        noise = torch.randn(1, 4, 4, 2, 4, generator=dice())
        given = latents_of(pipe, "rain", latents=noise, generator=None)
        assert torch.equal(given, latents_of(pipe, "rain"))
        assert not torch.equal(given, latents_of(pipe, "rain", generator=dice(1)))

    def test_model_offload_changes_nothing(self) -> None:
        """accelerate's hooks in diffusers' order, here with the CPU on both sides."""
        pipe = tiny_pipeline()
        options = {**SHORT, "output_type": "pt"}
        expected = pipe("a street", drive(13), video(9), generator=dice(), **options).frames
        pipe.enable_model_cpu_offload(device="cpu")
        frames = pipe("a street", drive(13), video(9), generator=dice(), **options).frames
        torch.testing.assert_close(frames, expected, rtol=0.0, atol=1e-5)  # the VAE goes chunk by chunk then
