"""Rows of the world benchmark from start to finish: train, generate, and score in the background.

Every stage goes on where it was stopped, so that a row can be made in pieces of a few minutes.
"""

import gc
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout

from merope.bench.generated import generate_row, generated_file
from merope.bench.result_files import (
    about_clips,
    check_nothing_is_trained_again,
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
from merope.train.loop import train
from merope.train.provenance import provenance, steps_done, timed_piece
from merope.world.commanded import WorldTest

Stage = Literal["trained", "generated", "scored"]


def train_row(config: TrainConfig) -> bool:
    """Train a row, or go on with it. Returns whether it is finished. Another run in its folder is refused."""
    with timed_piece(config):
        train(config)
    return steps_done(config) >= config.run.steps


@dataclass(frozen=True, eq=False)
class _Scoring:
    """A row that processes are working on."""

    config: TrainConfig
    tests: tuple[WorldTest, ...]  # the benchmark's own, then its sweep
    worlds: dict[WorldTest, list[Future[bytes]]]  # of tests that are not written yet, in their order
    parts: list[dict[str, Any]] = field(default_factory=list)  # tests that are written

    @property
    def has_scored_test(self) -> bool:
        return all(future.done() for future in next(iter(self.worlds.values())))


class Scorer:
    """Recovers poses in processes of its own while rows are trained; writes each test of a row when it is scored."""

    def __init__(self, pool: Executor, results: Path | None, rows_at_once: int = 1) -> None:
        self.pool, self.results, self.rows_at_once = pool, results, rows_at_once
        if results is not None:  # refused now, not after hours of training
            try:
                results.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                got = f"{results} ({error.strerror})"
                raise invalid("--results", "a folder that can be written to", got, "name another one") from None
        self._floors: dict[Path, list[Future[bytes]]] = {}
        self._rows: list[_Scoring] = []
        self.written: list[dict[str, Any]] = []
        self.failures: list[Exception] = []

    def add(self, config: TrainConfig, tests: Sequence[WorldTest]) -> None:
        """Start on the generated videos of a row, and on the floors of its tests that are not known yet."""
        for test in tests:
            file = floor_file(config, test)
            if file not in self._floors and not file.exists() and not self._took_floor(config, test):
                self._floors[file] = self._submit(world_jobs(config, test, None))
        jobs = {test: world_jobs(config, test, generated_file(config, test)) for test in tests}
        self._rows.append(_Scoring(config, tuple(tests), {test: self._submit(some) for test, some in jobs.items()}))

    def finish(self, wait: bool) -> None:
        """Write the tests that are scored; with `wait`, all of them. Rows that cannot be written are in `failures`."""
        for row in self._rows.copy():
            try:
                while row.worlds and (wait or row.has_scored_test):
                    result = self._write_test(row)
            except Exception as error:  # of a process that recovered poses: it is no fault of the next row
                self._rows.remove(row)
                self.failures.append(_say_and_clear(row.config, error))
                continue
            if not row.worlds:
                self._rows.remove(row)
                self.written.append(result)

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

    def _submit(self, jobs: list[WorldJob]) -> list[Future[bytes]]:
        return [self.pool.submit(score_world, job) for job in jobs]

    def _write_test(self, row: _Scoring) -> dict[str, Any]:
        """Write the row's next test beside those that were written before."""
        test, futures = next(iter(row.worlds.items()))
        scores = scores_of(_wait_for(futures, f"{row.config.run.out.name} ×{test.stretch:g}"))
        row.parts.append(scores_of_test(row.config, test, scores, self._floor(row.config, test)))
        about = provenance(row.config) | {"rows_at_once": self.rows_at_once, "data": about_clips(row.config)}
        text = json.dumps(put_together(about, row.parts, self.earlier(row.config, row.tests)), indent=1)
        del row.worlds[test]
        replace_text(row.config.run.out / "scores.json", text)
        if self.results is not None:
            replace_text(results_file(row.config, self.results), text)
        return json.loads(text)

    def _took_floor(self, config: TrainConfig, test: WorldTest) -> bool:
        """Whether another row of the results folder has the floor of this test; it is kept beside the rows' folders."""
        floor = None if self.results is None else known_floor(config, test, self.results)
        if floor is not None:
            replace_text(floor_file(config, test), json.dumps(floor, indent=1))
        return floor is not None

    def _floor(self, config: TrainConfig, test: WorldTest) -> dict[str, Any]:
        file = floor_file(config, test)
        if not file.exists():
            scores = scores_of(_wait_for(self._floors[file], f"floor ×{test.stretch:g}"))
            replace_text(file, json.dumps(summaries(scores, world_clips(config)), indent=1))
        return json.loads(file.read_text())


def _wait_for(futures: list[Future[bytes]], what: str) -> Iterator[bytes]:
    """Results in order, with a line of progress."""
    progress = ProgressLine(f"scoring {what}", len(futures), "worlds")
    for count, future in enumerate(futures, start=1):
        yield future.result()
        progress.show(count)


def run_rows(
    configs: Sequence[TrainConfig],  # each with its seed, see with_seed
    tests: Sequence[WorldTest],  # the first one is the benchmark's, the others its sweep
    scorer: Scorer,
    until: Stage = "scored",
    is_over: Callable[[], bool] = lambda: False,
    is_made: Callable[[TrainConfig], bool] = lambda config: False,
) -> bool:
    """Make row after row in one process. Returns whether all of them are done.

    Rows that are made, or that another process is making, are left alone. When a signal stops the training of a row, or
    time is over, no further row is begun. A row that fails does not stop the others; its error is raised at the end.
    """
    done, failures = 0, []
    with ExitStack() as claims:
        for config in configs:
            if is_over():
                break
            try:
                if not _claim(config, claims):
                    continue
                if not (is_made(config) or _make_row(config, tests, scorer, until)):
                    break
                done += 1
            except Exception as error:  # a loss that is not finite, or whatever a GPU's libraries say
                failures.append(_say_and_clear(config, error))
                if not _could_free_gpu():
                    break
        scorer.finish(wait=True)
    if failures or scorer.failures:
        raise [*failures, *scorer.failures][0]
    return done == len(configs)


def _say_and_clear(config: TrainConfig, error: Exception) -> Exception:
    """Print an error and clear the variables of its frames: they would keep a model on the GPU for the next row."""
    print(f"{config.run.out.name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__
    return error


def _could_free_gpu() -> bool:
    """Free the GPU; False where it no longer works for this process. After some errors no call to it does."""
    try:
        _free_model()
    except RuntimeError:
        return False
    return True


def _claim(config: TrainConfig, claims: ExitStack) -> bool:
    """Whether this process may make a row. Its claim holds until `claims` or the process ends."""
    config.run.out.mkdir(parents=True, exist_ok=True)
    try:
        claims.enter_context(FileLock(config.run.out / "row.lock", blocking=False))
    except Timeout:
        return False
    return True


def _make_row(config: TrainConfig, tests: Sequence[WorldTest], scorer: Scorer, until: Stage) -> bool:
    """Train and generate a row and have it scored; False where training was stopped."""
    check_nothing_is_trained_again(config, scorer.results)
    if not train_row(config):
        return False
    scorer.earlier(config, tests)  # refused now, not when everything is generated
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for test in tests if until != "trained" else ():
        generate_row(config, test, device)
    if until == "scored":
        scorer.add(config, tests)
    _free_model()
    scorer.finish(wait=False)
    return True


def _free_model() -> None:
    """Also drop compiled code: it keeps a row's weights alive and counts against the limit of recompilations."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def time_limit(seconds: float) -> Iterator[Callable[[], bool]]:
    """Whether the time is over, or SIGTERM or Ctrl-C has come; a training loop that runs then writes a checkpoint.

    The signal is repeated every second, because a loop that is still being built does not listen yet. A terminal sends
    Ctrl-C to every process of its group. The first one loses nothing, a second one ends them at once.
    """
    over: list[int] = []

    def end(number: int, frame: object) -> None:
        over.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        if number == signal.SIGALRM:
            signal.raise_signal(signal.SIGTERM)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield lambda: bool(over)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)
