"""Processes that score clips in the background. They start without the libraries that training needs."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from merope.evaluate.workers import InThisProcess, leave_with_parent

WORKER_NICENESS = 10


class _Workers(ProcessPoolExecutor):
    """Starts processes with signals held back: one that is ended before `_begin_worker` would break the pool."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            return super().submit(call, *arguments, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def scoring_pool(workers: int) -> Iterator[Executor]:
    """Processes that recover poses, each on one core; one worker works in this process. Jobs left over are dropped."""
    spawn = torch.multiprocessing.get_context("spawn")
    pool = _Workers(workers, spawn, initializer=_begin_worker) if workers > 1 else InThisProcess()
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """Ignore signals that stop training: the whole group may get them, but they are for the process that trains.

    A worker ends when that process ends, in whatever way; otherwise it would wait for jobs for ever. It takes one core
    and yields to training, which needs its cores to keep a GPU busy.
    """
    leave_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["OPENCV_FOR_THREADS_NUM"] = "1"  # read when OpenCV is imported, which is later
    os.nice(WORKER_NICENESS)
