"""Sharded, replicated and split over frames: every topology does the same steps as one process."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from merope.train import checkpoint, log, loop
from merope.train.config import ParallelSection
from merope.train.loop import export_checkpoint, train
from merope.train.parallel import mesh_sizes
from tests.train.ranks import run_ranks
from tests.train.tiny_runs import tiny_config

# A large epsilon keeps Adam from dividing rounding errors by themselves: updates stay proportional to gradients.
SMOOTH = ("optimiser.learning_rate=0.01", "optimiser.epsilon=0.01")
STEPS = "run.steps=4"
VALIDATED = ("run.validate_every=4", "run.validation_clips=4")


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": value
        for part in ("branch", "transformer")
        for name, value in load_file(folder / part / "diffusion_pytorch_model.safetensors").items()
    }


def test_the_reference_moves_far_more_than_the_tolerance(alone: Path, tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "run.steps=1", *SMOOTH))
    before, after = trained(tmp_path / "trained"), trained(alone / "trained")
    assert max(float((after[name] - value).abs().max()) for name, value in before.items()) > 1e-3


def assert_same_weights(a: Path, b: Path, tolerance: float = 1e-6) -> None:
    ours, theirs = trained(a), trained(b)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one process that trains four steps."""
    out = tmp_path_factory.mktemp("alone")
    train(tiny_config(out, STEPS, *SMOOTH, *VALIDATED))
    return out


def last_losses(out: Path) -> list[float]:
    row = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    return [row["loss"], row["validation_loss"]]


def learn(out: Path, *changes: str) -> None:
    train(tiny_config(out, *SMOOTH, *changes))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ["parallel.shard=2"]),
        (4, ["parallel.replicate=2", "parallel.shard=2"]),
        (2, ["parallel.context=2"]),
        (4, ["parallel.shard=2", "parallel.context=2"]),
    ],
    ids=["FSDP 2", "HSDP 2×2", "context 2", "FSDP 2 × context 2"],
)
def test_every_topology_takes_the_steps_of_one_process(
    alone: Path, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    run_ranks(ranks, learn, tmp_path, STEPS, *VALIDATED, *layout)
    assert_same_weights(tmp_path / "trained", alone / "trained")
    assert last_losses(tmp_path) == pytest.approx(last_losses(alone), rel=1e-5)


def test_a_checkpoint_of_four_ranks_goes_on_with_one_and_with_two(alone: Path, tmp_path: Path) -> None:
    run_ranks(4, learn, tmp_path / "a", "run.steps=2", "parallel.replicate=2")
    four = checkpoint.complete(tmp_path / "a" / "checkpoints")[-1]
    for name in ("one", "two"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints" / four.name).symlink_to(four)
    train(tiny_config(tmp_path / "one", STEPS, *SMOOTH))
    run_ranks(2, learn, tmp_path / "two", STEPS)
    assert_same_weights(tmp_path / "one" / "trained", alone / "trained")
    assert_same_weights(tmp_path / "two" / "trained", alone / "trained")


def test_a_checkpoint_of_any_topology_is_exported_by_one_process(alone: Path, tmp_path: Path) -> None:
    run_ranks(2, learn, tmp_path, "run.steps=2", "optimiser.ema_decay=0.5")
    config = tiny_config(tmp_path, "run.steps=2", *SMOOTH, "optimiser.ema_decay=0.5")
    folder = export_checkpoint(config, checkpoint.complete(tmp_path / "checkpoints")[-1])
    assert_same_weights(folder, tmp_path / "trained", tolerance=0)


def test_mesh_sizes_fill_the_ranks_or_are_refused() -> None:
    assert mesh_sizes(ParallelSection(), 8) == (1, 8, 1)
    assert mesh_sizes(ParallelSection(replicate=2, context=2), 8) == (2, 2, 2)
    with pytest.raises(ValueError, match="replicate × shard × context = 6"):
        mesh_sizes(ParallelSection(replicate=4), 6)
    with pytest.raises(ValueError, match="3 × 1 × 1"):
        mesh_sizes(ParallelSection(replicate=3), 1)


def stop_the_second_rank(out: Path) -> None:
    log.STALL_S = 0.3
    if os.environ["RANK"] == "1":
        train_step = loop.train_step

        def late(*given: Any) -> tuple[float, float]:  # as one that was sent SIGSTOP
            time.sleep(1.5)
            return train_step(*given)

        loop.train_step = late
    train(tiny_config(out, "run.steps=1"))


def test_a_rank_that_waits_for_another_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, stop_the_second_rank, tmp_path)
    assert "rank 0: step 1 is not done after 0 s; a rank may be stopped" in capfd.readouterr().err
