"""Which key cameras each query camera sees: causal blocks, windows, sinks, clean and noisy copies of a clip."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Self

import torch
from torch import Tensor

from merope.errors import invalid

Interval = tuple[int, int]
"""start, stop: those from start to stop − 1."""
KeyRanges = tuple[tuple[Interval, ...], ...]
"""The key tokens that each query camera sees, and last those that the query tokens after the cameras see."""


@dataclass(frozen=True)
class Visibility:
    """For every query camera one or two intervals (start, stop) of key cameras: it sees start … stop − 1.

    intervals: [[(start, stop)], [(start, stop), (start, stop)], …], or an integer tensor [query cameras, 1 or 2, 2].
        Two intervals are in order and apart. One of them may be empty (start = stop), not both.

    Tokens of a camera without a pose see and are seen like those of any other camera. Extra tokens are seen by every
    camera, and see extra tokens only: if they saw all cameras, a later layer would read the future from them.
    """

    intervals: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        rows = self.intervals.tolist() if isinstance(self.intervals, Tensor) else self.intervals
        if not isinstance(rows, list | tuple) or not rows:
            raise invalid("intervals", "of at least one query camera", repr(rows), "list the intervals of every camera")
        object.__setattr__(self, "intervals", tuple(_joined(_checked(row, i)) for i, row in enumerate(rows)))

    @classmethod
    def block_causal(
        cls, cameras: int, block: int = 3, *, last: int | None = None, sink: int = 0, cached: int = 0
    ) -> Self:
        """Blocks of so many cameras in a row: each camera sees its own block and what came before it.

        cameras: query cameras. Key cameras are `cached` earlier ones, then the same cameras.
        last: how many are seen at most, the own block included; None is all.
        sink: how many of the first key cameras are seen whatever `last` says.
        cached: key cameras before the first query camera, those that a stream keeps.
        """
        _check_count("cameras", cameras, 1)
        _check_count("cached", cached, 0)
        _check_count("sink", sink, 0)
        windows = [(_window_start(cached + stop, block, last), cached + stop) for _, stop in _blocks(cameras, block)]
        return cls(tuple(((0, min(sink, start)), (start, stop)) for start, stop in windows))

    @classmethod
    def teacher_forcing(
        cls, cameras: int, block: int = 3, *, last: int | None = None, given: int | None = None
    ) -> Self:
        """A clean copy of a clip, then a noisy one, in one pass: 2 · cameras on both sides.

        A clean camera sees the clean cameras up to the end of its block. A noisy one sees the clean cameras before its
        block, and the noisy ones of its block: what it will see when the clip is made block by block.

        cameras: those of one whole copy.
        last: how many are seen at most, the own block included; None is all. (Sinks would be a third interval.)
        given: leave out what has no part in the others' loss: the noisy copy of the first `given` cameras, whole
            blocks, and the clean copy of the last block. Then there are `teacher_forced(…)` cameras of each copy.
        """
        clean, noisy = teacher_forced(cameras, block, given)
        seen_by_clean = cls.block_causal(cameras, block, last=last).intervals[clean]
        ahead = len(seen_by_clean) - noisy.start  # from a camera's number in the clip to its place in the noisy copy
        seen_by_noisy = tuple(
            ((_window_start(stop, block, last), start), (ahead + start, ahead + stop))
            for start, stop in list(_blocks(cameras, block))[noisy]
        )
        return cls(seen_by_clean + seen_by_noisy)

    def table(self) -> Tensor:  # int64 [query cameras, 2, 2]
        """All intervals as start, stop; the second is empty where one is enough."""
        return torch.tensor([(*row, (row[0][1],) * 2)[:2] for row in self.intervals])


def teacher_forced(cameras: int, block: int, given: int | None) -> tuple[slice, slice]:
    """The cameras of a clip of which `Visibility.teacher_forcing` has a clean copy, and those of a noisy one."""
    if given is None:
        return slice(0, cameras), slice(0, cameras)
    last_block = (cameras - 1) // block * block
    _check_count("given", given, 0)
    if given % block or given > last_block:
        raise invalid("given", f"whole blocks of {block} of {cameras} cameras, not all", given, "leave a block to make")
    return slice(0, last_block), slice(given, cameras)


def key_ranges(
    sees: Visibility,
    query_cameras: int,
    key_cameras: int,
    tokens_per_camera: int,  # of the key side
    extra_tokens: int,
    key_extra_tokens: int,
) -> KeyRanges | None:
    """The tokens that a visibility means for the two sides of a plan; None where every query sees every key."""
    if not isinstance(sees, Visibility):
        raise invalid("sees", "a merope.Visibility", type(sees).__name__, "Visibility.block_causal(cameras) makes one")
    if len(sees.intervals) != query_cameras:
        fix = "make it for the cameras of the query side"
        raise invalid("sees", f"of the plan's {query_cameras} query cameras", len(sees.intervals), fix)
    farthest = max(stop for row in sees.intervals for _, stop in row)
    if farthest > key_cameras:
        fix = "a plan without `key` has the query cameras as keys; a stream's keys are its cache and its own block"
        raise invalid("sees", f"within the plan's {key_cameras} key cameras", f"a stop at {farthest}", fix)
    if extra_tokens and not key_extra_tokens:
        fix = "give the key side extra tokens, too, or attend from these tokens in a plan of their own"
        raise invalid("extra_tokens", "0: with `sees` they see extra tokens only, and no key is one", extra_tokens, fix)
    end = key_cameras * tokens_per_camera
    extra = ((end, end + key_extra_tokens),)
    rows = [[(start * tokens_per_camera, stop * tokens_per_camera) for start, stop in row] for row in sees.intervals]
    seen = tuple(_joined((*row, *extra)) for row in rows)
    whole = (0, end + key_extra_tokens)
    return None if set(seen) == {(whole,)} and not extra_tokens else (*seen, extra if extra_tokens else ())


@dataclass(frozen=True)
class Run:
    """Neighbouring query cameras that see the same keys, or the query tokens after the cameras."""

    cameras: slice  # empty for the tokens after the cameras
    queries: slice  # tokens
    keys: tuple[slice, ...]  # tokens
    cameraless: slice  # of the plan's `cameraless_queries`

    def seen(self, x: Tensor, dim: int) -> Tensor:
        """What belongs to the keys of the run, of tokens along a dimension; a view where they are neighbours."""
        parts = [x.narrow(dim, keys.start, keys.stop - keys.start) for keys in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def runs(
    visible: KeyRanges,
    tokens_per_camera: int,
    query_tokens: int,
    cameraless_queries: Tensor,  # int64 [M] in order
) -> Iterator[Run]:
    """The fewest runs, in order, that hold all query tokens."""
    cameras, camera, done = len(visible) - 1, 0, 0
    for ranges, same in groupby(visible):
        first, camera = camera, camera + len(list(same))
        own = slice(first, min(camera, cameras))
        start = first * tokens_per_camera
        stop = query_tokens if camera > cameras else camera * tokens_per_camera
        if start < stop:
            everything = stop == query_tokens  # which a GPU need not be asked
            before, done = done, len(cameraless_queries) if everything else int((cameraless_queries < stop).sum())
            yield Run(own, slice(start, stop), tuple(slice(*each) for each in ranges), slice(before, done))


def _blocks(cameras: int, block: int) -> Iterator[Interval]:
    """The own block of every camera; the last one may be shorter."""
    _check_count("block", block, 1)
    for camera in range(cameras):
        start = camera // block * block
        yield start, min(start + block, cameras)


def _window_start(stop: int, block: int, last: int | None) -> int:
    """The first of the `last` cameras before stop."""
    if last is None:
        return 0
    _check_count("last", last, block, f"a camera sees its own block of {block}")
    return max(0, stop - last)


def _check_count(name: str, value: object, least: int, fix: str = "count cameras, one for each latent frame") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise invalid(name, f"an int ≥ {least}", repr(value), fix)


def _checked(row: object, camera: int) -> list[Interval]:
    """The intervals of one query camera that are not empty."""
    name = f"the intervals of query camera {camera}"
    if not isinstance(row, list | tuple) or len(row) not in (1, 2) or not all(map(_is_interval, row)):
        raise invalid(
            name, "one or two pairs (start, stop) of integers", repr(row), "write [(0, 3)] or [(0, 3), (6, 9)]"
        )
    bounds = [bound for interval in row for bound in interval]
    seen: list[Interval] = [(start, stop) for start, stop in row if start != stop]
    if not seen:
        raise invalid(name, "of at least one key camera", repr(row), "let it see itself at least")
    if any(start > stop for start, stop in row) or min(bounds) < 0:
        raise invalid(name, "0 ≤ start ≤ stop", repr(row), "write the first camera and the one after the last")
    if any(later[0] < earlier[1] for earlier, later in pairwise(seen)):
        raise invalid(name, "in order and apart", repr(row), "sort the two, and join them where they overlap")
    return seen


def _is_interval(pair: object) -> bool:
    whole = isinstance(pair, Sequence) and len(pair) == 2
    return whole and all(isinstance(bound, int) and not isinstance(bound, bool) for bound in pair)  # type: ignore[attr-defined]


def _joined(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Without empty ones, and with those that touch made one."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and start <= joined[-1][1] and start < stop:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)
