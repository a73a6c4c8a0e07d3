"""Rows of the world benchmark from start to finish: train, generate, and score in the background.

Every stage goes on where it was stopped, so that a row can be made in pieces of a few minutes. Scores need videos
alone: a row that one machine trained and generated can be scored on another.
"""

import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock, Timeout

from merope.bench.generated import check_generated, generate_row
from merope.bench.result_files import check_nothing_is_trained_again
from merope.bench.scorer import Scorer, say_and_clear
from merope.bench.scores import bench_device
from merope.bench.scoring_pool import make_ready
from merope.bench.stills import keep_stills
from merope.bench.straight_drives import has_parallel_branch, keep_straight_drives
from merope.errors import invalid
from merope.evaluate.workers import InThisProcess
from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.train.provenance import steps_done, timed_piece
from merope.world.commanded import WorldTest

Stage = Literal["trained", "generated", "scored"]


def train_row(config: TrainConfig) -> bool:
    """Train a row, or go on with it. Returns whether it is finished. Another run in its folder is refused."""
    with timed_piece(config):
        train(config)
    return steps_done(config) >= config.run.steps


def run_rows(
    configs: Sequence[TrainConfig],  # each with its seed, see with_seed
    tests: Sequence[WorldTest],  # the first one is the benchmark's, the others its sweep
    scorer: Scorer,
    until: Stage = "scored",
    is_over: Callable[[], bool] = lambda: False,
    is_made: Callable[[TrainConfig], bool] = lambda config: False,
    score_only: bool = False,  # videos that are there already
    rows_at_once: int = 1,  # in other processes beside this one; results say it
) -> bool:
    """Make row after row in one process. Returns whether all of them are done.

    Rows that are made, or that another process is making, are left alone. When a signal stops the training of a row, or
    time is over, no further row is begun. A row that fails does not stop the others; its error is raised at the end.
    """
    if score_only and until != "scored":
        raise invalid("--until", "scored, with --score-only", until, "leave one of the two out")
    done, failures = 0, []
    with ExitStack() as claims, scorer.writing():
        for config in configs:
            if is_over():
                break
            try:
                if score_only and not is_made(config):
                    _check_videos(config, tests)  # before a claim makes a folder
                if not _claim(config, claims):
                    continue
                if not is_made(config):
                    if score_only:
                        _score_row(config, tests, scorer)
                    elif not _make_row(config, tests, scorer, until, rows_at_once):
                        break
                done += 1
            except Exception as error:  # a loss that is not finite, or whatever a GPU's libraries say
                failures.append(say_and_clear(config.run.out.name, error))
                if not _could_free_gpu():
                    break
        is_finished = scorer.finish(wait=True, is_over=is_over if score_only else lambda: False)
    if failures or scorer.failures:
        raise [*failures, *scorer.failures][0]
    return done == len(configs) and is_finished


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


def _make_row(config: TrainConfig, tests: Sequence[WorldTest], scorer: Scorer, until: Stage, rows_at_once: int) -> bool:
    """Train and generate a row and have it scored; False where training was stopped."""
    check_nothing_is_trained_again(config, scorer.results)
    if until == "scored" and not isinstance(scorer.pool, InThisProcess):  # which is about to train
        make_ready(scorer.pool)
        scorer.begin_floors(config, tests)
    if not train_row(config):
        return False
    scorer.earlier(config, tests)  # refused now, not when everything is generated
    device = bench_device()
    for test in tests if until != "trained" else ():
        generate_row(config, test, device, rows_at_once)
    if until == "scored":
        scorer.add(config, tests)
    if scorer.results is not None:
        _keep_for_figures(config, tests[0], scorer.results, device, has_videos=until != "trained")
    _free_model()
    return True


def _check_videos(config: TrainConfig, tests: Sequence[WorldTest]) -> None:
    """Refuse a row of which videos are missing, or that are not its own."""
    for test in tests:
        check_generated(config, test)


def _score_row(config: TrainConfig, tests: Sequence[WorldTest], scorer: Scorer) -> None:
    """Have a row scored of which nothing but the videos need be in its folder."""
    scorer.earlier(config, tests)
    scorer.add(config, tests)
    if scorer.results is not None:
        _keep_for_figures(config, tests[0], scorer.results, bench_device(), has_videos=True)


def _keep_for_figures(
    config: TrainConfig, test: WorldTest, results: Path, device: torch.device, has_videos: bool
) -> None:
    """Keep what figures need of weights and videos, which may be gone tomorrow. An error costs the row nothing."""
    wanted: dict[str, Callable[[], Path]] = {}
    if has_videos:
        wanted["stills"] = lambda: keep_stills(config, test, results, device)
    if has_parallel_branch(config) and (config.run.out / "trained").is_dir():
        wanted["straight drives"] = lambda: keep_straight_drives(config, results, device)
    for what, keep in wanted.items():
        try:
            keep()
        except Exception as error:
            say_and_clear(f"{what} of {config.run.out.name}", error)


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
