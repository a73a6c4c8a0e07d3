"""Blocks of work side by side on a CPU, each in one thread."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch


def run_each(work: Callable[..., None], blocks: Iterable[tuple[object, ...]], device: torch.device) -> None:
    """Call `work` for every block: on a CPU several at a time, on other devices one after another.

    By itself PyTorch splits every operation over its threads and waits for the last of them. Operations on a block take
    less than a millisecond: when other programs use the cores, most of the time goes into waiting. So each block has a
    thread of its own here, and operations stay in it. The results do not depend on the number of threads.
    """
    if device.type != "cpu":
        for block in blocks:
            work(*block)
        return
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for done in [pool.submit(work, *block) for block in blocks]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # or threads that start later would have one, like those of the pool
