"""Teacher forcing: one pass over two copies of a clip is every block after clean ones, and a run is like any other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapters.wan_models import perturb
from adapters.wan_models import tiny_config as branch_config
from safetensors.torch import load_file
from scenes import curved_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH, euler, tiny_pipeline, video
from torch import Tensor
from torch.testing import assert_close

from merope.adapters.attachment import attached_branch, detach, load_branch
from merope.adapters.causal_wan import ready_block
from merope.adapters.key_cache import KeyCache
from merope.commands.models import _driving_command
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.strides import VideoStrides
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, parameters
from merope.train.build import build_stream
from merope.train.config import ModelSection, TrainConfig
from merope.train.loop import train
from merope.train.losses import clip_losses
from merope.train.model import Model, build_model
from merope.train.objective import Noised, add_noise, clip_generator, loss_per_clip
from merope.train.parallel import Ranks
from merope.train.samples import generated_latents, video_bytes
from merope.train.streams import Examples
from merope.train.toml_config import read_config
from tests.train.tiny_files import file_config
from tests.train.tiny_runs import tiny_config

CPU, STEP = torch.device("cpu"), 3


def causal_config(out: Path, *changes: str) -> TrainConfig:
    """Pixels: clips of three blocks of two frames, the first one clean."""
    blocks = ("objective.causal_block_frames=2", "objective.prefix_frames=2", "data.frames=6")
    return tiny_config(out, "run.micro_batch=2", *blocks, *changes)


def latent_config(out: Path, start: Path, *changes: str) -> TrainConfig:
    """Latents of four frames, from a bidirectional model: clips of 21 frames in two blocks of three latent frames."""
    blocks = ("objective.causal_block_frames=3", "objective.prefix_frames=9", "data.frames=21", "run.batch_size=2")
    config = tiny_config(out, *blocks, f"data.height={HEIGHT}", f"data.width={WIDTH}", *changes)
    model = ModelSection(str(start), pretrained_branch=start / "branch", trainable="all", precision="fp32")
    return replace(config, model=model, branch=branch_config())


@pytest.fixture(scope="module")
def bidirectional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained bidirectional model."""
    folder = tmp_path_factory.mktemp("bidirectional")
    pipe = tiny_pipeline(with_text=False, scheduler=euler())
    detach(pipe.transformer).save_pretrained(folder / "branch")
    pipe.save_pretrained(folder)
    return folder


def perturbed_model(config: TrainConfig) -> Model:
    """A fresh branch adds nothing: no camera would matter."""
    model = build_model(config, CPU, sharded=False)
    branch = attached_branch(model.transformer)
    if branch is not None:
        perturb(branch)
    return model


def first_examples(config: TrainConfig, model: Model) -> Examples:
    return next(iter(build_stream(config, model, Ranks(0, 1, CPU)).step(STEP)))


def noised_as_in_training(config: TrainConfig, model: Model, examples: Examples) -> Noised:
    dice = [clip_generator(config.run.seed, STEP, place, CPU) for place in examples.places]
    return add_noise(examples.clean, model.prefix, config.objective, dice)


@torch.no_grad()
def streamed_prediction(model: Model, noised: Noised, examples: Examples) -> Tensor:  # [B, C, T, H, W]
    """Every noisy block before a cache of the blocks of the past, one after the other."""
    block, stride = model.causal_block_frames, model.pipeline.strides.frames
    assert block is not None
    posed = examples.cameras.at(slice(None, None, stride)) if model.has_branch else None
    cache, made = KeyCache(window=100, block=block), []
    for start in range(0, noised.past.shape[2], block):
        own = slice(start, start + block)
        past, noisy = noised.past[:, :, own], noised.latents[:, :, own]
        ready = ready_block(model.transformer, cache, past, None if posed is None else posed.at(own))
        level, given = 1000 * noised.sigma[:, start], {"past": ready}
        made.append(model.transformer(noisy, level, examples.text, attention_kwargs=given, return_dict=False)[0])
        reading = ready.reading(cache, keep=True)  # as `commit`, at the level of the past
        level, given = 1000 * noised.past_sigma, {"past": reading}
        model.transformer(past, level, examples.text, attention_kwargs=given, return_dict=False)
        cache = cache.after(reading.reader.kept(block, ready.given))
    return torch.cat(made, dim=2)


