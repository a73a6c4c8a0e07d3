"""Few steps a block: a rollout is a stream, a student that does as its teacher has no loss, and another one learns."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from merope.adapters.attachment import load_branch
from merope.generate.block_noise import block_noise
from merope.generate.camera_video import CameraVideoPipeline
from merope.train.build import build_stream
from merope.train.config import TrainConfig
from merope.train.few_steps import BlockClips, few_step_losses, rolled_out
from merope.train.loop import train, train_step, validate
from merope.train.model import build_model
from merope.train.objective import noise_levels
from merope.train.optimisers import build_optimisers
from merope.train.parallel import Ranks
from merope.train.samples import only_clip
from merope.train.toml_config import read_config
from merope.world.clips_file import read_clips
from tests.train.ranks import run_ranks
from tests.train.test_causal_training import causal_config

CPU = torch.device("cpu")
LEVELS = [1.0, 0.75]  # two steps, shift 3


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a causal model of pixels that has learnt a little: blocks of two frames."""
    out = tmp_path_factory.mktemp("causal")
    train(causal_config(out, "run.steps=6", "optimiser.learning_rate=3e-3"))
    return out / "trained"


def few_step_config(causal: Path, out: Path, *changes: str) -> TrainConfig:
    start = (f"model.pretrained={causal}", f"model.pretrained_branch={causal / 'branch'}")
    taught = ("distillation.steps=2", "distillation.teacher_steps=4", "run.micro_batch=4", "run.sample_every=0")
    return causal_config(out, *start, *taught, *changes)


def log_rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_rollout_is_what_a_stream_makes(causal: Path, tmp_path: Path) -> None:
    config = few_step_config(causal, tmp_path)
    model = build_model(config, CPU, sharded=False)
    examples = build_stream(config, model, Ranks(0, 1, CPU)).example()
    true = ((examples.clean[0].permute(1, 2, 3, 0) + 1) * 127.5).round().to(torch.uint8)
    cameras = only_clip(examples.cameras)
    model.pipeline.set_progress_bar_config(disable=True)
    stream = model.pipeline.stream(
        prefix=true[:2], cameras=cameras.at(slice(2)), window=9, sink=0, guidance_scale=1.0, prompt_embeds=examples.text
    )
    made = []
    for first in (2, 4):
        stream.drive(cameras.at(slice(first, first + 2)))
        made.append(stream.latents)
    clean = examples.clean.clone()
    clean[:, :, :2] = model.pipeline.encode_frames(true[None, :2])
    noise = torch.cat([clean[:, :, :2], *(block_noise(0, n, (1, 3, 2, 16, 24)) for n in range(2))], dim=2)
    states = rolled_out(model.transformer, BlockClips(clean, noise, examples.text, examples.cameras, 2, 2), LEVELS)
    assert_close(states[-1][:, :, 2:], torch.cat(made, dim=2), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(state[:, :, :2], clean[:, :, :2]) for state in states)


def test_a_rollout_after_a_given_past_does_not_see_its_own_blocks(causal: Path, tmp_path: Path) -> None:
    config = few_step_config(causal, tmp_path)
    model = build_model(config, CPU, sharded=False)
    examples = build_stream(config, model, Ranks(0, 1, CPU)).example()
    noise = torch.randn(examples.clean.shape, generator=torch.Generator().manual_seed(0))
    clips = BlockClips(examples.clean, noise, examples.text, examples.cameras, 2, 2)
    other = replace(clips, noise=noise.clone())
    other.noise[:, :, 2:4] += 1.0  # of the first block that is made

    def last_block(made_of: BlockClips, past: torch.Tensor | None) -> torch.Tensor:
        return rolled_out(model.transformer, made_of, LEVELS, past)[-1][:, :, 4:]

    assert torch.equal(last_block(clips, examples.clean), last_block(other, examples.clean))
    assert not torch.allclose(last_block(clips, None), last_block(other, None), atol=1e-5)
    own = rolled_out(model.transformer, clips, LEVELS)[-1]
    assert torch.equal(last_block(clips, own), last_block(clips, None))


