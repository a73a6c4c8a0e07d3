"""Times of methods that are compared, taken in rounds: each method in turn, every second round the other way about.

A GPU at the limit of its power lowers its clock within a second, so that methods timed one after the other have
different clocks. In rounds all methods have the same. `rest`: how many times its own time the GPU rests after every
run. Without a rest it is at its limit, as in training; after a long one its clock is highest.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

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


@dataclass(frozen=True)
class Measured:
    """A method beside those that it was timed with."""

    method: str
    rest: float
    median_ms: float
    p10_ms: float
    p90_ms: float
    peak_mib: float
    time_ratio: float  # to the first method
    memory_ratio: float
    graph: bool  # timed as a CUDA graph, else launched anew each time


@dataclass(frozen=True, eq=False)
class Replay:
    """A run as it is timed. It holds the run, whose memory a graph reads."""

    run: Callable[[], object]
    graph: torch.cuda.CUDAGraph | None = None  # None: it is launched anew each time

    def __call__(self) -> None:
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()


def measured(
    runs: Mapping[str, Callable[[], object]], repeats: int, rests: Sequence[float] = (0.0,)
) -> Iterator[Measured]:
    """All methods with every rest, in their order; rests one after the other."""
    peaks_mib = {name: peak_mib(run) for name, run in runs.items()}
    replays = {name: captured_or_launched(name, run) for name, run in runs.items()}
    first = next(iter(runs))
    for rest in rests:
        all_times = times_in_rounds(replays, repeats, rest)
        for name, times in all_times.items():
            ratios = (times.median_ms / all_times[first].median_ms, peaks_mib[name] / peaks_mib[first])
            yield Measured(name, rest, *astuple(times), peaks_mib[name], *ratios, replays[name].graph is not None)


def peak_mib(run: Callable[[], object]) -> float:
    """Peak of one launched run beyond what was allocated before it."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def captured(run: Callable[[], object]) -> Replay:
    """A run as a CUDA graph."""
    stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            run()
    finally:
        torch.cuda.set_stream(before)  # torch stays on its own where a capture breaks off
    return Replay(run, graph)


def captured_or_launched(name: str, run: Callable[[], object]) -> Replay:
    """A run as a CUDA graph, or as it is where it cannot be captured. Where memory is missing, neither may be timed."""
    try:
        return captured(run)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"{name} is launched anew each time, it was not captured: {str(error).splitlines()[0]}")
        return Replay(run)


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
