"""Scores of rows in the background: each test of a row is written when it is scored, whatever else is going on."""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from merope.bench.generated import generated_file, known_facts
from merope.bench.result_files import (
    known_floor,
    left_alone,
    put_together,
    read_result,
    results_file,
    what_differs,
)
from merope.bench.scores import WorldJob, floor_file, score_world, scores_of, scores_of_test, summaries, world_jobs
from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.formats.writing import replace_text
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.world.clips import WorldClips
from merope.world.commanded import WorldTest

LOOK_EVERY_S = 1.0
"""How often it is looked whether a test is scored."""

Worlds = list[Future[bytes]]


@dataclass(frozen=True, eq=False)
class _Scoring:
    """A row that processes are working on."""

    config: TrainConfig
    tests: tuple[WorldTest, ...]  # the benchmark's own, then its sweep
    worlds: dict[WorldTest, Worlds]  # of tests that are not written yet, in their order
    parts: list[dict[str, Any]] = field(default_factory=list)  # tests that are written

    @property
    def next_test(self) -> WorldTest:
        return next(iter(self.worlds))

    @property
    def has_scored_test(self) -> bool:
        return all(future.done() for future in self.worlds[self.next_test])


@dataclass(frozen=True, eq=False)
class _Floor:
    """A floor that processes are working on, and the claim that keeps others from it."""

    clips: WorldClips
    worlds: Worlds
    claim: FileLock


