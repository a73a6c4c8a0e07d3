"""Streams: block by block the numbers of the whole clip, for ever, with a memory that does not grow."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_pipelines import HEIGHT, LENS, SIZE, WIDTH, euler, pixel_pipeline, tiny_pipeline, tiny_vae, video
from torch import Tensor
from torch.testing import assert_close

from merope.adapters.causal_wan import attach_causal
from merope.attention.visible_cameras import Visibility
from merope.generate.block_noise import OF_THE_PAST, block_noise
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.stream import CameraStream
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole, UnifiedCamera
from tests.generate.tiny_streams import ANY_SIZE, PREFIX, TWO_STEPS, begun, model, next_poses, path


@pytest.fixture(scope="module")
def pipe() -> CameraVideoPipeline:
    return model()


def latents_of_blocks(stream: CameraStream, blocks: int, cameras: bool = True) -> Tensor:
    made = []
    for _ in range(blocks):
        stream.drive(next_poses(stream) if cameras else None)
        made.append(stream.latents)
    return torch.cat(made, dim=2)


def whole_clip(
    pipe: CameraVideoPipeline,
    blocks: int,
    cameras: Cameras | None,  # of all latent frames
    past_noise: float = 0.0,
    **options: Any,
) -> Tensor:  # [1, C, 3 · blocks, h, w]
    """The same blocks, each by forwards over the whole clip so far: finished frames before it, nothing cached."""
    done = pipe.encode_frames(video(PREFIX)[None])
    text, finished = torch.zeros(1, 1, 8), []
    for number in range(blocks):
        latents = block_noise(0, number, (1, 4, 3, *done.shape[-2:]))
        frames, tokens = done.shape[2] + 3, done.shape[3] // 2 * (done.shape[4] // 2)
        attention: dict[str, Any] = {"sees": Visibility.block_causal(frames, **options)}
        if cameras is not None:
            attention["cameras"] = cameras.at(slice(frames))
        pipe.scheduler.set_timesteps(2)
        pipe.scheduler.set_begin_index(0)
        for timestep in pipe.scheduler.timesteps:
            levels = torch.full((frames,), 1000 * past_noise)
            levels[:3], levels[-3:] = 0.0, timestep
            with torch.no_grad():
                velocity = pipe.transformer(
                    torch.cat((done, latents), dim=2),
                    levels.repeat_interleave(tokens)[None],
                    text,
                    attention_kwargs=attention,
                    return_dict=False,
                )[0][:, :, -3:]
            latents = pipe.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        finished.append(latents)
        cover = block_noise(0, number, latents.shape, OF_THE_PAST)
        done = torch.cat((done, (1 - past_noise) * latents + past_noise * cover), dim=2)
    return torch.cat(finished, dim=2)


class TestBlocks:
    @pytest.mark.parametrize("window", [15, 100])
    @pytest.mark.parametrize("with_branch", [True, False])
    def test_are_the_whole_clip_with_the_same_noise(self, window: int, with_branch: bool) -> None:
        pipe = model(with_branch)
        given = {} if with_branch else {"cameras": None, "lens": None}
        made = latents_of_blocks(begun(pipe, window=window, **given), 4, with_branch)
        cameras = Cameras(path(PREFIX + 48)[::4], LENS) if with_branch else None
        assert_close(made, whole_clip(pipe, 4, cameras), **ANY_SIZE)

    def test_are_the_whole_clip_with_a_window(self, pipe: CameraVideoPipeline) -> None:
        made = latents_of_blocks(begun(pipe, window=6, sink=0), 4)
        assert_close(made, whole_clip(pipe, 4, Cameras(path(PREFIX + 48)[::4], LENS), last=6), **ANY_SIZE)

    def test_are_the_whole_clip_whose_past_has_noise(self, pipe: CameraVideoPipeline) -> None:
        made = latents_of_blocks(begun(pipe, window=15, past_noise=0.3), 4)
        cameras = Cameras(path(PREFIX + 48)[::4], LENS)
        assert_close(made, whole_clip(pipe, 4, cameras, past_noise=0.3), **ANY_SIZE)
        without = whole_clip(pipe, 4, cameras)
        assert_close(made[:, :, :3], without[:, :, :3], **ANY_SIZE)  # after true frames
        assert (made[:, :, 3:] - without[:, :, 3:]).abs().amax() > 1e-2

    def test_join_without_a_seam(self, pipe: CameraVideoPipeline) -> None:
        stream = begun(pipe)
        clean, frames, latents = pipe.encode_frames(video(PREFIX)[None]), [], []
        for _ in range(3):
            frames.append(stream.drive(next_poses(stream)))
            latents.append(stream.latents)
        assert [len(block) for block in frames] == [12, 12, 12]
        whole = pipe.decode_latents(torch.cat((clean, *latents), dim=2))[0].permute(1, 2, 3, 0)
        of_blocks = torch.cat(frames).float() / 127.5 - 1
        assert (whole[PREFIX:] - of_blocks).abs().max() < 0.5 / 127.5 + 1e-4  # bytes
        assert stream.frames == PREFIX + 36

    def test_are_guided_by_text(self) -> None:
        guided = tiny_pipeline(scheduler=euler())
        texts = {"prompt": "a street at night", "negative_prompt": "rain"}
        frames = {scale: begun(guided, **texts, guidance_scale=scale).drive(path(12, PREFIX)) for scale in (1.0, 3.0)}
        assert not torch.equal(frames[1.0], frames[3.0])
        assert len(begun(guided, **texts, guidance_scale=3.0)._state.caches) == 2

    def test_need_no_vae_and_no_prefix(self) -> None:
        pixels = pixel_pipeline()
        stream = pixels.stream(lens=LENS, **SIZE, **TWO_STEPS, guidance_scale=1.0)
        for _ in range(2):
            assert stream.block_frames == 3
            assert stream.drive(next_poses(stream)).shape == (3, HEIGHT, WIDTH, 3)

    def test_begin_with_nine_frames_where_there_is_no_prefix(self, pipe: CameraVideoPipeline) -> None:
        stream = begun(pipe, prefix=None, cameras=None, **SIZE)
        assert stream.block_frames == 9
        first, second = (stream.drive(next_poses(stream)) for _ in range(2))
        assert (len(first), len(second)) == (9, 12)

    def test_do_not_depend_on_where_the_world_begins(self, pipe: CameraVideoPipeline) -> None:
        near, far = begun(pipe), begun(pipe, cameras=path(PREFIX, offset_m=1e6))
        near.drive(path(12, PREFIX))
        far.drive(path(12, PREFIX, offset_m=1e6))
        assert_close(far.latents, near.latents, rtol=1e-4, atol=1e-4)

    def test_leave_other_calls_of_the_pipeline_alone(self) -> None:
        pipe = model()
        call = {**SIZE, "num_frames": 13, "num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "latent"}
        cameras = Cameras(path(13), LENS)

        def clip() -> Tensor:
            return pipe(cameras=cameras, generator=torch.Generator().manual_seed(0), **call).frames

        before = clip()
        stream = begun(pipe)
        stream.drive(next_poses(stream))
        assert torch.equal(clip(), before)


@pytest.mark.parametrize("with_branch", [True, False])
def test_whole_clips_of_the_pipeline_may_be_causal(with_branch: bool) -> None:
    pipe = model(with_branch)
    attach_causal(pipe.transformer)
    call = {**SIZE, "num_frames": 21, "guidance_scale": 1.0, "output_type": "latent", **TWO_STEPS}
    noise = torch.randn(1, 4, 6, 2, 4)
    later = torch.cat((noise[:, :, :3], -noise[:, :, 3:]), dim=2)
    sees = {"sees": Visibility.block_causal(6)}
    cameras = Cameras(path(21), LENS) if with_branch else None
    one, other = (
        pipe(cameras=cameras, latents=start, attention_kwargs=sees, **call).frames for start in (noise, later)
    )
    assert torch.equal(one[:, :, :3], other[:, :, :3])
    assert not torch.allclose(one[:, :, 3:], other[:, :, 3:], rtol=1e-2)


class TestForEver:
    def test_memory_is_flat(self, pipe: CameraVideoPipeline) -> None:
        stream = begun(pipe, window=6, sink=3, num_inference_steps=1)
        live, states = [], []
        for block in range(60):
            stream.drive(next_poses(stream))
            if block in (20, 40, 59):
                live.append(live_bytes())
            states.append(stream._state.caches[0].bytes)
        assert len(set(states[2:])) == 1
        assert max(live) - min(live) <= 0.01 * min(live)
        assert stream.frames == PREFIX + 720

    def test_a_block_depends_on_its_window_alone(self, pipe: CameraVideoPipeline) -> None:
        """The same frames in the cache, after any number of forgotten ones, give the same next block."""
        stream = begun(pipe, window=6, sink=0)
        poses = next_poses(stream)
        usual = stream.drive(poses)
        stream.undo()
        late = tuple(replace(cache, count=3_000_003) for cache in stream._state.caches)
        stream._state = replace(stream._state, caches=late)
        assert torch.equal(stream.drive(poses), usual)


def live_bytes() -> int:
    """Of all tensors that anyone holds."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is Tensor and not x.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class TestCameras:
    def test_that_jump_50_m_are_what_the_whole_clip_makes_of_them(self, pipe: CameraVideoPipeline) -> None:
        stream = begun(pipe)
        jumped = path(PREFIX + 12)
        jumped[PREFIX:, 0, 3] += 50.0
        stream.drive(jumped[PREFIX:])
        assert_close(stream.latents, whole_clip(pipe, 1, Cameras(jumped[::4], LENS)), **ANY_SIZE)

    def test_may_change_their_lens(self, pipe: CameraVideoPipeline) -> None:
        wide = Pinhole(30.0, 30.0, WIDTH / 2, HEIGHT / 2, WIDTH, HEIGHT)
        stream = begun(pipe)
        stream.drive(Cameras(path(12, PREFIX), wide))
        focal = torch.tensor([50.0] * 3 + [30.0] * 3)
        both = Pinhole(focal, focal, WIDTH / 2, HEIGHT / 2, WIDTH, HEIGHT)
        assert_close(stream.latents, whole_clip(pipe, 1, Cameras(path(PREFIX + 12)[::4], both)), **ANY_SIZE)
        stream.drive(next_poses(stream))

    def test_that_do_not_fit_are_refused_and_change_nothing(self, pipe: CameraVideoPipeline) -> None:
        stream = begun(pipe)
        broken = path(12, PREFIX)
        broken[5, 0, 3] = float("nan")
        fisheye = UnifiedCamera.from_fov(150.0, 1.5, WIDTH, HEIGHT)
        small = Pinhole(50.0, 50.0, 8.0, 8.0, 16, 16)
        for given, message in (
            (broken, "world_from_camera.*finite"),
            (
                path(11, PREFIX),
                r"cameras must be 12, one for each of the block's RGB frames, got \[11\]; stream",
            ),
            (path(12)[None], r"cameras must be 12, .*got \[1, 12\]"),
            (None, "cameras must be given to a model with a camera branch"),
            ("left", "cameras must be poses .*got str"),
            (Cameras(path(12), fisheye), "lens must be a Pinhole 64×32 as before, got UnifiedCamera 64×32; its param"),
            (Cameras(path(12), small), "lens must be for images of 64×32, got 16×16"),
        ):
            with pytest.raises(ValueError, match=message):
                stream.drive(given)
        assert torch.equal(stream.drive(path(12, PREFIX)), begun(pipe).drive(path(12, PREFIX)))

    def test_alone_need_a_lens(self, pipe: CameraVideoPipeline) -> None:
        with pytest.raises(ValueError, match="lens must be known for poses that come alone"):
            begun(pipe, lens=None)
        stream = begun(pipe, lens=None, cameras=Cameras(path(PREFIX), LENS))
        assert len(stream.drive(Cameras(path(12, PREFIX), LENS))) == 12

    def test_are_refused_without_a_branch(self) -> None:
        with pytest.raises(ValueError, match="cameras must be None for a model without a camera branch"):
            begun(model(with_branch=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix": video(10), "cameras": path(10)}, "prefix must be 9, 21, 33, … frames, whole blocks of 3 latent"),
        ({"prefix": video(5), "cameras": path(5)}, "prefix must be 9, 21, .*got 5; use 9"),
        ({"prefix": None}, "cameras must be None without a prefix"),
        ({"height": 64}, "prefix must be of 64×64, the size of the video, got 64×32"),
        ({"window": 2}, "window must be an int ≥ 3, got 2"),
        ({"sink": -1}, "sink must be an int ≥ 0, got -1"),
        ({"num_inference_steps": 0}, "num_inference_steps must be an int ≥ 1, got 0"),
        ({"seed": 0.5}, "seed must be an int ≥ 0, got 0.5"),
        ({"prompt": "a street"}, "prompt must be None for a model without a text encoder"),
        ({"guidance_scale": 5.0}, "guidance_scale must be at most 1 for a model without a text encoder"),
    ],
)
def test_what_cannot_begin_is_refused(pipe: CameraVideoPipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        begun(pipe, **options)


def test_tiles_are_refused() -> None:
    pipe, tiled = model(), tiny_vae()
    tiled.enable_tiling()
    pipe.vae = tiled
    with pytest.raises(ValueError, match="vae must be without tiling"):
        begun(pipe)


@pytest.mark.parametrize("history", ["sa", "ca"])
def test_a_model_with_history_streams_without_references(history: str) -> None:
    pipe = model(history=history)
    made = latents_of_blocks(begun(pipe), 2)
    assert_close(made, whole_clip(pipe, 2, Cameras(path(PREFIX + 24)[::4], LENS)), **ANY_SIZE)
