"""Retrieved history through the pipeline, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from history_models import PATHS, references, run_with, wan_with
from scenes import random_poses, straight_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH, dice, drive, tiny_pipeline, video
from torch import Tensor
from wan_models import cameras, perturb, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.attachment import attach
from merope.adapters.branch_config import CameraBranchConfig
from merope.adapters.history import HistoryReferences
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.history_frames import HistoryFrames
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole


class TestPipeline:
    """The tiny TI2V pipeline: 13 RGB frames are 4 latent ones of one row of two tokens."""

    def pipeline(self, path: str | None) -> CameraVideoPipeline:
        transformer = tiny_wan(num_layers=2)
        perturb(attach(transformer, tiny_config(history=path)))
        return tiny_pipeline(with_branch=False, transformer=transformer)

    def frames(self, seed: int = 0, **changes: Any) -> HistoryReferences:
        poses = straight_drive(2, step_m=2.0) @ random_poses(2, seed=seed, spread_m=0.3)
        given = {"frames": video(2, seed=40 + seed), "cameras": Cameras(poses, LENS), "matched": (1, 3)}
        return HistoryFrames(**{**given, **changes})

    def latents(self, pipe: CameraVideoPipeline, **options: Any) -> Tensor:
        size = {"height": HEIGHT, "width": WIDTH, "num_frames": 13, "num_inference_steps": 2, "output_type": "latent"}
        return pipe("a street", drive(13), video(5), generator=dice(), **{**size, **options}).frames

    @pytest.mark.parametrize("path", PATHS)
    def test_history_guides_what_is_generated_and_leaves_the_prefix(self, path: str) -> None:
        pipe = self.pipeline(path)
        one, other, none = (self.latents(pipe, history=h) for h in (self.frames(0), self.frames(1), None))
        assert one.shape == none.shape == (1, 4, 4, HEIGHT // 16, WIDTH // 16)
        assert torch.equal(one[:, :, :2], none[:, :, :2])
        assert (one - other)[:, :, 2:].abs().max() > 1e-5
        assert (one - none)[:, :, 2:].abs().max() > 1e-5
        encoded = self.frames(0).encoded(pipe.encode_frames)
        assert torch.equal(self.latents(pipe, history=encoded), one)

    def test_images_are_encoded_one_by_one(self) -> None:
        pipe, history = self.pipeline("ca"), self.frames()
        encoded = history.encoded(pipe.encode_frames)
        assert encoded.latents.shape == (1, 4, 2, HEIGHT // 16, WIDTH // 16)
        for index in range(2):
            alone = pipe.encode_frames(video(2, seed=40)[None, index : index + 1])
            assert (encoded.latents[:, :, index : index + 1] - alone).abs().max() < 1e-6
        assert encoded.moments.tolist() == [101.0, 103.0]

    @pytest.mark.parametrize("path", PATHS)
    def test_every_clip_may_have_its_own(self, path: str) -> None:
        pipe, one, two = self.pipeline(path), self.frames(0), self.frames(1)
        poses = torch.stack([history.cameras.world_from_camera for history in (one, two)])
        images = torch.stack([video(2, seed=40), video(2, seed=41)])
        both = HistoryFrames(images, Cameras(poses, LENS), (1, 3))
        text = {"num_inference_steps": 1, "guidance_scale": 1.0}
        noise = torch.randn(1, 4, 4, HEIGHT // 16, WIDTH // 16, generator=dice())
        inputs = {"height": HEIGHT, "width": WIDTH, "num_frames": 13, "output_type": "latent", **text}
        prompts = ["a street", "a street"]
        batch = pipe(prompts, drive(13), video(5), history=both, latents=noise.repeat(2, 1, 1, 1, 1), **inputs).frames
        for index, history in enumerate((one, two)):
            alone = pipe("a street", drive(13), video(5), history=history, latents=noise, **inputs).frames
            assert (batch[index : index + 1] - alone).abs().max() < 1e-4

    def test_a_compiled_model_takes_it(self) -> None:
        torch._dynamo.reset()
        pipe = self.pipeline("sa")
        plain = self.latents(pipe, history=self.frames())
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
        assert (self.latents(pipe, history=self.frames()) - plain).abs().max() < 1e-4
        torch._dynamo.reset()

    def test_what_does_not_fit_is_refused_first(self) -> None:
        pipe = self.pipeline("sa")
        small = Pinhole(10.0, 10.0, 8.0, 8.0, 16, 16)
        poses = self.frames().cameras.world_from_camera
        for changes, message in (
            ({"frames": video(2, height=16, width=16)}, r"history.frames.*64×32"),
            ({"cameras": Cameras(poses, small)}, r"history.cameras.lens.*64×32"),
            ({"frames": video(2, height=64, width=32)}, r"history.frames.*64×32.*got 32×64"),
            ({"matched": (1, 4)}, r"history.matched.*\[0, 4\)"),
            ({"matched": (-1, 3)}, r"history.matched.*\[0, 4\)"),
            ({"matched": (1, 2, 3)}, r"history.times.*2 references"),
            ({"frames": video(3)}, r"history.cameras.*3 references"),
            ({"frames": video(2).float()}, r"history.frames.*uint8"),
        ):
            with pytest.raises(ValueError, match=message):
                self.latents(pipe, history=self.frames(**changes))
        three = self.frames(frames=video(6).unflatten(0, (3, 2)))
        with pytest.raises(ValueError, match=r"history.*one set for all clips"):
            self.latents(pipe, history=three)
        size = {"height": HEIGHT, "width": WIDTH, "num_frames": 13}
        without_branch = tiny_pipeline(with_branch=False)
        for model, video_cameras in ((self.pipeline(None), drive(13)), (without_branch, None)):
            with pytest.raises(ValueError, match=r"history.*takes none"):
                model("a street", video_cameras, history=self.frames(), **size)


class TestRefusals:
    def test_images_that_nobody_encoded(self) -> None:
        """A model of pixels would take bytes for latents."""
        good = references()
        images = replace(good, latents=torch.zeros(1, 4, 2, 4, 6, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"history\.latents must be latents, got images; call history\.encoded"):
            run_with(wan_with("sa"), images)

    def test_a_branch_without_history(self) -> None:
        with pytest.raises(ValueError, match=r"history.*branch without history.*CameraBranchConfig\(history="):
            run_with(wan_with(None), references())

    def test_times_beyond_the_rotary_table(self) -> None:
        transformer = tiny_wan(num_layers=2, rope_max_seq_len=64)
        attach(transformer, tiny_config(history="sa"))
        with pytest.raises(ValueError, match=r"rope_max_seq_len = 64.*got 102"):
            run_with(transformer, references())

    def test_times_between_latent_frames(self) -> None:
        with pytest.raises(ValueError, match=r"history.times.*whole latent frames"):
            run_with(wan_with("sa"), references(times=(100.5, 102.0)))
        run_with(wan_with("ca"), references(times=(100.5, 102.0)))

    def test_shapes(self) -> None:
        good = references()
        for change, message in (
            ({"latents": good.latents[0]}, r"history.latents.*\[batch, channels"),
            ({"cameras": None}, r"history.cameras.*2 references"),
            ({"times": (100.0,)}, r"history.times.*2 references"),
            ({"times": (100.0, float("nan"))}, r"history.times.*finite"),
            ({"times": ((100.0, 101.0),) * 3}, r"history.times.*batch"),
        ):
            parts = {"latents": good.latents, "cameras": good.cameras, "times": good.times}
            with pytest.raises(ValueError, match=message):
                HistoryReferences(**{**parts, **change})

    def test_another_size_or_batch(self) -> None:
        good = references()
        for latents, message in (
            (good.latents[..., :4], r"channels, rows, columns \[4, 4, 6\]"),
            (good.latents.repeat(3, 1, 1, 1, 1), r"divides the video's 2"),
        ):
            with pytest.raises(ValueError, match=message):
                run_with(wan_with("ca"), HistoryReferences(latents, good.cameras, good.times))

    def test_not_a_history(self) -> None:
        with pytest.raises(ValueError, match=r"merope.adapters.history.HistoryReferences.*Tensor"):
            run_with(wan_with("ca"), references().latents)

    def test_beside_cameras_made_ready(self) -> None:
        transformer = tiny_wan(num_layers=2)
        branch = attach(transformer, tiny_config(history="ca"))
        ready = branch.prepare(cameras(), tiny_inputs()["hidden_states"])
        with pytest.raises(ValueError, match=r"pass history to branch.prepare"):
            run_with(transformer, references(), ready)

    def test_configs(self) -> None:
        with pytest.raises(ValueError, match=r"history must be 'sa' or 'ca' or none, got 'yes'"):
            CameraBranchConfig(history="yes")  # type: ignore[arg-type]
        for options in ({"encoding": "rayrope"}, {"integration": "rerope"}):
            with pytest.raises(ValueError, match=r'history "ca".*geometric'):
                CameraBranchConfig(history="ca", **options)  # type: ignore[arg-type]