class Scorer:
    """Recovers poses in processes of its own while rows are trained; writes each test of a row when it is scored."""

    def __init__(self, pool: Executor, results: Path | None) -> None:
        self.pool, self.results = pool, results
        if results is not None:  # refused now, not after hours of training
            try:
                results.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                got = f"{results} ({error.strerror})"
                raise invalid("--results", "a folder that can be written to", got, "name another one") from None
        self._floors: dict[Path, _Floor] = {}
        self._failed_floors: dict[Path, Exception] = {}
        self._rows: list[_Scoring] = []
        self._lock = threading.RLock()  # of all that `writing` does beside
        self.written: list[dict[str, Any]] = []
        self.failures: list[Exception] = []

    def begin_floors(self, config: TrainConfig, tests: Sequence[WorldTest]) -> None:
        """Start on the floors of tests that are not known yet: they need no row, and a row takes minutes to train.

        One that failed is tried again. If it fails for good, its row says so when it comes to that test.
        """
        with self._lock:
            for test in tests:
                self._failed_floors.pop(floor_file(config, test), None)
                self._has_floor(config, test)

    def add(self, config: TrainConfig, tests: Sequence[WorldTest]) -> None:
        """Start on the generated videos of a row, and on the floors of its tests that are not known yet."""
        with self._lock:
            self.begin_floors(config, tests)
            jobs = {test: world_jobs(config, test, generated_file(config, test)) for test in tests}
            self._rows.append(_Scoring(config, tuple(tests), {test: self._submit(some) for test, some in jobs.items()}))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Tests are written as soon as they are scored, even in the middle of a training: a machine may go any time."""
        is_over = threading.Event()

        def write() -> None:
            while not is_over.wait(LOOK_EVERY_S):
                self.finish(wait=False)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def finish(self, wait: bool, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Write the tests that are scored; with `wait`, all of them, unless time is over. Whether none is left.

        Rows that cannot be written are in `failures`.
        """
        progress, waits = ProgressLine("scoring", len(self._left()), "worlds"), False
        while True:
            with self._lock:
                self._write_floors()
                for row in self._rows.copy():
                    self._write_scored(row)
            if not wait or not self._rows or is_over():
                return not self._rows
            if left := self._left():
                progress.show(max(0, progress.total - len(left)))  # a floor may have come in since
                wait_for(left, LOOK_EVERY_S, FIRST_COMPLETED)
                continue
            if not waits:
                print("waiting for the floor of a test, which another process measures", file=sys.stderr)
            waits = True
            time.sleep(LOOK_EVERY_S)

    def _left(self) -> Worlds:
        """Jobs that are not done."""
        with self._lock:
            worlds = [floor.worlds for floor in self._floors.values()]
            worlds += [some for row in self._rows for some in row.worlds.values()]
        return [future for some in worlds for future in some if not future.done()]

    def earlier(self, config: TrainConfig, tests: Sequence[WorldTest]) -> list[dict[str, Any]]:
        """What was measured of the same weights before. A file of the results folder with other results is refused."""
        found = []
        own = read_result(config.run.out / "scores.json")
        if own is not None:
            if differs := what_differs(own, config, tests):
                print(f"{config.run.out / 'scores.json'} has {differs}: it will be replaced", file=sys.stderr)
            else:
                found.append(own)
        shared = None if self.results is None else read_result(results_file(config, self.results))
        if shared is not None and self.results is not None:
            if differs := what_differs(shared, config, tests):
                raise left_alone(results_file(config, self.results), differs)
            found.append(shared)
        return found

    def _submit(self, jobs: list[WorldJob]) -> Worlds:
        return [self.pool.submit(score_world, job) for job in jobs]

    def _write_scored(self, row: _Scoring) -> None:
        """Write the tests of a row that are scored, in their order."""
        try:
            while row.worlds and row.has_scored_test and self._has_floor(row.config, row.next_test):
                result = self._write_test(row)
        except Exception as error:  # of a process that recovered poses: it is no fault of the next row
            self._rows.remove(row)
            self.failures.append(say_and_clear(row.config.run.out.name, error))
            return
        if not row.worlds:
            self._rows.remove(row)
            self.written.append(result)

    def _write_test(self, row: _Scoring) -> dict[str, Any]:
        """Write the row's next test beside those that were written before."""
        test = row.next_test
        scores = scores_of(future.result() for future in row.worlds[test])
        row.parts.append(scores_of_test(row.config, test, scores, json.loads(floor_file(row.config, test).read_text())))
        about, earlier = known_facts(row.config), self.earlier(row.config, row.tests)
        text = json.dumps(put_together(about, row.parts, earlier), indent=1)
        del row.worlds[test]
        replace_text(row.config.run.out / "scores.json", text)
        if self.results is not None:
            replace_text(results_file(row.config, self.results), text)
        return json.loads(text)

    def _has_floor(self, config: TrainConfig, test: WorldTest) -> bool:
        """Whether the floor of a test is measured. If nobody is at it, this process begins."""
        file = floor_file(config, test)
        if file.exists() or self._took_floor(config, test):
            return True
        if file in self._failed_floors:
            raise self._failed_floors.pop(file)  # the next row tries again
        if file not in self._floors and (claim := self._claim_on(file)) is not None:
            try:
                self._floors[file] = _Floor(world_clips(config), self._submit(world_jobs(config, test, None)), claim)
            except BaseException:
                claim.release()
                raise
        return False

    def _claim_on(self, file: Path) -> FileLock | None:
        """Taken if this process is to measure a floor: rows that end together would all measure it, for minutes."""
        file.parent.mkdir(parents=True, exist_ok=True)
        claim = FileLock(file.with_suffix(".lock"), blocking=False, thread_local=False)
        try:
            claim.acquire()
        except Timeout:
            return None
        if file.exists():  # since it was last looked for
            claim.release()
            return None
        return claim

    def _write_floors(self) -> None:
        """Write the floors that are measured, whatever became of the rows that asked for them: others wait for them."""
        for file, floor in [*self._floors.items()]:
            if not all(future.done() for future in floor.worlds):
                continue
            del self._floors[file]
            try:
                scores = scores_of(future.result() for future in floor.worlds)
                replace_text(file, json.dumps(summaries(scores, floor.clips), indent=1))
            except Exception as error:  # its row will say so
                self._failed_floors[file] = error
            finally:
                floor.claim.release()

    def _took_floor(self, config: TrainConfig, test: WorldTest) -> bool:
        """Whether another row of the results folder has the floor of this test; it is kept beside the rows' folders."""
        floor = None if self.results is None else known_floor(config, test, self.results)
        if floor is not None:
            replace_text(floor_file(config, test), json.dumps(floor, indent=1))
        return floor is not None


def say_and_clear(what: str, error: Exception) -> Exception:
    """Print an error and clear the variables of its frames: they would keep a model on the GPU for the next row."""
    print(f"{what} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__
    return error
