"""Times of methods that are compared, taken in rounds: each method in turn, every second round the other way about.

A GPU at the limit of its power lowers its clock within a second, so that methods timed one after the other have
different clocks. In rounds all methods have the same. `rest`: how many times its own time the GPU rests after every
run. Without a rest it is at its limit, as in training; after a long one its clock is highest.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

WARM_UP_S = 1.0
"""Of the same rounds, before those that count: clocks settle."""


@dataclass(frozen=True)
class Times:
    """Of one method, in milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @classmethod
    def of(cls, all_ms: list[float]) -> "Times":
        cuts = statistics.quantiles(all_ms, n=10)
        return cls(statistics.median(all_ms), cuts[0], cuts[-1])


def as_graph(run: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """Replays of a run as a CUDA graph, and True; the run itself, and False, where it cannot be captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            run()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"    not captured: {str(error).splitlines()[0]}")
        return run, False
    return graph.replay, True


def times_in_rounds(replays: Mapping[str, Callable[[], object]], repeats: int, rest: float = 0.0) -> dict[str, Times]:
    """Of every method, over so many rounds."""
    found: dict[str, list[float]] = {name: [] for name in replays}
    begin, warm_up, counted = time.monotonic(), True, 0
    while warm_up or counted < repeats:
        for name in list(replays) if counted % 2 == 0 else reversed(list(replays)):
            elapsed_ms = _time_ms(replays[name])
            time.sleep(rest * elapsed_ms / 1e3)
            if not warm_up:
                found[name].append(elapsed_ms)
        counted += not warm_up
        warm_up = time.monotonic() - begin < WARM_UP_S
    return {name: Times.of(all_ms) for name, all_ms in found.items()}


def _time_ms(replay: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