def assert_one_pass_is_the_stream(config: TrainConfig) -> None:
    model = perturbed_model(config)
    examples = first_examples(config, model)
    noised = noised_as_in_training(config, model, examples)
    expected = loss_per_clip(streamed_prediction(model, noised, examples), noised)
    assert_close(clip_losses(config, model, examples, STEP), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "changes", [(), ("branch=none",), ("objective.prefix_dropout=1.0",), ("objective.past_noise=0.9",)]
)
def test_one_pass_is_every_block_after_clean_ones(tmp_path: Path, changes: tuple[str, ...]) -> None:
    assert_one_pass_is_the_stream(causal_config(tmp_path, *changes))


def test_so_it_is_from_a_bidirectional_model_of_latents(tmp_path: Path, bidirectional: Path) -> None:
    assert_one_pass_is_the_stream(latent_config(tmp_path, bidirectional))


def test_a_later_block_changes_no_earlier_loss(tmp_path: Path) -> None:
    config = causal_config(tmp_path)
    model = perturbed_model(config)
    examples = first_examples(config, model)

    def errors_of_blocks(clean: Tensor) -> Tensor:  # [B, blocks]
        given = replace(examples, clean=clean)
        noised = noised_as_in_training(config, model, given)
        with torch.no_grad():
            made = model.predicted(noised, given.text, given.cameras)
        return (made - noised.target).square().mean(dim=(1, 3, 4)).unflatten(1, (3, 2)).mean(2)

    changed = examples.clean.clone()
    changed[:, :, 4:] *= -1
    before, after = errors_of_blocks(examples.clean), errors_of_blocks(changed)
    assert_close(after[:, :2], before[:, :2], rtol=1e-6, atol=0)
    assert ((after[:, 2] - before[:, 2]).abs() > 1e-3).all()
    changed = examples.clean.clone()
    changed[:, :, :2] *= -1  # what came before matters
    assert ((errors_of_blocks(changed)[:, 1:] - before[:, 1:]).abs() > 1e-5).all()


