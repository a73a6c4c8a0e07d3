"""Whole clips of a causal model, by `merope generate` and `merope demo`: its stream, cut to the clip's length."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from latent_folder import CLIPS, write_latent_model
from scenes import curved_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH, video
from torch import Tensor

from merope import formats
from merope.adapters.attachment import detach, load_branch
from merope.adapters.causal_wan import attach_causal
from merope.attention.visible_cameras import Visibility
from merope.bench.generated import generate_clips
from merope.cli import main
from merope.demo.drive import DemoConfig, generated, loaded
from merope.formats.rig_file import write_rig
from merope.formats.video import read_video, write_video
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.causal_clips import held, streamed_clip
from merope.geometry.cameras import Cameras
from merope.geometry.rigs import ring
from merope.world.commanded import FIRST_TEST_SEED, WorldTest, clips_of_world
from tests.generate.generate_files import path_of

BLOCK, LEVELS = 2, [1.0, 0.75]
FRAMES = 17  # 5 that are given, a block of 8, and half a block


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says that it is causal and wants two steps, a path and a video."""
    root = tmp_path_factory.mktemp("causal")
    write_latent_model(root / "model")
    index = root / "model" / "model_index.json"
    trained = {"causal_block_frames": BLOCK, "denoising_levels": LEVELS}
    index.write_text(json.dumps(json.loads(index.read_text()) | trained))
    formats.write(path_of(curved_drive(FRAMES, step_m=0.4), rate_hz=12.0, lens=LENS), root / "bend.json")
    write_video(video(5), root / "street.mp4", 12.0)
    return root


def read(files: Path) -> CameraVideoPipeline:
    pipe: CameraVideoPipeline = CameraVideoPipeline.from_pretrained(files / "model", dtype=torch.float32)
    load_branch(pipe.transformer, files / "model" / "branch")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def by_hand(pipe: CameraVideoPipeline, poses: Tensor, prefix: Tensor, seed: int) -> Tensor:  # uint8 [T, H, W, 3]
    """A stream whose blocks see everything, its last camera held."""
    poses = torch.cat((poses, poses[-1:].expand(12, 4, 4)))
    options = {"guidance_scale": 1.0, "seed": seed, "window": 99}
    stream = pipe.stream(prefix=prefix, cameras=poses[:5], lens=LENS, **options)
    frames = [prefix]
    while stream.frames < FRAMES:
        frames.append(stream.drive(poses[stream.frames : stream.frames + 8]))
    return torch.cat(frames)[:FRAMES]


def generate(files: Path, out: Path, **options: object) -> int:
    given = {"model": files / "model", "branch": files / "model" / "branch", "trajectory": files / "bend.json"}
    given |= {
        "prefix": files / "street.mp4",
        "prefix-frames": 5,
        "frames": FRAMES,
        "seed": 3,
        "out": out,
        "fps": 12,
    } | options
    line = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return main(["generate", *line, "--size", str(HEIGHT), str(WIDTH)])


