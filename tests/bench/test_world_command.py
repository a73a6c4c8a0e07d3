"""`merope bench world`: a row by command, what is refused, and what it says when it is stopped."""

from pathlib import Path

import pytest

from merope.bench import rows
from merope.cli import main
from merope.train.checkpoint import complete
from tests.train.tiny_runs import TINY


def test_the_command_runs_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "world", str(TINY), "--until", "trained", "--seed", "2", "--set", f"run.out={tmp_path / 'x'}"]
    arguments += ["--set", "run.steps=1", "--set", "run.validation_clips=0", "--workers", "1"]
    assert main(arguments) == 0
    assert (tmp_path / "x-seed2" / "trained" / "branch").is_dir()
    assert "x-seed2" in capsys.readouterr().out
    assert main([*arguments, "--set", "run.steps=2"]) == 0  # more training is done, not skipped
    assert [place.name for place in complete(tmp_path / "x-seed2" / "checkpoints")][-1] == "step-00000002"
    assert main([*arguments, "--set", "run.steps=2", "--set", "branch.encoding=ucpe"]) == 2
    assert "a run with the same settings" in capsys.readouterr().err
    assert main([*arguments, "--stretch", "0"]) == 2
    assert "stretch must be positive" in capsys.readouterr().err


def test_a_command_that_is_stopped_after_training_says_that_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rows, "generate_row", stopped)
    arguments = ["bench", "world", str(TINY), "--set", f"run.out={tmp_path / 'x'}", "--set", "run.steps=1"]
    assert main([*arguments, "--set", "run.validation_clips=0", "--workers", "1"]) == 130
    assert "finished stages are kept, the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_results_folder_that_cannot_be_is_refused_before_training(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[object] = []
    monkeypatch.setattr(rows, "train_row", trained.append)
    (tmp_path / "file").write_text("not a folder")
    arguments = ["bench", "world", str(TINY), "--set", f"run.out={tmp_path / 'x'}", "--workers", "1"]
    assert main([*arguments, "--results", str(tmp_path / place)]) == 2
    assert "--results must be a folder that can be written to" in capsys.readouterr().err
    assert not trained


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"sweep": [3]}'])
def test_damaged_results_of_a_row_are_named(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x-seed0").mkdir()
    (tmp_path / "x-seed0" / "scores.json").write_text(text)
    arguments = ["bench", "world", str(TINY), "--set", f"run.out={tmp_path / 'x'}", "--workers", "1"]
    assert main(arguments) == 2
    assert "scores.json must be results of merope bench world" in capsys.readouterr().err
