"""A past of the model's own: made of the clip itself in the model's steps, in a share of steps that a seed decides."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.train.losses import clip_losses
from merope.train.model import Model
from merope.train.objective import VALIDATION, Noised, clip_generator
from merope.train.own_past import own_past_levels, with_own_past
from tests.train.ranks import run_ranks
from tests.train.test_causal_training import (
    CPU,
    STEP,
    causal_config,
    first_examples,
    noised_as_in_training,
    perturbed_model,
)
from tests.train.test_parallel import SMOOTH, assert_same_weights

LEVELS = (0.9, 0.5)


def own_past_config(out: Path, *changes: str) -> TrainConfig:
    levels = ("objective.levels=[1.0, 0.9, 0.5]", "run.sample_every=0")
    return causal_config(out, "objective.own_past=1.0", *levels, *changes)


def test_a_seed_decides_which_steps_have_their_own_past(tmp_path: Path) -> None:
    objective = replace(own_past_config(tmp_path).objective, own_past=0.3)
    drawn = [own_past_levels(objective, 5, step) for step in range(400)]
    assert drawn == [own_past_levels(objective, 5, step) for step in range(400)]
    assert drawn != [own_past_levels(objective, 6, step) for step in range(400)]
    assert 80 < sum(levels != () for levels in drawn) < 160
    assert set(drawn) == {(), LEVELS, LEVELS[1:]}
    assert all(own_past_levels(replace(objective, own_past=0.0), 5, step) == () for step in range(20))


class Seen:
    """Stands in for what a model predicts, and remembers what it was shown."""

    def __init__(self, towards: Tensor) -> None:
        self.towards = towards  # [B, C, T, H, W] clean latents that it predicts
        self.shown: list[Noised] = []

    def __call__(self, model: Model, noised: Noised, *conditions: object) -> Tensor:
        self.shown.append(noised)
        level = noised.sigma[:, None, :, None, None]
        return torch.where(level > 0, (noised.latents - self.towards) / level.clamp(min=1e-6), 0.0)


def made_past(
    config: TrainConfig, model: Model, towards: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Noised, Noised, Seen]:
    """The clips with the past of their own, as they were before, and what was predicted on the way."""
    examples = first_examples(config, model)
    noised = replace(noised_as_in_training(config, model, examples), past_sigma=torch.full((len(examples.clean),), 0.2))
    seen = Seen(examples.clean if towards is None else towards)
    monkeypatch.setattr(Model, "predicted", lambda *given: seen(*given))
    dice = [clip_generator(0, STEP, place, CPU) for place in examples.places]
    return with_own_past(model, examples, noised, examples.text, LEVELS, dice), noised, seen


def test_a_model_without_faults_makes_the_true_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = own_past_config(tmp_path)
    made, before, seen = made_past(config, perturbed_model(config), None, monkeypatch)
    assert_close(made.past, seen.towards, rtol=1e-4, atol=1e-4)
    assert not made.past_sigma.any()
    for name in ("latents", "target", "generated", "sigma", "drop_text"):
        assert getattr(made, name) is getattr(before, name)


def test_each_step_sees_what_the_step_before_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = own_past_config(tmp_path)
    model = perturbed_model(config)
    clean = first_examples(config, model).clean
    made, noised, seen = made_past(config, model, torch.full_like(clean, 0.25), monkeypatch)
    first, second = seen.shown
    generated = noised.generated[:, None, :, None, None].expand_as(clean)
    assert torch.equal(first.past, clean)
    assert_close(second.past[generated], torch.full_like(second.past[generated], 0.25), rtol=0, atol=1e-5)
    assert_close(made.past[generated], second.past[generated], rtol=0, atol=1e-5)
    for shown in (first, second, made):
        assert torch.equal(shown.past[~generated], clean[~generated])
    assert [step.sigma.max().item() for step in (first, second)] == pytest.approx(list(LEVELS))
    # From level to level along a straight line, and the noise is still there.
    noise = (first.latents - 0.1 * clean) / 0.9
    straight = 0.25 + (first.latents - 0.25) * (0.5 / 0.9)
    assert_close(second.latents[generated], straight[generated], rtol=1e-5, atol=1e-5)
    assert 0.8 < noise[generated].std() < 1.2


def test_the_loss_is_that_of_blocks_after_the_own_past(tmp_path: Path) -> None:
    """And of held-out clips after the true one."""
    own = own_past_config(tmp_path)
    true = replace(own, objective=replace(own.objective, own_past=0.0))
    model = perturbed_model(own)
    examples = first_examples(own, model)
    losses = {
        (name, step): clip_losses(config, model, examples, step)
        for name, config in (("own", own), ("true", true))
        for step in (STEP, VALIDATION)
    }
    assert torch.equal(losses["own", VALIDATION], losses["true", VALIDATION])
    assert not torch.allclose(losses["own", STEP], losses["true", STEP], rtol=1e-4)
    assert losses["own", STEP].requires_grad


def test_stopping_and_going_on_changes_nothing(tmp_path: Path) -> None:
    whole, parts = (own_past_config(tmp_path / name, "objective.own_past=0.5") for name in ("whole", "parts"))
    train(replace(whole, run=replace(whole.run, steps=4)))
    for steps in (2, 4):
        train(replace(parts, run=replace(parts.run, steps=steps)))
    rows = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    first, second = ([json.loads(line)["loss"] for line in lines] for lines in rows)
    assert first == second


def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    steps = ("run.steps=2", *SMOOTH)
    train(own_past_config(tmp_path / "one", *steps))
    run_ranks(2, train, own_past_config(tmp_path / "two", *steps, "parallel.shard=2"))
    assert_same_weights(tmp_path / "two" / "trained", tmp_path / "one" / "trained")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("objective.own_past=1.5",), r"objective\.own_past must be in \[0, 1\]"),
        (("objective.levels=[1.0]",), r"objective\.levels with objective\.own_past must be at least two"),
    ],
)
def test_a_past_that_cannot_be_made_is_refused(tmp_path: Path, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_past_config(tmp_path, *changes)


def test_whole_clips_have_no_past(tmp_path: Path) -> None:
    objective = own_past_config(tmp_path).objective
    with pytest.raises(ValueError, match=r"objective\.own_past must be 0 for a model that sees whole clips"):
        replace(objective, causal_block_frames=None)
    with pytest.raises(ValueError, match=r"objective\.levels with objective\.own_past must be at least two, got None"):
        replace(objective, levels=None)