def test_generate_makes_a_clip_block_by_block(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []
    monkeypatch.setattr("merope.generate.command.write_video", lambda frames, *args: written.append(frames))
    assert generate(files, tmp_path / "clip.mp4") == 0
    assert json.loads((tmp_path / "clip.json").read_text())["settings"]["steps"] == 2
    path, prefix = formats.read(files / "bend.json"), read_video(files / "street.mp4", list(range(5)), HEIGHT, WIDTH)
    assert torch.equal(written[0], by_hand(read(files), path.world_from_camera, prefix, seed=3))
    assert generate(files, tmp_path / "clip.mp4", **{"prefix-frames": 9}) == 2
    message = "--prefix-frames must be 5, 13, 21, … frames, whole blocks of 2 latent frames, got 9"
    assert message in capsys.readouterr().err


def test_a_rig_is_refused(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rig(ring((0, 60), LENS, 0.5, ("front", "right")), tmp_path / "rig.json")
    for view in ("front", "right"):
        shutil.copy(files / "street.mp4", tmp_path / f"first-{view}.mp4")
    prefix = tmp_path / "first-{view}.mp4"
    assert generate(files, tmp_path / "clip.mp4", rig=tmp_path / "rig.json", prefix=prefix) == 2
    assert "--rig must be left out for this model" in capsys.readouterr().err


def test_a_seed_below_0_is_refused_before_weights_are_read(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CameraVideoPipeline, "from_pretrained", None)  # calling it would be another error
    assert generate(files, tmp_path / "clip.mp4", seed=-1) == 2
    assert "--seed must be at least 0 for this model, got -1; each block" in capsys.readouterr().err


def test_the_demo_drives_it_block_by_block(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = DemoConfig(out=tmp_path, model=files / "model", device="cpu", seed=5)
    paths = WorldTest().paths(config.clips, config.world_seed)
    (clip, *_) = clips_of_world(paths, config.clips, config.world_seed, torch.device("cpu"))
    made = generated(loaded(config.model, config.run_device), clip, config, "1 of 3")
    options = {"num_inference_steps": 2, "guidance_scale": 1.0, "seed": 5}
    expected = streamed_clip(read(files), CLIPS.frames, clip.cameras, clip.true[: CLIPS.prefix_frames], **options)
    assert torch.equal(made, expected)
    assert "step 2 of 2" in capsys.readouterr().err


def test_a_stream_takes_the_steps_and_levels_that_the_model_was_trained_for(files: Path) -> None:
    pipe, seen = read(files), []
    assert pipe.denoising_levels == LEVELS
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(float(kwargs["timestep"][0])), with_kwargs=True
    )
    options = {"lens": LENS, "height": HEIGHT, "width": WIDTH, "guidance_scale": 1.0}
    pipe.stream(**options).drive(curved_drive(5))
    assert seen == [1000.0, 750.0, 0.0]  # two steps, and the pass that makes the keys
    seen.clear()
    pipe.stream(**options, num_inference_steps=3).drive(curved_drive(5))  # an explicit number wins
    pipe.scheduler.set_timesteps(3)
    assert seen == [*pipe.scheduler.timesteps.tolist(), 0.0]


def test_the_last_camera_is_held() -> None:
    cameras = Cameras(curved_drive(5), LENS)
    last = held(cameras, 3, 4)
    assert torch.equal(last.world_from_camera, cameras.world_from_camera[[3, 4, 4, 4]])


@pytest.mark.parametrize("with_cameras", [True, False])
def test_the_benchmark_streams_its_clips(files: Path, with_cameras: bool) -> None:
    test = WorldTest(1, steps=len(LEVELS))
    paths = {"original": CLIPS.path(FIRST_TEST_SEED)}
    (clip,) = commanded = clips_of_world(paths, CLIPS, FIRST_TEST_SEED, torch.device("cpu"))
    pipe = read(files)
    if not with_cameras:
        detach(pipe.transformer)
    given, prefix = clip.cameras if with_cameras else None, CLIPS.prefix_frames
    made = generate_clips(pipe, commanded, test, prefix, with_cameras)[clip.name]
    options = {"guidance_scale": 1.0, "seed": clip.seed}
    assert torch.equal(made, streamed_clip(pipe, CLIPS.frames, given, clip.true[:prefix], **options))
    latents = generate_clips(pipe, commanded, test, prefix, with_cameras, "latent")[clip.name]
    decoded = pipe.decode_latents(latents[None].float())[0].permute(1, 2, 3, 0)
    assert (127.5 * (decoded + 1) - made).abs()[prefix:].mean() < 1.0  # latents are kept in float16


def test_a_causal_model_is_not_shown_the_future(files: Path) -> None:
    pipe, cameras = read(files), Cameras(curved_drive(9, step_m=0.4), LENS)
    call = {"cameras": cameras, "height": HEIGHT, "width": WIDTH, "num_frames": 9, "guidance_scale": 1.0}
    with pytest.raises(ValueError, match=r"one that sees whole clips, got a causal model of blocks of 2 latent frames"):
        pipe(**call)
    attach_causal(pipe.transformer)
    sees = {"sees": Visibility.block_causal(3, block=BLOCK)}
    assert pipe(**call, attention_kwargs=sees, num_inference_steps=1).frames.shape == (1, 9, HEIGHT, WIDTH, 3)
