"""Clips that are kept as latents: made once, the same for any split over ranks, shared by runs, and trained on."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor

from merope.adapters.attachment import load_branch
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.cameras import Cameras
from merope.train.clip_pool import RENDERED_AT_ONCE, Growth
from merope.train.config import TrainConfig
from merope.train.latent_pool import LatentPool, PooledStream, encoder_digest
from merope.train.loop import train
from merope.train.streams import Examples, Share
from merope.world.clips import HELD_OUT_SEEDS, WorldClips
from merope.world.clips_file import read_clips
from merope.world.kept_renders import KeptRenders
from tests.tiny_pipelines import miniature_vae
from tests.train.tiny_runs import tiny_config

CPU = torch.device("cpu")
CLIPS = WorldClips(frames=5, height=16, width=32, prefix_frames=1)
HALF = 2e-3  # of a latent of about 1, kept with 11 bits


def thumbnails(frames: Tensor) -> Tensor:  # uint8 [B, T, H, W, 3] -> [B, 3, T, H / 8, W / 8]
    """Stands for a VAE: what matters here is when it is called and with what."""
    return (frames.float() / 255.0).unflatten(2, (-1, 8)).unflatten(4, (-1, 8)).mean(dim=(3, 5)).permute(0, 4, 1, 2, 3)


def pool(size: int = 40, kept: KeptRenders | None = None, clips: WorldClips = CLIPS) -> LatentPool:
    return LatentPool(clips, size, thumbnails, CPU, kept)


def stream(rank: int = 0, ranks: int = 1, clips: WorldClips = CLIPS, growth: Growth | None = None) -> PooledStream:
    share, growth = Share(rank, ranks, 2), growth or Growth(16, 8.0, 40)
    common = (clips, 5, 4, share, torch.zeros(1, 8), CPU)
    return PooledStream(*common, encode=thumbnails, pool=pool(clips=clips), growth=growth)


def by_place(parts: list[Examples]) -> dict[int, tuple[str, Tensor, Tensor]]:
    return {
        place: (part.names[k], part.clean[k], part.cameras.world_from_camera[k])
        for part in parts
        for k, place in enumerate(part.places)
    }


def test_clips_are_those_of_their_worlds() -> None:
    clips = pool()
    clips.fill(20)
    seeds = [clips.seed(number) for number in (3, 17)]
    latents, poses = clips.drawn([3, 17])
    cameras = CLIPS.cameras(seeds)
    torch.testing.assert_close(latents[:, 0], thumbnails(CLIPS.pictures(seeds, cameras)), rtol=0, atol=HALF + 1 / 255)
    assert torch.equal(poses, cameras.world_from_camera)
    assert min(seeds) >= HELD_OUT_SEEDS


def test_clips_are_made_once_and_no_more_than_needed() -> None:
    counts: list[int] = []

    def counted(frames: Tensor) -> Tensor:
        counts.append(len(frames))
        return thumbnails(frames)

    clips = LatentPool(CLIPS, 40, counted, CPU)
    for wanted in (1, 16, 17, 40, 40, 99):
        clips.fill(wanted)
    assert counts == [RENDERED_AT_ONCE, RENDERED_AT_ONCE, 8]
    assert clips.made == len(clips.latents) == 40


MIXED = WorldClips(frames=5, height=16, width=32, prefix_frames=1, fov_deg=(60.0, 120.0), xi=(0.0, 1.0))


@pytest.mark.parametrize("clips", [CLIPS, MIXED], ids=["one lens", "many lenses"])
def test_any_split_over_ranks_and_any_start_give_the_same_clips(clips: WorldClips) -> None:
    whole, resumed = stream(clips=clips), stream(clips=clips)
    steps = [by_place(list(whole.step(step))) for step in range(4)]
    split = by_place([part for rank in (0, 1) for part in stream(rank, 2, clips).step(3)])
    later = by_place(list(resumed.step(3)))
    for other in (split, later):
        assert other.keys() == steps[3].keys() == {0, 1, 2, 3}
        for place, (name, clean, poses) in steps[3].items():
            assert other[place][0] == name
            assert torch.equal(other[place][1], clean)
            assert torch.equal(other[place][2], poses)


def test_steps_draw_from_what_there_is_and_never_from_held_out_worlds() -> None:
    clips = stream()
    for step in range(40):
        there = clips.growth.at(step)
        seeds = [int(name.split()[1]) for part in clips.step(step) for name in part.names]
        assert all(HELD_OUT_SEEDS <= seed < HELD_OUT_SEEDS + there for seed in seeds)
    assert all(int(name.split()[1]) < HELD_OUT_SEEDS for part in clips.held_out(4) for name in part.names)


def test_held_out_clips_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clips, fresh = stream(), stream()
    first = list(clips.held_out(4))
    monkeypatch.setattr(WorldClips, "pictures", None)
    again = list(clips.held_out(4))
    monkeypatch.undo()
    for other in (again, list(fresh.held_out(4))):
        assert [part.names for part in other] == [part.names for part in first]
        assert all(torch.equal(a.clean, b.clean) for a, b in zip(first, other, strict=True))
    assert sum(len(part.names) for part in clips.held_out(8)) == 8


def test_two_runs_share_what_one_of_them_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptRenders(tmp_path, "one VAE")
    first, second = pool(kept=kept), pool(kept=kept)
    first.fill(16)

    def fail(*_: object) -> Tensor:
        raise AssertionError("it was made before")

    second.encode = fail
    monkeypatch.setattr(WorldClips, "path", fail)
    second.fill(16)
    monkeypatch.undo()
    for made, found in zip(first.drawn([4]), second.drawn([4]), strict=True):
        assert torch.equal(made, found)
    other = pool(kept=replace(kept, encoder="another VAE"))
    other.encode = fail
    with pytest.raises(AssertionError, match="made before"):
        other.fill(16)


def test_a_run_makes_other_clips_while_another_run_is_at_some(tmp_path: Path) -> None:
    kept, alone = KeptRenders(tmp_path, "one VAE"), pool()
    alone.fill(40)
    first_file = tmp_path / f"{kept._digest(CLIPS, [LatentPool.seed(number) for number in range(16)])}.safetensors"
    beside = pool(kept=kept)
    with ThreadPoolExecutor(1) as thread:
        with FileLock(first_file.with_suffix(".lock")):
            filled = thread.submit(beside.fill, 40)
            until = time.monotonic() + 20.0
            while len(list(tmp_path.glob("*.safetensors"))) < 4:  # latents and drives of the two other groups
                assert time.monotonic() < until
                time.sleep(0.01)
            assert not first_file.exists()
        filled.result(20.0)
    assert first_file.exists()
    for made, found in zip(alone.drawn(list(range(40))), beside.drawn(list(range(40))), strict=True):
        assert torch.equal(made, found)


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae") / "vae"
    miniature_vae().save_pretrained(folder)
    return folder


def latent_config(vae: Path, out: Path, *changes: str) -> TrainConfig:
    """A model of 48 channels over latents [4, 3, 4, 6], in 2 × 3 tokens a frame."""
    sizes = ("model.architecture.in_channels=4", "model.architecture.out_channels=4")
    clips = ("data.frames=9", "data.height=32", "data.width=48", "objective.prefix_frames=5")
    pool = ("data.worlds=3", "data.first_worlds=2", "data.worlds_per_step=8")
    patches = "model.architecture.patch_size=[1,2,2]"
    return tiny_config(out, f"model.vae={vae}", *sizes, *clips, *pool, patches, "run.steps=4", *changes)


def test_a_model_of_latents_is_trained_and_driven(vae_folder: Path, tmp_path: Path) -> None:
    config = latent_config(vae_folder, tmp_path, "run.export_precision=bf16", "run.validate_every=2")
    config = replace(config, run=replace(config.run, validation_clips=2))
    trained = train(config) / "trained"
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert "validation_loss" in rows[-1]
    weights = load_file(trained / "transformer" / "diffusion_pytorch_model.safetensors")
    assert weights["blocks.0.ffn.net.2.weight"].dtype == torch.bfloat16
    assert weights["blocks.0.scale_shift_table"].dtype == torch.float32
    pipeline = CameraVideoPipeline.from_pretrained(trained, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    load_branch(pipeline.transformer, trained / "branch")
    clips = config.data.clips(5)
    cameras = clips.cameras([1])
    prefix = clips.pictures([1], cameras)[:, :5]
    video = pipeline(
        cameras=cameras,
        prefix=prefix,
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=1.0,
        output_type="pt",
    ).frames
    assert video.shape == (1, 9, 3, 32, 48)
    assert read_clips(trained) == (clips, config.run.sample_steps)
    assert torch.isfinite(video).all()


def test_a_run_in_pieces_is_a_run_at_once(vae_folder: Path, tmp_path: Path) -> None:
    losses = []
    for name, pieces in (("whole", (4,)), ("pieces", (2, 4))):
        for steps in pieces:
            train(latent_config(vae_folder, tmp_path / name, f"run.steps={steps}"))
        rows = (tmp_path / name / "log.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_while_its_pool_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Thousands of worlds take minutes, and there is nothing to save before the first step."""
    rendered: list[int] = []
    pictures = WorldClips.pictures

    def signalled(self: WorldClips, seeds: list[int], cameras: Cameras) -> Tensor:
        rendered.extend(seeds)
        os.kill(os.getpid(), number)
        return pictures(self, seeds, cameras)

    monkeypatch.setattr(WorldClips, "pictures", signalled)
    before = signal.signal(number, signal.default_int_handler)  # the default for SIGTERM would end the tests
    try:
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(tmp_path, "data.worlds=40", "data.first_worlds=40", "run.steps=1"))
    finally:
        signal.signal(number, before)
    assert len(rendered) == RENDERED_AT_ONCE


