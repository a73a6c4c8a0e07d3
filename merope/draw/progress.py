"""Progress of long work as a line on stderr: rewritten in place on a terminal, now and then in a log."""

import sys
import time

OVERWRITE = "\r\x1b[K"
FIRST_S, TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 1.0, 0.2, 10.0


def show_line(line: str, keep: bool = False) -> None:
    """Print a line in the place of the last one. Where nobody watches, only lines to keep are printed."""
    if sys.stderr.isatty():
        print(f"{OVERWRITE}{line}", end="\n" if keep else "", file=sys.stderr, flush=True)
    elif keep:
        print(line, file=sys.stderr, flush=True)


class ProgressLine:
    """How far some work is and how long it will still take. Work of less than a second says nothing."""

    def __init__(self, doing: str, total: int, unit: str = "clips", before: int = 0) -> None:
        """`before` of `total` were done by an earlier run."""
        self.doing, self.total, self.unit, self.before = doing, total, unit, before
        self.began_s = self.shown_s = time.monotonic()
        self.spoken = False

    def show(self, done: int, note: str = "") -> None:
        """Say that `done` of the total are done, if it is time to. `note` stands behind the count."""
        now_s, finished = time.monotonic(), done >= self.total
        interval_s = (TERMINAL_INTERVAL_S if sys.stderr.isatty() else LOG_INTERVAL_S) if self.spoken else FIRST_S
        if now_s - self.shown_s < interval_s and not (finished and self.spoken):
            return
        self.shown_s, self.spoken = now_s, True
        left_s = (now_s - self.began_s) / max(done - self.before, 1) * (self.total - done)
        left = "" if finished else f", {duration(left_s)} left"
        line = f"{self.doing}: {done:,} of {self.total:,} {self.unit}{note and ', '}{note}{left}"
        show_line(line, keep=finished or not sys.stderr.isatty())


def duration(seconds: float) -> str:
    """Seconds as a person says them: 40 s, 12 min, 3 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
