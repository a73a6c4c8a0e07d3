"""What a run says about itself: a line on the terminal, TensorBoard, and one JSON line per logged step."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

OVERWRITE = "\r\x1b[K"
"""Back to the beginning of a terminal's line, and empty it."""


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
        self._print(f"step {step}/{self.steps}  {text}  {_duration(left_s)} left", keep=show)

    def say(self, text: str) -> None:
        if self.enabled:
            self._print(text, keep=True)

    def _print(self, line: str, keep: bool) -> None:
        """Lines to keep; on a terminal also the others, each in the place of the last."""
        if sys.stderr.isatty():
            print(f"{OVERWRITE}{line}", end="\n" if keep else "", file=sys.stderr, flush=True)
        elif keep:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()

    def _forget_steps_after(self, step: int) -> None:
        """A run that went on from an older checkpoint does those steps again; a crash may have cut a line off."""
        if self.file.exists():
            rows = [line for line in self.file.read_text().splitlines() if _step_of(line) <= step]
            part = self.file.with_suffix(".part")
            part.write_text("".join(f"{row}\n" for row in rows))
            part.replace(self.file)


def _tensorboard(folder: Path, begun: int) -> "SummaryWriter | None":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # numbers are in log.jsonl all the same
        print("tensorboard is not installed: pip install 'merope[train]' for its logs", file=sys.stderr)
        return None
    return SummaryWriter(str(folder), purge_step=begun + 1 if begun else None)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except json.JSONDecodeError:
        return float("inf")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
