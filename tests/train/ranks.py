"""Processes with nothing behind them, and several of them as ranks that gloo joins."""

import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ["merope.train.loop", "merope.adapters.saving", "diffusers.models.transformers.transformer_wan"]


def clean_process(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process, not begun yet, that runs work(*arguments) with torch on one thread.

    It is forked from a server that has imported the libraries and done nothing else. A process that has run other
    tests has their threads, too, and a rank that was forked from such a process has died in malloc.
    """
    server = get_context("forkserver")
    server.set_forkserver_preload(LIBRARIES)
    return server.Process(target=_on_one_thread, args=(work, arguments))


def _on_one_thread(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work(*arguments)


def run_ranks(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run work(*arguments) on `count` ranks as torchrun would start them; fails if any of them fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / str(rank) for rank in range(count)]
        ranks = [clean_process(_rank, rank, count, port, said[rank], work, arguments) for rank in range(count)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=240)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            if process.is_alive():
                process.kill()
        for file in said:
            sys.stderr.write(file.read_text() if file.exists() else "")
    assert codes == [0] * count, f"exit codes of the ranks: {codes}"


def _rank(rank: int, count: int, port: int, said: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1), os.dup2(file, 2)  # the server's own are those of whichever test started it
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