class Saved:
    """Bytes that graphs hold for their backward pass: now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> "Saved.Held":
        return Saved.Held(self, tensor)

    class Held:
        def __init__(self, count: "Saved", tensor: torch.Tensor) -> None:
            self.count, self.tensor = count, tensor.detach()  # or an output would hold its own graph
            count.now += tensor.nbytes
            count.most = max(count.most, count.now)

        def __del__(self) -> None:
            self.count.now -= self.tensor.nbytes


def test_validation_with_gradients_holds_the_graph_of_one_step_at_a_time(causal: Path, tmp_path: Path) -> None:
    config = few_step_config(causal, tmp_path, "run.validation_clips=4", "run.batch_size=4")
    model, ranks = build_model(config, CPU, sharded=False), Ranks(0, 1, CPU)
    stream, compiled = build_stream(config, model, ranks), replace(config, model=replace(config.model, compile=True))
    peaks = []
    for work in (
        lambda: train_step(config, model, stream, build_optimisers(config, model.learner), ranks, 0),
        lambda: validate(compiled, model, stream, ranks),
    ):
        saved = Saved()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
            work()
        peaks.append(saved.most)
    assert 0 < peaks[1] <= 1.01 * peaks[0]


def test_a_student_that_does_as_its_teacher_has_no_loss(causal: Path, tmp_path: Path) -> None:
    """As many steps as the teacher, which sees the same past."""
    for given, is_same in (
        (("distillation.teacher_steps=2",), True),
        (("distillation.teacher_steps=4",), False),
        (("distillation.teacher_steps=2", "distillation.past_noise=0.2"), False),
    ):
        config = few_step_config(causal, tmp_path, *given)
        model = build_model(config, CPU, sharded=False)
        examples = next(iter(build_stream(config, model, Ranks(0, 1, CPU)).step(0)))
        parts = list(few_step_losses(config, model, examples, 0))
        assert len(parts) == 2
        loss = torch.stack(parts).sum(0)
        assert (loss < 1e-9).all() if is_same else (loss > 1e-6).all()


@pytest.fixture(scope="module")
def distilled(causal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("few")
    options = ("run.steps=6", "run.validation_clips=4", "run.validate_every=6", "optimiser.ema_decay=0.5")
    train(few_step_config(causal, out, *options, "optimiser.learning_rate=2e-3"))
    return out


def test_it_comes_nearer_to_its_teacher(causal: Path, distilled: Path, tmp_path: Path) -> None:
    """On worlds that it was not trained on, against the loss of the teacher in as few steps."""
    options = ("run.steps=1", "run.validation_clips=4", "run.validate_every=1", "optimiser.learning_rate=1e-12")
    train(few_step_config(causal, tmp_path, *options))
    before = log_rows(tmp_path)[-1]["validation_loss"]
    after = next(row["validation_loss"] for row in log_rows(distilled) if "validation_loss" in row)
    assert after < 0.9 * before


def test_stopping_and_going_on_changes_nothing(causal: Path, distilled: Path, tmp_path: Path) -> None:
    options = ("run.steps=2", "optimiser.ema_decay=0.5", "optimiser.learning_rate=2e-3")
    parts = few_step_config(causal, tmp_path, *options)
    train(parts)
    train(replace(parts, run=replace(parts.run, steps=6)))
    assert [row["loss"] for row in log_rows(tmp_path)] == [row["loss"] for row in log_rows(distilled)]
    for file in ("branch", "transformer"):
        name = f"trained/{file}/diffusion_pytorch_model.safetensors"
        whole, again = load_file(distilled / name), load_file(tmp_path / name)
        assert [key for key in whole if not torch.equal(whole[key], again[key])] == []
    with pytest.raises(ValueError, match=r"distillation\.teacher_steps: 4 before, 8 now"):
        train(few_step_config(causal, tmp_path, *options, "distillation.teacher_steps=8"))


def learn(causal: Path, out: Path) -> None:
    smooth = ("optimiser.learning_rate=0.01", "optimiser.epsilon=0.01")  # updates in proportion to gradients
    train(few_step_config(causal, out, "run.steps=1", "run.micro_batch=2", *smooth))


def test_two_ranks_take_the_step_of_one(causal: Path, tmp_path: Path) -> None:
    learn(causal, tmp_path / "one")
    run_ranks(2, learn, causal, tmp_path / "two")
    for file in ("branch", "transformer"):
        name = f"trained/{file}/diffusion_pytorch_model.safetensors"
        one, two = load_file(tmp_path / "one" / name), load_file(tmp_path / "two" / name)
        for key, value in one.items():
            assert_close(two[key], value, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def test_the_exported_folder_says_how_it_is_driven(causal: Path, distilled: Path) -> None:
    pipe = CameraVideoPipeline.from_pretrained(distilled / "trained")
    assert pipe.denoising_levels == LEVELS
    load_branch(pipe.transformer, distilled / "trained" / "branch")
    options = {"height": 16, "width": 24, "guidance_scale": 1.0}
    stream = pipe.stream(**options)
    assert (stream.settings.steps, stream.settings.block) == (2, 2)
    assert pipe.stream(**options, num_inference_steps=7).settings.steps == 7
    assert read_clips(distilled / "trained")[1] == 2
    other = CameraVideoPipeline.from_pretrained(causal)  # a branch that was trained alone says so, too
    assert other.denoising_levels is None
    load_branch(other.transformer, distilled / "trained" / "branch")
    assert other.denoising_levels == LEVELS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("distillation.past_noise=1.0",), r"distillation\.past_noise must be at least 0 and below 1, got 1\.0"),
        (
            ("distillation.teacher_steps=3",),
            r"distillation\.teacher_steps must be a multiple of distillation\.steps = 2",
        ),
        (("objective.prefix_dropout=0.5",), r"objective\.prefix_dropout with \[distillation\] must be 0, got 0\.5"),
        (("objective.causal_block_frames=3", "objective.prefix_frames=3"), "a causal model with blocks of 3, got 2"),
    ],
)
def test_what_cannot_be_distilled_is_refused(
    causal: Path, tmp_path: Path, changes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(few_step_config(causal, tmp_path, *changes))


def test_a_model_to_distil_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.pretrained with \[distillation\] must be the causal model to distil"):
        causal_config(tmp_path, "distillation.steps=2", "distillation.teacher_steps=4")


@pytest.mark.parametrize("name", ["miniature-causal-few-steps", "nuscenes-wan22-5b-causal-few-steps"])
def test_configs_go_on_from_their_causal_runs(name: str) -> None:
    config, before = (read_config(TrainConfig, Path(each)) for each in (name, name.removesuffix("-few-steps")))
    assert config.model.pretrained_branch == before.run.out / "trained" / "branch"
    assert replace(config.objective) == before.objective
    assert config.distillation is not None
    assert noise_levels(config.distillation.steps, config.objective.shift)[0] == 1.0
