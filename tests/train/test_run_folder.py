"""The folder of a run: another run's, one in use, one that cannot be written to."""

from pathlib import Path

import pytest
from filelock import FileLock

from merope.train import loop
from merope.train.loop import train
from tests.train.tiny_runs import losses, tiny_config


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "run.steps=1"))
    with pytest.raises(ValueError, match=r"optimiser.*0.001.*0.5"):
        train(tiny_config(tmp_path, "run.steps=2", "optimiser.learning_rate=0.5"))
    assert len(losses(tmp_path)) == 1


def test_the_folder_of_a_run_under_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cut the other's log, and delete the checkpoint that the other is writing."""
    train(tiny_config(tmp_path, "run.steps=1"))
    with FileLock(tmp_path / "run.lock"), monkeypatch.context() as patched:
        patched.setattr(loop, "build_model", no_model)  # it may take minutes
        with pytest.raises(ValueError, match="that no other run is writing to"):
            train(tiny_config(tmp_path, "run.steps=2"))
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1
    train(tiny_config(tmp_path, "run.steps=2"))


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "build_model", no_model)
    with pytest.raises(ValueError, match=r"run\.out must be in a folder that can be written to, got /proc/x"):
        train(tiny_config(Path("/proc/x"), "run.steps=1"))


def no_model(*_: object, **__: object) -> None:
    raise AssertionError("a model is built")


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "run.steps=2"))
    with pytest.raises(ValueError, match=r"run\.steps.*at least the 2"):
        train(tiny_config(tmp_path, "run.steps=1"))