def test_training_goes_on_from_what_it_wrote(vae_folder: Path, tmp_path: Path) -> None:
    trained = train(latent_config(vae_folder, tmp_path / "first")) / "trained"
    config = latent_config(vae_folder, tmp_path / "second")
    model = replace(config.model, vae=None, pretrained=str(trained), pretrained_branch=trained / "branch")
    again = train(replace(config, model=model)) / "trained"
    assert {file.name for file in again.iterdir()} == {file.name for file in trained.iterdir()}
    assert (again / "vae").is_dir()
    for folder in (trained, again):  # what is written does not say where its parts came from
        assert not any("_name_or_path" in file.read_text() for file in folder.rglob("*.json"))


def test_the_encoder_is_told_by_its_weights(vae_folder: Path) -> None:
    one, other = (AutoencoderKLWan.from_pretrained(vae_folder) for _ in range(2))
    assert encoder_digest(one) == encoder_digest(other)
    with torch.no_grad():
        next(other.encoder.parameters()).view(-1)[0] += 1e-3
    assert encoder_digest(one) != encoder_digest(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.first_worlds=4", r"data.first_worlds must be in \[1, data.worlds = 3\], got 4"),
        ("data.worlds_per_step=-1", "data.worlds_per_step must be at least 0, got -1"),
        ("model.pretrained=somewhere", "model.vae must be left out with model.pretrained"),
        ("model.vae=nowhere", "model.vae must be the folder of an AutoencoderKLWan, got nowhere"),
        ("model.architecture.in_channels=3", "transformer.in_channels must be 4, the VAE's latents, got 3"),
        ("data.height=36", "height must be a multiple of 16, the pixels of a token, got 36"),
        ("data.frames=8", r"num_frames must be 4k \+ 1 frames, got 8"),
    ],
)
def test_what_does_not_fit_is_refused(vae_folder: Path, tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(latent_config(vae_folder, tmp_path, change))