def test_checkpointed_blocks_have_the_same_gradients(tmp_path: Path) -> None:
    found = []
    for checkpointed in ("false", "true"):
        config = causal_config(tmp_path, f"model.gradient_checkpointing={checkpointed}")
        model = perturbed_model(config)
        clip_losses(config, model, first_examples(config, model), STEP).sum().backward()
        found.append([parameter.grad for parameter in model.transformer.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        assert_close(recomputed, plain, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, bidirectional: Path) -> Path:
    """A short run, with everything that runs have: validation, samples, a moving average."""
    out = tmp_path_factory.mktemp("causal")
    options = ("run.steps=3", "run.validation_clips=1", "run.validate_every=3", "run.sample_every=3")
    train(latent_config(out, bidirectional, *options, "run.sample_steps=2", "optimiser.ema_decay=0.5"))
    return out


def log_rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_a_sample_is_streamed(tmp_path: Path, trained: Path) -> None:
    assert (trained / "samples" / "step-00000003.mp4").stat().st_size > 0
    assert log_rows(trained)[-1]["validation_loss"] > 0
    train(causal_config(tmp_path, "run.steps=16", "optimiser.learning_rate=3e-3"))
    losses = [row["loss"] for row in log_rows(tmp_path)]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_stopping_and_going_on_changes_nothing(tmp_path: Path, trained: Path, bidirectional: Path) -> None:
    options = ("run.steps=1", "run.sample_steps=2", "optimiser.ema_decay=0.5")
    parts = latent_config(tmp_path, bidirectional, *options)
    train(parts)
    train(replace(parts, run=replace(parts.run, steps=3)))
    assert [row["loss"] for row in log_rows(tmp_path)] == [row["loss"] for row in log_rows(trained)]
    for file in ("branch", "transformer"):
        name = f"trained/{file}/diffusion_pytorch_model.safetensors"
        whole, again = load_file(trained / name), load_file(tmp_path / name)
        assert [key for key in whole if not torch.equal(whole[key], again[key])] == []
    bidirectional_run = replace(parts, objective=replace(parts.objective, causal_block_frames=None))
    with pytest.raises(ValueError, match=r"objective\.causal_block_frames: 3 before, None now"):
        train(bidirectional_run)


def test_the_exported_folder_streams_with_its_blocks(tmp_path: Path, trained: Path, bidirectional: Path) -> None:
    pipe = CameraVideoPipeline.from_pretrained(trained / "trained")
    assert pipe.causal_block_frames == 3
    branch = load_branch(pipe.transformer, trained / "trained" / "branch")
    assert branch.config["base_model"] == ""  # not the folder that training began with: all weights changed
    pipe.set_progress_bar_config(disable=True)
    given = {"prefix": video(9), "cameras": curved_drive(9), "lens": LENS}
    stream = pipe.stream(**given, num_inference_steps=1, guidance_scale=1.0)
    assert stream.settings.block == 3
    assert stream.drive(curved_drive(21)[9:]).shape == (12, HEIGHT, WIDTH, 3)
    assert CameraVideoPipeline.from_pretrained(bidirectional).causal_block_frames is None
    other = CameraVideoPipeline.from_pretrained(bidirectional)  # a branch that was trained alone says so, too
    load_branch(other.transformer, trained / "trained" / "branch")
    assert other.causal_block_frames == 3
    assert other.stream(**given | {"prefix": None, "cameras": None}, guidance_scale=1.0).settings.block == 3
    command = _driving_command(latent_config(tmp_path, bidirectional), trained / "trained")
    assert command.startswith(f"merope drive --model {trained / 'trained'} --world 0 --keys")


def test_blocks_of_another_size_are_kept_too(tmp_path: Path) -> None:
    train(causal_config(tmp_path, "run.steps=1"))
    pipe = CameraVideoPipeline.from_pretrained(tmp_path / "trained")
    load_branch(pipe.transformer, tmp_path / "trained" / "branch")
    stream = pipe.stream(height=16, width=24, guidance_scale=1.0)
    assert (stream.settings.block, stream.block_frames) == (2, 2)


def picked_lens(cameras: Cameras) -> Lens:
    """Of the only clip."""
    lens = cameras.lens
    return replace(lens, **{name: value.flatten()[0] for name, value in parameters(lens).items()})


def test_a_sample_is_what_a_stream_makes_of_the_clip(tmp_path: Path, bidirectional: Path) -> None:
    config = latent_config(tmp_path, bidirectional)
    model = build_model(config, CPU, sharded=False)
    model.pipeline.set_progress_bar_config(disable=True)
    examples = first_examples(config, model)
    true = video_bytes(model.pipeline.decode_latents(examples.clean))[0]
    made = generated_latents(model, examples, true[None], steps=2)
    assert torch.equal(made[:, :, :3], examples.clean[:, :, :3])
    poses, lens = examples.cameras.world_from_camera[0], picked_lens(examples.cameras)
    stream = model.pipeline.stream(
        None, true[:9], poses[:9], lens, window=6, sink=0, num_inference_steps=2, guidance_scale=1.0
    )
    stream.drive(poses[9:])
    assert_close(made[:, :, 3:], stream.latents)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("data.frames=7",),
            r"data\.frames must be 2, 4, 6, … frames, whole blocks of 2 latent frames, got 7; use 6 or 8",
        ),
        (("objective.prefix_frames=1",), r"objective\.prefix_frames must be 2, 4, 6, .*got 1; use 2"),
        (("objective.causal_block_frames=0",), r"objective\.causal_block_frames must be at least 1, got 0"),
        (("parallel.context=2",), r"parallel\.context with objective\.causal_block_frames must be 1, got 2"),
        (
            ("branch.history=sa", "history.frames=1", "run.micro_batch=1"),
            r"\[history\] with objective\.causal_block_frames must be left out",
        ),
    ],
)
def test_what_cannot_be_causal_is_refused(tmp_path: Path, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(causal_config(tmp_path, *changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"integration": "additive", "encoding": "plucker"}, 'integration must be "parallel" for a causal model'),
        ({"encoding": "rayrope"}, "encoding must be one that does not read tokens, for a causal model"),
    ],
)
def test_branches_without_a_causal_form_are_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    config = causal_config(tmp_path)
    with pytest.raises(ValueError, match=message):
        train(replace(config, branch=replace(config.branch, encoding_options={}, **changes)))


def test_clips_of_files_must_fill_blocks(tmp_path: Path, tiny_files: Path) -> None:
    config = file_config(tiny_files, tmp_path, "objective.causal_block_frames=2", "objective.prefix_frames=0")
    with pytest.raises(ValueError, match=r"data\.frames must be 5, 13, 21, .* of 2 latent frames, got 9; use 5 or 13"):
        train(replace(config, data=replace(config.data, frames=9)))


@pytest.mark.parametrize("name", ["miniature-causal", "nuscenes-wan22-5b-causal"])
def test_clips_of_the_configs_fill_their_blocks(name: str) -> None:
    config = read_config(TrainConfig, Path(name))
    strides = VideoStrides(frames=4, pixels=16, patch_rows=2, patch_columns=2)
    sources = getattr(config.data, "sources", [config.data])
    for count in (*(data.frames for data in sources), config.objective.prefix_frames):
        strides.check_blocks("frames", count, 3)
    assert config.objective.causal_block_frames == 3
