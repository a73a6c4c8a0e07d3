"""An adversary: a model that must pass a judge chooses one of several futures, and a run is like any other."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from merope.generate.camera_video import CameraVideoPipeline
from merope.train.adversary import LOSS, Blocks, Judge, judged_parts
from merope.train.build import build_stream
from merope.train.config import TrainConfig
from merope.train.loop import NonFiniteLoss, train
from merope.train.losses import clip_losses, loss_parts
from merope.train.model import build_model
from merope.train.objective import VALIDATION, Noised
from merope.train.parallel import Ranks
from merope.world.clips_file import read_clips
from tests.train.test_causal_training import causal_config

CPU, BLOCK = torch.device("cpu"), 2
LEVELS = [1.0, 0.5]


def judged_config(out: Path, *changes: str) -> TrainConfig:
    judged = ("adversary.judge_first=1", "objective.levels=[1.0, 0.5]", "run.micro_batch=4", "run.sample_every=0")
    return causal_config(out, *judged, *changes)


def noised_clips(clean: Tensor, level: float) -> Noised:
    """The first block given, the others at a noise level."""
    clips, frames = len(clean), clean.shape[2]
    generated = (torch.arange(frames) >= BLOCK).expand(clips, -1)
    sigma, noise = level * generated, torch.randn(clean.shape)
    latents = torch.lerp(clean, noise, sigma[:, None, :, None, None])
    return Noised(clean, torch.zeros(clips), latents, noise - clean, generated, BLOCK, sigma, torch.zeros(clips) > 0)


def flow_losses(prediction: Tensor, noised: Noised) -> Tensor:  # [B]
    return (prediction - noised.target)[:, :, noised.given :].square().mean((1, 2, 3, 4))


class Guesser(nn.Module):
    """Predicts a velocity from noise alone."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv3d(*sizes, 3, padding=1) for sizes in ((channels, 16), (16, channels)))

    def forward(self, noised: Noised) -> Tensor:
        made = self.layers[1](torch.relu(self.layers[0](noised.latents)))
        return made * noised.generated[:, None, :, None, None]


def size_of_guesses(weight: float) -> list[float]:
    """Mean size, step after step, of what is predicted from noise alone of blocks that are all 1 or all −1."""
    torch.manual_seed(0)
    guesser, judge, sizes = Guesser(2), Judge(2), []
    optimiser = torch.optim.AdamW([*guesser.parameters(), *judge.parameters()], lr=3e-3, betas=(0.5, 0.99))
    for _ in range(150):
        clean = torch.zeros(16, 2, 2 * BLOCK, 2, 2)
        clean[:, :, BLOCK:] = torch.randint(2, (16, 1, 1, 1, 1)) * 2.0 - 1.0
        noised = noised_clips(clean, 1.0)
        prediction, blocks = guesser(noised), Blocks(clean, noised, BLOCK)
        optimiser.zero_grad()
        nudges = torch.randn(2, *blocks.true.shape)
        for _, part in judged_parts(judge, blocks, noised, prediction, flow_losses(prediction, noised), weight, nudges):
            if part.requires_grad:
                part.mean().backward()
        optimiser.step()
        guesses = (noised.latents - prediction.detach())[:, :, BLOCK:].mean((1, 2, 3, 4))
        sizes.append(float(guesses.abs().mean()))
    return sizes


def test_one_of_two_futures_is_chosen() -> None:
    """The mean of both is 0, which no clip is."""
    mean_of_both, chosen = (median(size_of_guesses(weight)[75:]) for weight in (0.0, 1.0))
    assert mean_of_both < 0.25
    assert chosen > 0.4


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_value_and_gradient_of_what_the_model_learns(weight: float) -> None:
    torch.manual_seed(0)
    clean = torch.randn(3, 2, 3 * BLOCK, 4, 4)
    noised, judge = noised_clips(clean, 0.5), Judge(2)
    prediction = torch.randn_like(clean, requires_grad=True)
    flow, blocks = flow_losses(prediction, noised), Blocks(clean, noised, BLOCK)
    (own,) = torch.autograd.grad(flow.sum(), prediction, retain_graph=True)
    parts = judged_parts(judge, blocks, noised, prediction, flow, weight, torch.randn(2, *blocks.true.shape))
    name, first = next(parts)
    assert name == LOSS
    assert_close(first, flow)
    first.sum().backward()
    assert all(parameter.grad is None for parameter in judge.parameters())
    assert prediction.grad is not None
    aim = prediction.grad - own
    size, aim_size = (x[:, :, BLOCK:].square().sum((1, 3, 4)).sqrt() for x in (own, aim))
    assert_close(aim_size, weight * size, rtol=1e-4, atol=1e-6)
    assert not aim[:, :, :BLOCK].any()
    before = prediction.grad.clone()
    name, second = next(parts)
    second.sum().backward()
    assert name == "judge_loss"
    assert torch.equal(prediction.grad, before)
    assert all(parameter.grad is not None for parameter in judge.parameters())


