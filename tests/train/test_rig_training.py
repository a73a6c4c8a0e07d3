"""Training on rigs: of the procedural world, of nuScenes and from a cache; and driving what was trained."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nuscenes_rigs import add_camera

from merope.adapters.attachment import attached_branch
from merope.adapters.branch_config import CameraBranchConfig
from merope.bench.generated import load_trained
from merope.cli import main
from merope.datasets.cache import CachedSource
from merope.datasets.videos import VideoSource, read_video_rows
from merope.formats import read
from merope.formats.video import read_video
from merope.train.build import build_stream, world_clips
from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.train.losses import clip_losses
from merope.train.model import build_model
from merope.train.objective import VALIDATION, add_noise, clip_generator
from merope.train.parallel import Ranks
from merope.train.toml_config import read_config
from tests.tiny_pipelines import HEIGHT, WIDTH
from tests.train.test_caching import cached_config
from tests.train.test_clip_streams import write_videos
from tests.train.tiny_files import file_config
from tests.train.tiny_runs import SMALLER

CPU = torch.device("cpu")
RIG = Path(__file__).parents[2] / "configs" / "tiny-rig.toml"
TWO_VIEWS = ("data.rig_yaw_deg=[0, 55]", "data.rig_fov_deg=[70, 100]")
SHORT = (*SMALLER, "run.batch_size=2", "run.steps=2", "run.sample_every=2", "run.sample_steps=2", "data.frames=3")


def rig_config(out: Path, *changes: str) -> TrainConfig:
    return read_config(TrainConfig, RIG, [*SHORT, f"run.out={out}", *changes])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = rig_config(tmp_path_factory.mktemp("rig"))
    train(config)
    return config


def test_the_config_trains_on_six_views_and_what_it_trained_drives_them(trained: TrainConfig) -> None:
    assert (trained.run.out / "samples" / "step-00000002.mp4").stat().st_size > 1000
    clips = world_clips(trained)
    assert clips.views == 6
    cameras, prefix = clips.cameras([1]), torch.zeros(6, 2, 16, 24, 3, dtype=torch.uint8)
    options = {"height": 16, "width": 24, "num_frames": 3, "num_inference_steps": 1, "guidance_scale": 1.0}
    made = load_trained(trained, CPU)(cameras=cameras, prefix=prefix, output_type="pt", **options).frames
    assert made.shape == (6, 3, 3, 16, 24)


def test_what_was_trained_on_the_front_camera_drives_all_six(tmp_path: Path, trained: TrainConfig) -> None:
    front = ("data.rig_yaw_deg=[0]", "data.rig_fov_deg=[]", "data.rig_offset_m=0.0", "run.sample_every=0")
    config = rig_config(tmp_path, *front)
    train(config)
    options = {"height": 16, "width": 24, "num_frames": 3, "num_inference_steps": 1, "guidance_scale": 1.0}
    made = load_trained(config, CPU)(cameras=world_clips(trained).cameras([1, 2]), output_type="pt", **options).frames
    assert made.shape == (12, 3, 3, 16, 24)


def test_the_loss_of_a_clip_is_the_mean_of_its_views(tmp_path: Path) -> None:
    """Where views do not see each other: what each would have as a clip, with the level and the noise of its own."""
    config = rig_config(tmp_path, *TWO_VIEWS, "branch.across_views=false", "run.micro_batch=2")
    model = build_model(config, CPU, sharded=False)
    stream = build_stream(config, model, Ranks(0, 1, CPU))
    (examples,) = stream.step(0)
    assert (examples.clean.shape[0], len(examples.places), examples.cameras.views) == (4, 2, 2)
    dice = [clip_generator(config.run.seed, 0, place, CPU) for place in examples.places]
    noised = add_noise(examples.clean, model.prefix, config.objective, dice)
    assert torch.equal(noised.sigma[0], noised.sigma[1])
    assert not torch.equal(noised.sigma[0], noised.sigma[2])
    assert not torch.equal(noised.target[0] + noised.past[0], noised.target[1] + noised.past[1])
    with torch.no_grad():
        losses = clip_losses(config, model, examples, 0)
        text = examples.text.repeat_interleave(2, 0)
        made = model.predicted(noised, text, examples.cameras.by_view())
    error = (made - noised.target).square().mean((1, 3, 4))[:, model.prefix :].mean(1)
    torch.testing.assert_close(losses, error.reshape(2, 2).mean(1))


def test_pools_of_latents_hold_all_views(tmp_path: Path) -> None:
    config = rig_config(tmp_path, *TWO_VIEWS, "data.worlds=2", "data.first_worlds=2", "run.micro_batch=2")
    model = build_model(config, CPU, sharded=False)
    stream = build_stream(config, model, Ranks(0, 1, CPU))
    (examples,) = stream.step(0)
    assert tuple(examples.clean.shape) == (4, 3, 3, 16, 24)
    assert tuple(examples.cameras.world_from_camera.shape) == (2, 6, 4, 4)
    assert not torch.equal(examples.clean[0], examples.clean[1])


@pytest.mark.parametrize(
    "change",
    ["objective.causal_block_frames=1", "parallel.context=2", 'branch.integration="rerope"'],
)
def test_what_takes_one_view_is_refused_before_a_model_is_read(tmp_path: Path, change: str) -> None:
    options = ("branch.encoding_options={}",) if "rerope" in change else ()
    with pytest.raises(ValueError, match="with a rig of 6 views must be left out"):
        rig_config(tmp_path, *options, change)


def test_an_epipolar_mask_is_refused_before_a_model_is_read(tmp_path: Path) -> None:
    branch = CameraBranchConfig(integration="epipolar", encoding="camco")
    with pytest.raises(ValueError, match='integration = "epipolar" with a rig of 6 views must be left out'):
        replace(rig_config(tmp_path), branch=branch)


def test_a_rig_of_nuscenes_trains_from_frames_and_from_a_cache(tiny_files: Path, tmp_path: Path) -> None:
    root = tmp_path / "files"
    shutil.copytree(tiny_files, root)
    (root / "tiny.toml").write_text((root / "tiny.toml").read_text().replace(str(tiny_files), str(root)))
    add_camera(root / "nuscenes", "v1.0-mini", "CAM_BACK", skew_us=20_000)
    cameras = 'data.cameras=["CAM_FRONT", "CAM_BACK"]'
    config = file_config(root, tmp_path / "run", cameras)
    for name, flags in (("train", []), ("val", ["--validation"])):
        out = ["--out", str(tmp_path / "cache" / name), "--set", cameras]
        assert main(["data", "cache", str(root / "tiny.toml"), *out, *flags]) == 0
    clip = CachedSource.open(tmp_path / "cache" / "train").clip(0)
    assert (clip.views, clip.latents.shape[0]) == (2, 2)
    model = build_model(config, CPU, sharded=False)
    branch = attached_branch(model.transformer)
    assert branch is not None
    torch.nn.init.normal_(next(iter(branch.processors().values())).cam_out.weight)
    ranks = Ranks(0, 1, CPU)
    again = cached_config(root, tmp_path / "cache", tmp_path / "cached")
    losses = []
    for run in (config, again):
        examples = build_stream(run, model, ranks).example()
        assert (examples.cameras.views, examples.cameras.moments, examples.clean.shape[0]) == (2, 5, 2)
        with torch.no_grad():
            losses.append(clip_losses(run, model, examples, VALIDATION))
    torch.testing.assert_close(*losses, rtol=2e-2, atol=1e-3)  # a cache is in bfloat16


def test_rows_of_several_videos_are_rigs(tmp_path: Path) -> None:
    write_videos(tmp_path)
    row = {"id": "both", "video": ["0.mp4", "1.mp4"], "poses": ["0.json", "1.json"], "start": 2}
    (tmp_path / "rig.jsonl").write_text(json.dumps(row) + "\n")
    source = VideoSource(read_video_rows(tmp_path / "rig.jsonl"), tmp_path, 5, HEIGHT, WIDTH)
    clip = source.clip(0)
    assert (clip.views, clip.cameras().moments) == (2, 5)
    torch.testing.assert_close(clip.world_from_camera[5:], read(tmp_path / "1.json").world_from_camera[2:7])
    torch.testing.assert_close(source.trajectory(0).world_from_camera, clip.world_from_camera[:5])
    assert clip.frames is not None
    assert torch.equal(clip.frames[5:], read_video(tmp_path / "1.mp4", range(2, 7), HEIGHT, WIDTH))
    assert source.doubts() == []
    (tmp_path / "rig.jsonl").write_text(json.dumps(row | {"poses": ["0.json"]}) + "\n")
    with pytest.raises(ValueError, match="video and poses of both must be one file each, or as many of both"):
        read_video_rows(tmp_path / "rig.jsonl")
