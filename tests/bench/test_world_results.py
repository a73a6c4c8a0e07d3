"""Results files only grow: tests of the same weights stand side by side, others are neither mixed in nor lost."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merope.bench import rows, scorer, scores
from merope.bench.generated import generated_file
from merope.bench.result_files import SAME_RUN, is_scored, parts_of, put_together
from merope.bench.rows import run_rows
from merope.bench.scorer import Scorer
from merope.bench.scores import WorldJob, floor_file
from merope.cli import main
from merope.evaluate.workers import InThisProcess
from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.world.commanded import WorldTest
from tests.train.tiny_runs import SMALLER, TINY, tiny_config

TEST = WorldTest(worlds=1, steps=1)


def with_stretches(*stretches: float) -> list[WorldTest]:
    return [TEST, *(replace(TEST, stretch=stretch) for stretch in stretches)]


@pytest.fixture(scope="module", autouse=True)
def _no_poses() -> Iterator[None]:
    """Rows are trained and generated; what a clip scores is no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "score_world", lambda job: pickle.dumps([]))
        for module in (scorer, scores):
            patch.setattr(module, "summaries", lambda *_: {})
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A row whose results file has ×1, ×2 and ×4, made while three rows were trained at once."""
    folder = tmp_path_factory.mktemp("finished")
    result = made(tiny_config(folder / "runs" / "row", "run.steps=1"), folder / "results", 2.0, 4.0, at_once=3)
    assert result["rows_at_once"] == 3
    assert result["trained_s"] is not None
    return folder


@pytest.fixture
def row(finished: Path, tmp_path: Path) -> TrainConfig:
    """The same, for a test to change."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tiny_config(tmp_path / "runs" / "row", "run.steps=1")


def made(config: TrainConfig, results: Path | None, *stretches: float, at_once: int = 1) -> dict[str, Any]:
    scorer = Scorer(InThisProcess(), results)
    assert run_rows([config], with_stretches(*stretches), scorer, rows_at_once=at_once)
    (result,) = scorer.written
    return result


def stretches_of(result: dict[str, Any]) -> list[float]:
    return [part["test"]["stretch"] for part in parts_of(result)]


def test_a_new_test_is_added_to_those_of_the_same_weights(row: TrainConfig, tmp_path: Path) -> None:
    file = tmp_path / "results" / "row.json"
    before = json.loads(file.read_text()) | {"changed_after_the_run": "by hand"}
    before["sweep"][1]["generated_s"] = 123.0
    file.write_text(json.dumps(before))
    after = made(row, tmp_path / "results", 8.0)
    assert after == json.loads(file.read_text()) == json.loads((row.run.out / "scores.json").read_text())
    assert stretches_of(after) == [1.0, 2.0, 4.0, 8.0]
    assert after["sweep"][:2] == before["sweep"]
    assert (after["rows_at_once"], after["changed_after_the_run"]) == (3, "by hand")
    assert len({part["weights"] for part in parts_of(after)}) == 1
    again = made(row, tmp_path / "results", 3.0, 4.0)
    assert stretches_of(again) == [1.0, 2.0, 3.0, 4.0, 8.0]
    assert again["sweep"][2]["generated_s"] != 123.0  # asked for again, measured again


def test_so_it_is_without_a_results_folder(row: TrainConfig, tmp_path: Path) -> None:
    assert stretches_of(made(row, None, 8.0)) == [1.0, 2.0, 4.0, 8.0]
    assert stretches_of(made(row, tmp_path / "other", 3.0)) == [1.0, 2.0, 3.0, 4.0, 8.0]


@given(st.lists(st.sets(st.sampled_from([2.0, 3.0, 4.0, 8.0])), min_size=1, max_size=6))
def test_any_order_of_commands_ends_with_every_test_as_it_was_made_last(asked: list[set[float]]) -> None:
    result: dict[str, Any] = {}
    last = {}
    for time, stretches in enumerate(asked):
        tests = [asdict(test) for test in with_stretches(*sorted(stretches))]
        parts = [{"test": test, "made": time} for test in tests]
        last |= {test["stretch"]: time for test in tests}
        result = put_together({"row": "x"}, parts, [result] if result else [])
    assert {part["test"]["stretch"]: part["made"] for part in parts_of(result)} == last
    assert stretches_of(result) == sorted(last)


def refused(config: TrainConfig, results: Path | None, *tests: WorldTest) -> str:
    """What is said, while no results file changes."""
    files = [*config.run.out.parent.parent.rglob("row.json"), *config.run.out.glob("scores.json")]
    before = [file.read_bytes() for file in files]
    assert before
    with pytest.raises(ValueError, match="it was left as it is") as error:
        run_rows([config], tests, Scorer(InThisProcess(), results))
    assert [file.read_bytes() for file in files] == before
    return str(error.value)


def test_tests_of_another_training_are_never_mixed_in(row: TrainConfig, tmp_path: Path) -> None:
    results = tmp_path / "results"
    longer = replace(row, run=replace(row.run, steps=2))
    assert "has 1 of 2 steps" in refused(longer, results, *with_stretches(8.0))
    shutil.rmtree(row.run.out)
    other = tiny_config(row.run.out, "run.steps=1", "optimiser.learning_rate=0.1")
    train(other)
    assert "×1 of other weights" in refused(other, results, *with_stretches(8.0))
    assert not generated_file(other, TEST).exists()  # refused before anything was generated
    result = made(other, tmp_path / "more results", 8.0)
    assert stretches_of(result) == [1.0, 8.0]