def test_the_aim_is_to_be_taken_for_true() -> None:
    """A small step along it makes the judge prefer the true blocks less."""
    torch.manual_seed(0)
    clean = torch.randn(3, 2, 2 * BLOCK, 4, 4)
    noised, judge = noised_clips(clean, 0.5), Judge(2)
    prediction = torch.randn_like(clean, requires_grad=True)
    blocks = Blocks(clean, noised, BLOCK)
    nearly_flat, nudges = 1e-6 * prediction.square().sum((1, 2, 3, 4)), torch.zeros(2, *blocks.true.shape)
    _, part = next(judged_parts(judge, blocks, noised, prediction, nearly_flat, 1e6, nudges))
    (gradient,) = torch.autograd.grad(part.sum(), prediction)

    def verdict(velocity: Tensor) -> float:
        shown = blocks.of(noised.latents - noised.sigma[:, None, :, None, None] * velocity)
        return judge(shown, *blocks.beside).mean().item()

    step = 1e-2 * gradient / gradient.abs().max()
    assert verdict(prediction.detach() - step) > verdict(prediction.detach())


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("judged")
    train(judged_config(out, "run.steps=4", "optimiser.ema_decay=0.5", "optimiser.learning_rate=2e-3"))
    return out


def test_a_judge_works_in_fp32_beside_a_model_in_bf16(tmp_path: Path) -> None:
    """Its slope is a difference of verdicts that bf16 cannot tell."""
    config = judged_config(tmp_path, "model.precision=bf16", "adversary.judge_first=0")
    model = build_model(config, CPU, sharded=False)
    assert model.judge is not None
    made_of: set[torch.dtype] = set()
    model.judge.last.register_forward_hook(lambda _, inputs, verdict: made_of.update({inputs[0].dtype, verdict.dtype}))
    stream = build_stream(config, model, Ranks(0, 1, CPU))
    for examples in stream.step(0):
        parts = dict(loss_parts(config, model, examples, 0))
        assert parts["judge_loss"].mean() < 2.0
    assert made_of == {torch.float32}


def log_rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_stopping_and_going_on_changes_nothing(judged: Path, tmp_path: Path) -> None:
    """The judge goes on, too."""
    parts = judged_config(tmp_path, "run.steps=2", "optimiser.ema_decay=0.5", "optimiser.learning_rate=2e-3")
    train(parts)
    train(replace(parts, run=replace(parts.run, steps=4)))
    for name in ("loss", "judge_loss", "told_apart"):
        assert [row[name] for row in log_rows(tmp_path)] == [row[name] for row in log_rows(judged)]
    for file in ("branch", "transformer"):
        name = f"trained/{file}/diffusion_pytorch_model.safetensors"
        whole, again = load_file(judged / name), load_file(tmp_path / name)
        assert [key for key in whole if not torch.equal(whole[key], again[key])] == []


def test_what_is_exported_has_levels_and_no_judge(judged: Path) -> None:
    pipe = CameraVideoPipeline.from_pretrained(judged / "trained")
    assert pipe.denoising_levels == LEVELS
    assert read_clips(judged / "trained")[1] == len(LEVELS)
    named = load_file(judged / "trained/transformer/diffusion_pytorch_model.safetensors")
    assert set(named) == set(pipe.transformer.state_dict())


def test_validation_is_of_flow_matching_alone(tmp_path: Path) -> None:
    config = judged_config(tmp_path)
    model = build_model(config, CPU, sharded=False)
    examples = build_stream(config, model, Ranks(0, 1, CPU)).example()
    ((name, part),) = loss_parts(config, model, examples, VALIDATION)
    assert name == LOSS
    assert torch.equal(part, clip_losses(config, model, examples, VALIDATION))


def test_a_judge_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its weights are changed, so that no checkpoint holds them."""
    monkeypatch.setattr("merope.train.adversary.SLOPE_WEIGHT", float("nan"))
    with pytest.raises(NonFiniteLoss, match=r"step 1: judge_loss is not finite"):
        train(judged_config(tmp_path, "run.steps=2"))
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("adversary.weight=0",), r"adversary\.weight must be positive"),
        (("adversary.judge_first=-1",), r"adversary\.judge_first must be at least 0"),
        (("objective.prefix_frames=0",), r"a prefix in every clip"),
        (("objective.prefix_dropout=0.1",), r"a prefix in every clip"),
        (("objective.own_past=0.5", "objective.levels=[1.0, 0.5]"), r"own_past with \[adversary\] must be 0"),
        (("objective.levels=[0.9, 0.5]",), r"objective\.levels must be noise levels at which steps begin"),
        (("objective.levels=[1.0, 0.5, 0.5]",), r"objective\.levels must be"),
        (("objective.levels=[1.0, 0.0]",), r"objective\.levels must be"),
        (("objective.levels=[]",), r"objective\.levels must be"),
        (("distillation.steps=2", "model.pretrained=x", "model.pretrained_branch=y"), r"\[adversary\] with \[distil"),
    ],
)
def test_what_cannot_be_judged_is_refused(tmp_path: Path, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judged_config(tmp_path, *changes)


def test_whole_clips_and_several_ranks_are_refused(tmp_path: Path) -> None:
    config = judged_config(tmp_path)
    with pytest.raises(ValueError, match=r"objective\.causal_block_frames with \[adversary\] must be given"):
        replace(config, objective=replace(config.objective, causal_block_frames=None))
    with pytest.raises(ValueError, match=r"ranks with \[adversary\] must be 1"):
        build_model(config, CPU, sharded=True)
