"""Which intervals of keys are attended to in one call, where queries of one group see different keys.

Imports no Triton: what a backward pass holds is asked for before a backend is chosen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from merope.attention.visible_cameras import Run

MOST_HELD = 4
"""Gradients of calls are held and added up at once while they are of at most so many times the keys."""
HELD_BESIDE_SUMS = 2
"""As `MOST_HELD`, where they are too many for that: then float32 sums lie beside them."""


@dataclass(frozen=True)
class Call:
    """Neighbouring queries, and one interval of keys that all of them see. Both are tokens."""

    queries: slice
    keys: slice

    def sees_all(self, keys: slice) -> bool:
        """Whether its interval holds these keys."""
        return self.keys.start <= keys.start and keys.stop <= self.keys.stop

    def place_of(self, keys: slice) -> slice:
        """Where these keys are in its interval."""
        return slice(keys.start - self.keys.start, keys.stop - self.keys.start)

    def serves(self, run: Run) -> bool:
        """Whether it is a part of what the queries of a run attend to."""
        of_run = self.queries.start <= run.queries.start and run.queries.stop <= self.queries.stop
        return of_run and self.keys in run.keys

    def of(self, run: Run) -> slice:
        """Where the queries of a run are among its own."""
        return slice(run.queries.start - self.queries.start, run.queries.stop - self.queries.start)


def interval_calls(runs: Sequence[Run]) -> list[Call]:
    """A call for each interval of each run; neighbouring runs that see the same interval share one."""
    calls: list[Call] = []
    for run in runs:
        for keys in run.keys:
            shared = [i for i, c in enumerate(calls) if c.keys == keys and c.queries.stop == run.queries.start]
            if shared:
                calls[shared[0]] = Call(slice(calls[shared[0]].queries.start, run.queries.stop), keys)
            else:
                calls.append(Call(run.queries, keys))
    return calls


def segments(calls: Sequence[Call], tokens: int) -> list[slice]:
    """All keys, cut wherever the interval of a call starts or stops."""
    cuts = {0, tokens} | {cut for call in calls for cut in (call.keys.start, call.keys.stop)}
    return [slice(*bounds) for bounds in pairwise(sorted(cuts))]


def held_together(calls: Sequence[Call], tokens: int) -> Iterator[list[Call]]:
    """The calls whose gradients of keys are held at the same time: all, or as many as `HELD_BESIDE_SUMS` allows."""
    everything = keys_of(calls) <= MOST_HELD * tokens
    batch: list[Call] = []
    for call in calls:
        if batch and not everything and keys_of([*batch, call]) > HELD_BESIDE_SUMS * tokens:
            yield batch
            batch = []
        batch.append(call)
    yield batch


def keys_of(calls: Sequence[Call]) -> int:
    """Key tokens of all calls; one that several calls see counts as often."""
    return sum(call.keys.stop - call.keys.start for call in calls)
