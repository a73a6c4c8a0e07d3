"""The training loop: it goes on exactly, it trains what it should and stops as it should.

That it learns is seen in tests/test_readme.py, where a whole run is made.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from merope.adapters.attachment import load_branch
from merope.generate.camera_video import CameraVideoPipeline
from merope.train import checkpoint, loop
from merope.train.build import build_stream, check_shares
from merope.train.config import TrainConfig
from merope.train.loop import NonFiniteLoss, train
from merope.train.losses import _objective, clip_losses
from merope.train.model import Model, build_model
from merope.train.objective import VALIDATION, Noised
from merope.train.optimisers import build_optimisers, learning_rate, moving_average, update_average
from merope.train.parallel import Ranks
from merope.train.streams import Examples, WorldStream
from tests.train.ranks import clean_process
from tests.train.tiny_runs import losses, tiny_config


def weights(out: Path) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": value
        for part in ("branch", "transformer")
        if (out / "trained" / part).exists()
        for name, value in load_file(out / "trained" / part / "diffusion_pytorch_model.safetensors").items()
    }


def assert_equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert a
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_stopping_and_going_on_changes_nothing(tmp_path: Path) -> None:
    whole = tiny_config(tmp_path / "whole", "run.steps=6", "optimiser.ema_decay=0.9")
    train(whole)
    parts = tiny_config(tmp_path / "parts", "run.steps=3", "optimiser.ema_decay=0.9")
    train(parts)
    train(replace(parts, run=replace(parts.run, steps=6)))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_equal_weights(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_ctrl_c_ends_after_the_step_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_begun = []

    def interrupted(*args: object) -> tuple[float, float]:
        steps_begun.append(1)
        if len(steps_begun) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(*args)  # type: ignore[arg-type]

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", interrupted)
    train(tiny_config(tmp_path / "run", "run.steps=8"))
    assert [place.name for place in checkpoint.complete(tmp_path / "run" / "checkpoints")] == ["step-00000003"]
    assert not (tmp_path / "run" / "trained").exists()
    train(tiny_config(tmp_path / "run", "run.steps=8"))
    train(tiny_config(tmp_path / "whole", "run.steps=8"))
    assert_equal_weights(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_a_killed_run_leaves_whole_checkpoints_and_goes_on_exactly(tmp_path: Path) -> None:
    often = ("run.steps=400", "run.checkpoint_every=1", "run.keep_checkpoints=400")
    folder = tmp_path / "killed" / "checkpoints"
    begun = 0
    for wait_s in (0.0, 0.013, 0.171):
        process = clean_process(train, tiny_config(tmp_path / "killed", *often))
        process.start()
        while process.is_alive() and len(checkpoint.complete(folder)) < begun + 2:
            time.sleep(0.002)
        time.sleep(wait_s)
        assert process.is_alive(), "the run ended before it could be killed"
        process.kill()
        process.join()
        begun = len(checkpoint.complete(folder))
    steps = [checkpoint.read_progress(place).step for place in checkpoint.complete(folder)]
    assert steps == list(range(1, len(steps) + 1))
    last = tiny_config(tmp_path / "killed", f"run.steps={steps[-1] + 1}")
    train(last)  # reads the newest checkpoint
    train(tiny_config(tmp_path / "whole", f"run.steps={steps[-1] + 1}"))
    assert_equal_weights(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


def test_what_is_frozen_does_not_change_by_a_bit(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run.steps=3", "model.trainable=branch")
    before = build_model(config, torch.device("cpu"), sharded=False)
    train(config)
    trained, total = before.parameter_counts()
    branch = load_file(tmp_path / "trained" / "branch" / "diffusion_pytorch_model.safetensors")
    assert trained == sum(value.numel() for value in branch.values())
    assert trained == 4 * 48 * 48 + 4 * 48  # four linears of one block
    assert 0 < trained < total
    assert not (tmp_path / "trained" / "transformer").exists()
    place = checkpoint.complete(tmp_path / "checkpoints")[-1]
    after = build_model(config, torch.device("cpu"), sharded=False)
    checkpoint.load_weights(place, after.transformer, averaged=False)
    changed = {
        name
        for (name, a), b in zip(before.transformer.named_parameters(), after.transformer.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert changed == {name for name, p in after.transformer.named_parameters() if p.requires_grad}


def test_frozen_weights_stay_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def remember(config: TrainConfig, *args: object, **kwargs: object) -> object:
        seen["model"] = build_model(config, *args, **kwargs)  # type: ignore[arg-type]
        seen["frozen"] = {
            name: p.detach().clone() for name, p in seen["model"].transformer.named_parameters() if not p.requires_grad
        }
        return seen["model"]

    monkeypatch.setattr(loop, "build_model", remember)
    train(tiny_config(tmp_path, "run.steps=3", "model.trainable=branch"))
    after = dict(seen["model"].transformer.named_parameters())
    assert len(seen["frozen"]) > 20
    assert [name for name, value in seen["frozen"].items() if not torch.equal(after[name], value)] == []


def test_the_trained_folders_load_like_any_others(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "run.steps=2"))
    pipeline = CameraVideoPipeline.from_pretrained(tmp_path / "trained")
    branch = load_branch(pipeline.transformer, tmp_path / "trained" / "branch")
    assert branch.config["encoding"] == "merope"
    assert pipeline.scheduler.config["shift"] == 3.0
    rights = {file.stat().st_mode & 0o777 for file in (tmp_path / "trained").rglob("*.*")}
    assert len(rights) == 1  # who may read the configs may read the weights


def test_a_step_that_is_not_finite_names_the_clip_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = WorldStream.step

    def poisoned(self: WorldStream, number: int) -> Iterator[Examples]:
        for examples in step(self, number):
            bad = number == 2 and examples.places == (1,)
            yield replace(examples, names=("the bad clip",), clean=examples.clean * torch.nan) if bad else examples

    monkeypatch.setattr(WorldStream, "step", poisoned)
    with pytest.raises(NonFiniteLoss, match=r"step 3: the loss of the bad clip .*step-00000002"):
        train(tiny_config(tmp_path, "run.steps=5", "run.checkpoint_every=1"))
    place = checkpoint.complete(tmp_path / "checkpoints")[-1]
    assert checkpoint.read_progress(place).step == 2
    model = build_model(tiny_config(tmp_path), torch.device("cpu"), sharded=False)
    checkpoint.load_weights(place, model.transformer, averaged=False)
    assert all(bool(p.isfinite().all()) for p in model.transformer.parameters())


def test_nothing_is_dropped_in_validation(tmp_path: Path) -> None:
    """Or validation losses of runs with other dropouts would not compare."""
    kept = tiny_config(tmp_path, "run.validation_clips=2", "objective.text_dropout=0.0")
    dropping = replace(kept, objective=replace(kept.objective, text_dropout=1.0, prefix_dropout=1.0))
    ranks = Ranks(0, 1, torch.device("cpu"))
    model = build_model(kept, ranks.device, sharded=False)
    assert model.prefix > 0
    stream = build_stream(kept, model, ranks)
    assert loop.validate(dropping, model, stream, ranks) == loop.validate(kept, model, stream, ranks)
    in_validation = _objective(dropping, stream.example(), VALIDATION)
    assert (in_validation.text_dropout, in_validation.prefix_dropout) == (0.0, 0.0)
    assert _objective(dropping, stream.example(), 0) == dropping.objective


def test_dropped_text_is_the_empty_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, "objective.text_dropout=0.5")
    ranks, seen = Ranks(0, 1, torch.device("cpu")), []
    model = build_model(config, ranks.device, sharded=False)
    text, no_text = torch.ones(1, 2, 16), -torch.ones(2, 16)
    examples = replace(build_stream(config, model, ranks).example(), text=text, no_text=no_text)

    def predicted(self: Model, noised: Noised, given: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(given)
        return torch.zeros_like(noised.latents)

    monkeypatch.setattr(Model, "predicted", predicted)
    for place in range(40):
        clip_losses(config, model, replace(examples, places=(place,)), 0)
    dropped = [torch.equal(given, no_text[None]) for given in seen]
    assert 10 < sum(dropped) < 30
    assert all(torch.equal(given, text) for given, empty in zip(seen, dropped, strict=True) if not empty)


def test_the_moving_average_follows_the_weights(tmp_path: Path) -> None:
    config, model = tiny_config(tmp_path, "optimiser.ema_decay=0.9"), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    average = moving_average(config, model)
    torch.nn.init.constant_(model.weight, 2.0)
    update_average(average, model, 0.9, step=1000)
    assert float(average["weight"]) == pytest.approx(0.9 * 1.0 + 0.1 * 2.0)


def test_a_young_average_forgets_the_untrained_weights(tmp_path: Path) -> None:
    config, model = tiny_config(tmp_path, "optimiser.ema_decay=0.999"), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.0)
    average = moving_average(config, model)
    torch.nn.init.constant_(model.weight, 1.0)
    for step in range(100):
        update_average(average, model, 0.999, step)
    assert 1.0 - float(average["weight"]) < 1e-6


def test_the_optimiser_is_that_of_the_config(tmp_path: Path) -> None:
    changes = ("optimiser.betas=[0.8, 0.95]", "optimiser.epsilon=0.1", "optimiser.weight_decay=0.3")
    (optimiser,) = build_optimisers(tiny_config(tmp_path, *changes), torch.nn.Linear(1, 1))
    (group,) = optimiser.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 0.1, 0.3)


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "optimiser.matrices=muon")
    transformer = build_model(config, torch.device("cpu"), sharded=False).transformer
    muon, adamw = build_optimisers(config, transformer)
    names = {id(weight): name for name, weight in transformer.named_parameters()}
    of_muon, of_adamw = (
        {names[id(weight)] for group in each.param_groups for weight in group["params"]} for each in (muon, adamw)
    )
    assert of_muon.isdisjoint(of_adamw)
    assert of_muon | of_adamw == set(names.values())
    assert {"blocks.0.attn1.to_q.weight", "blocks.1.attn1.processor.cam_qkv.weight"} <= of_muon
    assert {"proj_out.weight", "blocks.0.scale_shift_table", "condition_embedder.time_proj.weight"} <= of_adamw


def test_a_run_with_muon_in_pieces_is_a_run_at_once(tmp_path: Path) -> None:
    losses = []
    for name, pieces in (("whole", (6,)), ("pieces", (3, 6))):
        for steps in pieces:
            train(tiny_config(tmp_path / name, "optimiser.matrices=muon", f"run.steps={steps}"))
        rows = (tmp_path / name / "log.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 6


def test_samples_are_written_with_the_path(tmp_path: Path) -> None:
    from merope.formats.video import read_video

    train(tiny_config(tmp_path, "run.steps=1", "run.sample_every=1", "run.sample_steps=2"))
    frames = read_video(tmp_path / "samples" / "step-00000001.mp4", [0, 3], 256, 24 * 16 * 2 + 256)
    assert frames.shape[0] == 2
    assert frames.float().std() > 10


def test_settings_that_do_not_fit_are_refused_before_a_model_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"height.*multiple of 8"):
        train(tiny_config(tmp_path, "data.height=20"))
    with pytest.raises(ValueError, match="validation_clips"):
        train(tiny_config(tmp_path, "run.validation_clips=3", "run.micro_batch=2"))
    with pytest.raises(ValueError, match=r"model\.architecture"):
        train(tiny_config(tmp_path, "model.architecture.num_heads=3"))
    with pytest.raises(ValueError, match="prefix_frames"):
        train(tiny_config(tmp_path, "objective.prefix_frames=4"))
    with pytest.raises(ValueError, match=r"run\.sample_steps must be at least 1, got 0"):
        tiny_config(tmp_path, "run.sample_steps=0")
    assert not (tmp_path / "checkpoints").exists()


def test_more_ranks_are_told_the_micro_batch_with_which_the_run_goes_on(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run.batch_size=4", "run.validation_clips=4", "run.micro_batch=4")
    check_shares(config, data_ranks=1)
    with pytest.raises(ValueError, match=r"run\.batch_size .* got 4; use run\.micro_batch=2, which leaves the run"):
        check_shares(config, data_ranks=2)
    check_shares(replace(config, run=replace(config.run, micro_batch=2)), data_ranks=2)
    with pytest.raises(ValueError, match=r"run\.batch_size .* got 4; use 12"):  # no micro-batch divides by 3
        check_shares(config, data_ranks=3)


def test_the_learning_rate_rises_stays_and_falls(tmp_path: Path) -> None:
    options = ("run.steps=10", "optimiser.learning_rate=1.0", "optimiser.warmup_steps=4", "optimiser.decay_steps=5")
    config = tiny_config(tmp_path, *options)
    rates = [learning_rate(config, step) for step in range(10)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert learning_rate(tiny_config(tmp_path, "run.steps=10"), 9) == tiny_config(tmp_path).optimiser.learning_rate
    train(replace(config, run=replace(config.run, steps=2, validation_clips=0, sample_every=0)))
    logged = [json.loads(line)["learning_rate"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert logged == pytest.approx([0.1, 0.1])  # ¼ of the rise × ⅖ of the fall, then ½ × ⅕


def test_a_run_whose_rate_falls_has_a_fixed_end(tmp_path: Path) -> None:
    options = ("optimiser.decay_steps=2", "run.validation_clips=0", "run.sample_every=0")
    train(tiny_config(tmp_path, "run.steps=2", *options))
    with pytest.raises(ValueError, match="steps: 2 before, 4 now"):
        train(tiny_config(tmp_path, "run.steps=4", *options))


def test_a_compiled_model_is_validated_with_gradients_recorded_and_none_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training, so that nothing is compiled twice. The loss is the same; gradients of the last step make room."""
    plain = tiny_config(tmp_path, "run.validation_clips=2")
    compiled = replace(plain, model=replace(plain.model, compile=True))
    ranks, modes = Ranks(0, 1, torch.device("cpu")), []
    model = build_model(plain, ranks.device, sharded=False)
    stream = build_stream(plain, model, ranks)

    def watched(*arguments: Any) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return clip_losses(*arguments)

    monkeypatch.setattr("merope.train.losses.clip_losses", watched)
    for parameter in model.learner.parameters():
        parameter.grad = torch.ones_like(parameter)
    recorded, unrecorded = (loop.validate(config, model, stream, ranks) for config in (compiled, plain))
    assert recorded == pytest.approx(unrecorded, rel=1e-6)  # a CPU may have kernels of its own for either
    assert modes == [True, True, False, False]  # two micro-batches each
    assert all(parameter.grad is None for parameter in model.learner.parameters())
