"""Several ranks on one machine: children of this process, joined by gloo."""

import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any


def run_ranks(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run work(*arguments) on `count` ranks as torchrun would start them; fails if any of them fails.

    The ranks are forked, so that the libraries are imported once; torch runs on one thread in tests.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        get_context("fork").Process(target=_rank, args=(rank, count, port, work, arguments)) for rank in range(count)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=240)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert codes == [0] * count, f"exit codes of the ranks: {codes}"


def _rank(rank: int, count: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