def test_a_longer_run_replaces_the_scores_in_its_own_folder(
    row: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = replace(row, run=replace(row.run, steps=2))
    result = made(longer, None, 8.0)
    assert (result["steps"], stretches_of(result)) == (2, [1.0, 8.0])
    assert "×1 of other weights: it will be replaced" in capsys.readouterr().err


def test_where_the_weights_are_gone_nothing_is_trained(
    row: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "train", None)
    for folder in ("checkpoints", "trained"):
        shutil.rmtree(row.run.out / folder)
    assert "×1, ×2, ×4 of 1 steps" in refused(row, None, *with_stretches(8.0))  # its own scores are there
    shutil.rmtree(row.run.out)
    for tests in (with_stretches(8.0), with_stretches(2.0, 4.0)):
        assert "0 of 1 steps" in refused(row, tmp_path / "results", *tests)
    changes = [*SMALLER, "run.steps=1", f"run.out={row.run.out}"]
    named = [word for change in changes for word in ("--set", change)]
    (tmp_path / "results" / "row.json").rename(tmp_path / "results" / "row-seed0.json")
    assert main(["bench", "world", str(TINY), *named, "--results", str(tmp_path / "results"), "--workers", "1"]) == 2
    assert "bring the folder of its run back" in capsys.readouterr().err


def test_other_tests_and_other_scores_do_not_stand_beside(row: TrainConfig, tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert "×1 tested with" in refused(row, results, replace(TEST, worlds=2))
    assert "×2 tested with" in refused(row, results, TEST, replace(TEST, steps=2, stretch=2.0))
    file = results / "row.json"
    older = json.loads(file.read_text())
    older["sweep"][0]["scoring"] = 1
    file.write_text(json.dumps(older))
    assert "×2 with scores of another version" in refused(row, results, *with_stretches(8.0))
    assert stretches_of(made(row, results, 2.0, 8.0)) == [1.0, 2.0, 4.0, 8.0]


def test_results_of_other_drives_are_neither_taken_for_these_nor_added_to(row: TrainConfig, tmp_path: Path) -> None:
    results, file = tmp_path / "results", tmp_path / "results" / "row.json"
    assert is_scored(row, with_stretches(2.0), results)
    older = json.loads(file.read_text())
    del older["data"]["drives"]  # as in files from before drives had a version
    file.write_text(json.dumps(older))
    assert not is_scored(row, with_stretches(2.0), results)
    assert "clips like" in refused(row, results, *with_stretches(8.0))


def test_a_file_that_does_not_say_its_weights_is_known_by_its_run(row: TrainConfig, tmp_path: Path) -> None:
    file = tmp_path / "results" / "row.json"
    result = json.loads(file.read_text())
    for part in parts_of(result):
        del part["weights"], part["scoring"]
    for key in ("trained_s", "final_loss"):
        assert key in SAME_RUN
        file.write_text(json.dumps(result | {key: 0.25}))
        assert "×1 of other weights" in refused(row, tmp_path / "results", *with_stretches(8.0))
    file.write_text(json.dumps(result))
    assert stretches_of(made(row, tmp_path / "results", 8.0)) == [1.0, 2.0, 4.0, 8.0]
    assert stretches_of(made(row, tmp_path / "results", 3.0)) == [1.0, 2.0, 3.0, 4.0, 8.0]
    (row.run.out / "pieces.jsonl").unlink()  # nothing tells which run it was
    assert "×2 of other weights" in refused(row, tmp_path / "results", *with_stretches(5.0))


class SweepLater(InThisProcess):
    """Scores the benchmark's own test at once, and its sweep when it is told to."""

    def __init__(self) -> None:
        self.later: list[tuple[Future[bytes], Callable[[WorldJob], bytes], WorldJob]] = []

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        (job,) = arguments
        if job.test.stretch == 1.0:
            return super().submit(call, job)
        self.later.append((Future(), call, job))
        return self.later[-1][0]

    def score_sweep(self) -> None:
        for future, call, job in self.later:
            future.set_result(call(job))


def test_a_test_is_written_when_it_is_scored(tmp_path: Path) -> None:
    config, tests = tiny_config(tmp_path / "runs" / "row", "run.steps=1"), with_stretches(2.0)
    assert run_rows([config], tests, Scorer(InThisProcess(), None), until="generated")
    pool = SweepLater()
    scorer = Scorer(pool, tmp_path / "results")
    scorer.add(config, tests)
    scorer.finish(wait=False)
    (file,) = (tmp_path / "results").glob("*.json")
    assert [part["test"]["stretch"] for part in parts_of(json.loads(file.read_text()))] == [1.0]
    assert not scorer.written
    pool.score_sweep()
    scorer.finish(wait=False)
    (result,) = scorer.written
    assert [part["test"]["stretch"] for part in parts_of(result)] == [1.0, 2.0]
    assert result == json.loads(file.read_text())


def test_a_floor_is_taken_from_the_results_of_any_row(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "results", tmp_path / "results")
    (file,) = (tmp_path / "results").glob("*.json")
    (tmp_path / "results" / "damaged-seed0.json").write_text("{")
    result = json.loads(file.read_text())
    for part in parts_of(result):
        part["rows"]["floor"] = {"of": part["test"]["stretch"]}
    (tmp_path / "results" / "other-seed5.json").write_text(json.dumps(result))
    file.unlink()
    config, tests = tiny_config(tmp_path / "runs" / "row", "run.steps=1"), with_stretches(2.0, 8.0)
    assert run_rows([config], tests, Scorer(InThisProcess(), tmp_path / "results"))
    floors = [json.loads(floor_file(config, test).read_text()) for test in tests]
    assert floors == [{"of": 1.0}, {"of": 2.0}, {}]  # of ×8 no row has one
