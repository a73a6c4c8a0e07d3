"""benchmarks/world_small.py: rows in small, once each."""

import json
import sys
from pathlib import Path

import pytest

from merope.train.config import TrainConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import world_small

SHORT = "run.steps=2 run.batch_size=2 run.micro_batch=2 run.validate_every=1 run.validation_clips=2"


def test_rows_are_measured_once_and_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "small.json"
    changed = f"merope {SHORT} branch.encoding_options.direction_scale=50.0"
    places = ["--runs", str(tmp_path / "runs"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["world_small.py", f"merope {SHORT}", changed, "--seeds", "3", *places])
    world_small.main()
    first = json.loads(out.read_text())
    assert [(row["row"], row["seed"]) for row in first] == [(f"merope {SHORT}", 3), (changed, 3)]
    assert all(list(row["held_out_loss"]) == ["1", "2"] for row in first)
    configs = [json.loads(file.read_text()) for file in (tmp_path / "runs").glob("*/config.json")]
    assert sorted(str(config["branch"]["encoding_options"]) for config in configs) == [
        "{'direction_scale': 50.0}",
        "{}",
    ]
    logs = {file: file.read_text() for file in (tmp_path / "runs").glob("*/log.jsonl")}
    assert len(logs) == 2
    monkeypatch.setattr(sys, "argv", ["world_small.py", f"merope {SHORT}", "--seeds", "3", *places])
    world_small.main()
    assert sorted(json.loads(out.read_text()), key=str) == sorted(first, key=str)
    assert {file: file.read_text() for file in logs} == logs


def test_a_row_that_is_stopped_is_not_written_and_no_other_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[TrainConfig] = []
    monkeypatch.setattr(world_small, "train", begun.append)  # returns as after Ctrl-C
    places = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "small.json")]
    monkeypatch.setattr(sys, "argv", ["world_small.py", "merope", "raynova", *places])
    with pytest.raises(SystemExit):
        world_small.main()
    assert [config.run.out.name for config in begun] == ["merope-seed0"]
    assert not (tmp_path / "small.json").exists()


def test_every_row_of_the_benchmark_has_a_small_one(tmp_path: Path) -> None:
    for file in world_small.CONFIGS.glob("*.toml"):
        config = world_small.small_config(file.stem, [], 1, tmp_path)
        assert (config.run.steps, config.run.seed, config.data.frames, config.model.compile) == (300, 1, 7, False)
