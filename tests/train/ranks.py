"""Several ranks on one machine, joined by gloo."""

import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PRELOADED = ["merope.train.loop", "merope.adapters.saving", "diffusers.models.transformers.transformer_wan"]


def run_ranks(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run work(*arguments) on `count` ranks as torchrun would start them; fails if any of them fails.

    The ranks are forked from a server that has imported the libraries and done nothing else. A process that has run
    other tests has their threads, too, and a rank that was forked from such a process has died in malloc.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / str(rank) for rank in range(count)]
        ranks = [
            server.Process(target=_rank, args=(rank, count, port, said[rank], work, arguments)) for rank in range(count)
        ]
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
