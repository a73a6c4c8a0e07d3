"""Processes that score clips in the background."""

import heapq
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(frozen=True, order=True)
class _Waiting:
    delay: float
    number: int
    future: Future[Any] = field(compare=False)
    begin: Callable[[], Future[Any]] = field(compare=False)


class ByUrgency(Executor):
    """Hands jobs to a pool when a worker is free: those of the least `delay` first, then in the order they came in.

    By itself a pool would score the whole sweep of a row before the next row's own test, which all tables are about.
    """

    def __init__(self, pool: Executor, workers: int) -> None:
        self.pool, self.workers, self.free = pool, workers, workers
        self._waiting: list[_Waiting] = []
        self._lock, self._numbers = threading.Lock(), itertools.count()

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        delay = max((getattr(argument, "delay", 0.0) for argument in arguments), default=0.0)
        job = _Waiting(delay, next(self._numbers), Future(), partial(self.pool.submit, call, *arguments, **named))
        with self._lock:
            heapq.heappush(self._waiting, job)
        self._begin_next()
        return job.future

    def _begin_next(self) -> None:
        with self._lock:
            if not self.free or not self._waiting:
                return
            self.free -= 1
            job = heapq.heappop(self._waiting)
        try:
            job.begin().add_done_callback(partial(self._end, job.future))
        except BrokenExecutor as error:
            job.future.set_exception(error)
            self._drop_waiting(error)

    def _end(self, future: Future[Any], done: Future[Any]) -> None:
        if done.cancelled():
            future.cancel()
            return
        error = done.exception()
        if isinstance(error, BrokenExecutor):  # it says so while it holds a lock that another job would wait for
            self._drop_waiting(error)
        else:
            with self._lock:
                self.free += 1
            self._begin_next()
        future.set_result(done.result()) if error is None else future.set_exception(error)

    def _drop_waiting(self, error: BaseException | None) -> None:
        with self._lock:
            dropped, self._waiting = self._waiting, []
            self.free = max(self.free, 1)  # so that a job that comes later hears of it, too
        for job in dropped:
            job.future.cancel() if error is None else job.future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._drop_waiting(None)
        self.pool.shutdown(wait, cancel_futures=cancel_futures)


@contextmanager
def scoring_pool(workers: int) -> Iterator[Executor]:
    """Processes that recover poses, each on one core; one worker works in this process. Jobs left over are dropped."""
    spawn = torch.multiprocessing.get_context("spawn")
    pool: Executor = InThisProcess()
    if workers > 1:
        pool = ByUrgency(_Workers(workers, spawn, initializer=_begin_worker), workers)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def make_ready(pool: Executor) -> None:
    """Start all processes of a pool now, while cores have nothing else to do: their libraries take seconds to read."""
    if isinstance(pool, ByUrgency):
        for _ in range(pool.workers):
            pool.submit(os.getpid)


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
    from merope.bench.scores import bench_device

    with suppress(RuntimeError):  # a full GPU: its jobs will say so, where an error here would end all processes
        torch.empty(1, device=bench_device())  # reads the GPU's libraries, too
