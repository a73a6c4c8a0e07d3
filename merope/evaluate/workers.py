"""Processes that work for this one and leave with it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import connection
from typing import Any

import torch

from merope.formats.parts import usable_cores


class InThisProcess(Executor):
    """Does each job when it is given."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*arguments, **named))
        return future


def pool_or_this_process(workers: int) -> Executor:
    """One worker is this process, which has read everything already."""
    return worker_pool(workers) if workers > 1 else InThisProcess()


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """Processes that share the cores evenly."""
    threads = max(usable_cores() // workers, 1)
    fresh = multiprocessing.get_context("spawn")  # forked children inherit locks of torch's threads
    return ProcessPoolExecutor(workers, fresh, _begin_worker, (threads,))


def _begin_worker(threads: int) -> None:
    """Ctrl-C ends a worker at once and without words; the parent says what is left."""
    leave_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    os.environ["OPENCV_FOR_THREADS_NUM"] = str(threads)  # read when OpenCV is imported, which is later


def leave_with_parent() -> None:
    """End this process when the one that started it is gone, however it ended: no more work would ever come."""
    threading.Thread(target=_await_parents_end, daemon=True).start()


def _await_parents_end() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
