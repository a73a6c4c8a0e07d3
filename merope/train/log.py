"""What a run says about itself: a line on the terminal, TensorBoard, and one JSON line per logged step."""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from merope.draw.progress import duration, show_line
from merope.formats.writing import replace_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

STALL_S = 300.0
"""A step that takes longer is spoken of."""


class TrainingLog:
    """Numbers of a run. Ranks other than the first have none and write nothing."""

    def __init__(self, folder: Path, steps: int, begun: int, batch_size: int, enabled: bool) -> None:
        self.steps, self.begun, self.batch_size, self.enabled = steps, begun, batch_size, enabled
        self.started_s = time.perf_counter()
        self.file = folder / "log.jsonl"
        self.board: SummaryWriter | None = None
        if enabled:
            self._forget_steps_after(begun)
            self.board = _tensorboard(folder / "tensorboard", begun)

    def step(self, step: int, numbers: dict[str, float], show: bool) -> None:
        """Numbers of the step that was just done (counted from 1)."""
        if not self.enabled:
            return
        elapsed_s, done = time.perf_counter() - self.started_s, step - self.begun
        numbers = numbers | {"clips_per_s": done * self.batch_size / elapsed_s}
        if torch.cuda.is_available():
            numbers["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        with self.file.open("a") as stream:
            stream.write(json.dumps({"step": step, **numbers}) + "\n")
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
        left_s = elapsed_s / done * (self.steps - step)
        text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        show_line(f"step {step}/{self.steps}  {text}  {duration(left_s)} left", keep=show)

    def say(self, text: str) -> None:
        if self.enabled:
            show_line(text, keep=True)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()

    def _forget_steps_after(self, step: int) -> None:
        """A run that went on from an older checkpoint does those steps again; a crash may have cut a line off."""
        if self.file.exists():
            rows = [line for line in self.file.read_text().splitlines() if _step_of(line) <= step]
            replace_text(self.file, "".join(f"{row}\n" for row in rows))


def _tensorboard(folder: Path, begun: int) -> "SummaryWriter | None":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # numbers are in log.jsonl all the same
        show_line("tensorboard is not installed: pip install 'merope[train]' for its logs", keep=True)
        return None
    return SummaryWriter(str(folder), purge_step=begun + 1 if begun else None)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


@contextmanager
def stall_notice(rank: int) -> Iterator[Callable[[str], None]]:
    """Say one line when a piece of work takes minutes. The caller names every piece as it begins.

    A rank that is stopped makes all others wait inside torch without a word. Two ranks watch, so that one is awake.
    """
    begun: queue.Queue[str] = queue.Queue()

    def watch() -> None:
        work = begun.get()
        while work:
            try:
                work = begun.get(timeout=STALL_S)
            except queue.Empty:
                why = "a rank may be stopped, or data or the disk may be slow"
                show_line(f"rank {rank}: {work} is not done after {duration(STALL_S)}; {why}", keep=True)
                work = begun.get()

    if rank < 2:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield begun.put
    finally:
        begun.put("")
