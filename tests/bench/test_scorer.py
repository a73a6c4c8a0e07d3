"""Scores in the background: what is scored first, when it is written, and who measures a floor."""

import json
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from merope.bench import rows
from merope.bench import scorer as scorer_module
from merope.bench.scorer import Scorer
from merope.bench.scores import floor_file, world_jobs
from merope.bench.scoring_pool import ByUrgency
from merope.train.config import TrainConfig
from merope.world.commanded import WorldTest
from tests.train.tiny_runs import tiny_config

TEST = WorldTest(worlds=2, steps=1)
TESTS = [TEST, WorldTest(worlds=1, steps=1, stretch=2.0), WorldTest(worlds=1, steps=1, stretch=4.0)]


class ByHand(Executor):
    """Jobs wait until they are told to end."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Any, Future[Any]]] = []

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((arguments[0], future))
        return future

    def end(self, is_wanted: Callable[[Any], bool] = lambda job: True) -> None:
        for job, future in self.jobs:
            if is_wanted(job) and not future.done():
                future.set_result(pickle.dumps([]))


@pytest.fixture(autouse=True)
def no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is scored is not what these tests are about."""
    monkeypatch.setattr(scorer_module, "summaries", lambda *_: {"floor": True})
    monkeypatch.setattr(
        scorer_module,
        "scores_of_test",
        lambda config, test, scores, floor: {"test": vars(test), "rows": floor, "clips": {}},
    )
    monkeypatch.setattr(scorer_module, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(Scorer, "earlier", lambda *_: [])


def test_own_tests_of_all_rows_are_scored_before_any_sweep(tmp_path: Path) -> None:
    pool = ByHand()
    urgent = ByUrgency(pool, workers=2)
    jobs = []
    for name in ("first", "second"):
        config = tiny_config(tmp_path / name)
        jobs += [job for test in TESTS for job in world_jobs(config, test, tmp_path / name)]
    futures = [urgent.submit(abs, job) for job in jobs]
    begun = []
    while len(begun) < len(jobs):
        assert len([future for _, future in pool.jobs if not future.done()]) <= 2
        job, future = pool.jobs[len(begun)]
        begun.append((job.test.stretch, job.videos.name))
        future.set_result(len(begun))
    own = [(1.0, name) for name in ("first", "first", "second", "second")]
    assert begun == [*own, (2.0, "first"), (2.0, "second"), (4.0, "first"), (4.0, "second")]
    assert sorted(future.result() for future in futures) == list(range(1, len(jobs) + 1))


def test_jobs_that_wait_hear_of_a_pool_that_broke_and_of_one_that_is_closed() -> None:
    pool = ByHand()
    urgent = ByUrgency(pool, workers=1)
    futures = [urgent.submit(abs, number) for number in range(3)]
    pool.jobs[0][1].set_exception(BrokenProcessPool("a worker died"))
    assert all(isinstance(future.exception(1.0), BrokenProcessPool) for future in futures)
    assert len(pool.jobs) == 1
    waiting = [urgent.submit(abs, number) for number in range(2)][1]
    urgent.shutdown(cancel_futures=True)
    assert waiting.cancelled()


def test_a_job_that_fails_keeps_no_other_from_being_begun() -> None:
    pool = ByHand()
    urgent = ByUrgency(pool, workers=1)
    futures = [urgent.submit(abs, number) for number in range(2)]
    pool.jobs[0][1].set_exception(OSError("no such file"))
    pool.jobs[1][1].set_result(7)
    assert isinstance(futures[0].exception(1.0), OSError)
    assert futures[1].result(1.0) == 7


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def stretches(file: Path) -> list[float]:
    if not file.exists():
        return []
    result = json.loads(file.read_text())
    return [part["test"]["stretch"] for part in (result, *result["sweep"])]


def test_a_test_is_written_when_it_is_scored_whatever_comes_later(tmp_path: Path) -> None:
    """Also that of a later row, while the sweep of an earlier one is still being scored."""
    pool, results = ByHand(), tmp_path / "results"
    scorer = Scorer(pool, results)
    configs = [tiny_config(tmp_path / name) for name in ("first", "second")]
    for config in configs:
        config.run.out.mkdir()
        scorer.add(config, TESTS)
    with scorer.writing():
        pool.end(lambda job: job.test.stretch == 1.0)
        wait_until(lambda: all(stretches(results / f"{name}.json") == [1.0] for name in ("first", "second")))
        assert not scorer.written
        pool.end(lambda job: job.test.stretch == 2.0)
        wait_until(lambda: stretches(results / "second.json") == [1.0, 2.0])
        pool.end()
        scorer.finish(wait=True)
    assert [result["row"] for result in scorer.written] == ["first", "second"]
    assert stretches(results / "first.json") == [1.0, 2.0, 4.0]


def test_of_processes_that_need_a_floor_one_measures_it(tmp_path: Path) -> None:
    pools = [ByHand(), ByHand()]
    scorers = [Scorer(pool, None) for pool in pools]
    configs = [tiny_config(tmp_path / name) for name in ("first", "second")]
    for config, scorer in zip(configs, scorers, strict=True):
        config.run.out.mkdir()
        scorer.add(config, [TEST])
    floors = [[job for job, _ in pool.jobs if job.videos is None] for pool in pools]
    assert [len(some) for some in floors] == [TEST.worlds, 0]
    pools[1].end()
    scorers[1].finish(wait=False)
    assert not scorers[1].written  # its floor is being measured elsewhere
    pools[0].end()
    scorers[0].finish(wait=True)
    assert json.loads(floor_file(configs[0], TEST).read_text()) == {"floor": True}
    scorers[1].finish(wait=True)
    assert [scorer.written[0]["row"] for scorer in scorers] == ["first", "second"]


def test_floors_are_measured_while_the_first_row_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, config = ByHand(), tiny_config(tmp_path / "row")
    scorer = Scorer(pool, None)

    def trained(config: TrainConfig) -> bool:
        pool.end()
        wait_until(lambda: all(floor_file(config, test).exists() for test in TESTS))
        return False  # as if it were stopped

    monkeypatch.setattr(rows, "train_row", trained)
    assert not rows.run_rows([config], TESTS, scorer)
    assert all(job.videos is None for job, _ in pool.jobs)
    assert len(pool.jobs) == sum(test.worlds for test in TESTS)
    scorer.add(config, TESTS)  # once is enough
    assert len([job for job, _ in pool.jobs if job.videos is None]) == sum(test.worlds for test in TESTS)


def test_a_floor_whose_process_ended_is_measured_by_another(tmp_path: Path) -> None:
    config, pools = tiny_config(tmp_path / "row"), [ByHand(), ByHand()]
    config.run.out.mkdir()
    first, second = (Scorer(pool, None) for pool in pools)
    first.add(config, [TEST])
    second.add(replace(config), [TEST])
    pools[1].end()
    first._floors.popitem()[1].claim.release()  # as the end of a process does
    second.finish(wait=False)
    pools[1].end()
    second.finish(wait=True)
    assert len(second.written) == 1


def test_a_floor_that_cannot_be_begun_fails_its_row_and_not_the_next(tmp_path: Path) -> None:
    class Broken(ByHand):
        def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
            if not self.jobs and arguments[0].videos is None:
                self.jobs.append((arguments[0], Future()))
                raise OSError("out of memory")
            return super().submit(call, *arguments, **named)

    pool = Broken()
    scorer, configs = Scorer(pool, None), [tiny_config(tmp_path / name) for name in ("first", "second")]
    for config in configs:
        config.run.out.mkdir()
    with pytest.raises(OSError, match="memory"):
        scorer.add(configs[0], [TEST])
    scorer.add(configs[1], [TEST])
    pool.end()
    scorer.finish(wait=True)  # would wait for its own claim
    assert [result["row"] for result in scorer.written] == ["second"]


def test_a_floor_is_written_though_the_row_that_asked_for_it_failed(tmp_path: Path) -> None:
    config, pool = tiny_config(tmp_path / "row"), ByHand()
    config.run.out.mkdir()
    scorer = Scorer(pool, None)
    scorer.add(config, [TEST])
    for job, future in pool.jobs:
        if job.videos is not None:
            future.set_exception(OSError("no such video"))
    pool.end()
    scorer.finish(wait=False)
    assert len(scorer.failures) == 1
    assert json.loads(floor_file(config, TEST).read_text()) == {"floor": True}
    assert not scorer._floors


def test_a_floor_that_failed_during_the_training_costs_its_row_nothing(tmp_path: Path) -> None:
    """It is tried again when the row is there, and may then succeed."""
    config, pool = tiny_config(tmp_path / "row"), ByHand()
    config.run.out.mkdir()
    scorer = Scorer(pool, None)
    scorer.begin_floors(config, TESTS)
    for job, future in pool.jobs:
        if job.test == TESTS[-1]:
            future.set_exception(OSError("no world"))
    pool.end()
    scorer.finish(wait=False)
    scorer.add(config, TESTS)
    pool.end()
    scorer.finish(wait=True)
    assert not scorer.failures
    assert [result["row"] for result in scorer.written] == ["row"]


def test_a_floor_of_the_sweep_that_fails_for_good_costs_its_row_that_test_alone(tmp_path: Path) -> None:
    config, pool = tiny_config(tmp_path / "row"), ByHand()
    config.run.out.mkdir()
    scorer = Scorer(pool, None)
    scorer.begin_floors(config, TESTS)
    for begin in (lambda: None, lambda: scorer.add(config, TESTS)):
        begin()
        for job, future in pool.jobs:
            if job.test == TESTS[-1] and job.videos is None and not future.done():
                future.set_exception(OSError("no world"))
        pool.end()
        scorer.finish(wait=False)
    assert [str(error) for error in scorer.failures] == ["no world"]
    kept = json.loads((config.run.out / "scores.json").read_text())
    assert [part["test"]["stretch"] for part in (kept, *kept["sweep"])] == [1.0, 2.0]


def test_a_floor_that_fails_is_said_once_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool, configs = ByHand(), [tiny_config(tmp_path / name) for name in ("first", "second")]
    scorer = Scorer(pool, None)
    for config in configs:
        config.run.out.mkdir()
    scorer.add(configs[0], [TEST])
    for job, future in pool.jobs:
        if job.videos is None:
            future.set_exception(OSError("no world"))
    pool.end()
    scorer.finish(wait=True)
    assert [str(error) for error in scorer.failures] == ["no world"]
    scorer.add(configs[1], [TEST])
    pool.end()
    scorer.finish(wait=True)
    assert [result["row"] for result in scorer.written] == ["second"]
    assert capsys.readouterr().err.count("no world") == 1
