"""Discrete Fréchet distance between paths: its definition, a fast decision, and the suppression of near duplicates.

A coupling walks along two paths from both starts to both ends, one step on either or both at a time. The distance is
the smallest, over couplings, of the largest gap between points that stand side by side (Eiter and Mannila, 1994).

Everything compares squared gaps with a squared threshold, in float64. Rounding is monotonic, so the bounds agree with
the full decision to the last bit, and which of them answers a pair never shows in the result.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from merope.formats.parts import usable_cores

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Kernel = TypeVar("Kernel", bound=Callable[..., object])

ORDER_CHUNK = 8192  # paths between two reports of the global suppression
MAX_CELLS = 2**20  # along an axis of the endpoint grid: rounding of a coordinate stays far below a cell


def _compiled(kernel: Kernel) -> Kernel:
    # nogil and our own threads rather than prange: numba's OpenMP pool does not survive the fork of a data loader.
    return cast(Kernel, njit(cache=True, nogil=True)(kernel))


def discrete_frechet(
    a: Floats,  # [T, 2] metres
    b: Floats,  # [S, 2] metres
) -> float:
    """The distance in metres, by the definition's own recursion. The reference: slow, and obviously right."""
    gaps = ((a[:, None] - b[None]) ** 2).sum(-1)
    reach = np.full((len(a) + 1, len(b) + 1), np.inf)  # reach[i, j]: largest squared gap on the best way to (i−1, j−1)
    reach[0, 0] = 0.0
    for i in range(len(a)):
        for j in range(len(b)):
            reach[i + 1, j + 1] = max(gaps[i, j], min(reach[i, j], reach[i, j + 1], reach[i + 1, j]))
    return float(np.sqrt(reach[-1, -1]))


@_compiled
def frechet_below(
    a: Floats,  # [T, 2]
    b: Floats,  # [S, 2]
    threshold_squared: float,
) -> bool:
    """Whether the squared distance is below a threshold; stops at the first point of `a` that nothing reaches."""
    reachable = np.zeros(len(b), dtype=np.bool_)
    for i in range(len(a)):
        diagonal, left, alive = i == 0, False, False
        for j in range(len(b)):
            above = reachable[j]
            gap = (a[i, 0] - b[j, 0]) ** 2 + (a[i, 1] - b[j, 1]) ** 2
            left = (diagonal or above or left) and gap < threshold_squared
            reachable[j] = left
            diagonal = above
            alive = alive or left
        if not alive:
            return False
    return bool(reachable[-1])


def landmarks(paths: Floats) -> Floats:  # [N, T, 2] -> [N, 8]
    """First point, last point, and the two corners of the bounding box: no entry moves by more than the distance."""
    return np.concatenate((paths[:, 0], paths[:, -1], paths.min(1), paths.max(1)), axis=-1)


@_compiled
def _close(paths: Floats, marks: Floats, a: int, b: int, threshold_squared: float) -> bool:
    """Whether paths a and b are closer than the threshold: two lower bounds, an upper one, then the decision."""
    for mark in (0, 2):  # the ends meet in every coupling
        gap = (marks[a, mark] - marks[b, mark]) ** 2 + (marks[a, mark + 1] - marks[b, mark + 1]) ** 2
        if gap >= threshold_squared:
            return False
    for mark in range(4, 8):  # the farthest point on a side meets some point, which is no farther out
        if (marks[a, mark] - marks[b, mark]) ** 2 >= threshold_squared:
            return False
    for i in range(paths.shape[1]):  # walking in step is one coupling
        if (paths[a, i, 0] - paths[b, i, 0]) ** 2 + (paths[a, i, 1] - paths[b, i, 1]) ** 2 >= threshold_squared:
            return frechet_below(paths[a], paths[b], threshold_squared)
    return True


@_compiled
def _suppress_group(paths: Floats, marks: Floats, order: Indices, threshold_squared: float, prototype: Indices) -> None:
    """Greedy suppression in the given order; writes the entries of `prototype` that `order` names."""
    kept, count = np.empty_like(order), 0
    for path in order:
        prototype[path] = -1
        for other in kept[:count]:
            if _close(paths, marks, path, other, threshold_squared):
                prototype[path] = other
                break
        if prototype[path] < 0:
            prototype[path] = path
            kept[count] = path
            count += 1


def suppress_groups(
    paths: Floats,  # [N, T, 2]
    groups: Sequence[Indices],  # disjoint; each in the order in which its paths may become prototypes
    threshold_m: float,
    report: Callable[[int], None],
) -> Indices:  # [N]
    """Greedy suppression within each group: the kept path that stands for every path, itself where it is kept.

    A path is dropped when an earlier kept one of its group is closer than the threshold. Groups run on all cores and
    share nothing, so threads cannot change the result. `report` hears how many paths are done.
    """
    prototype, marks = np.full(len(paths), -1, dtype=np.int64), landmarks(paths)
    largest_first = sorted(groups, key=len, reverse=True)
    done = 0
    with ThreadPoolExecutor(usable_cores()) as pool:
        try:
            running = {
                pool.submit(_suppress_group, paths, marks, group, threshold_m * threshold_m, prototype): len(group)
                for group in largest_first
            }
            for finished in as_completed(running):
                finished.result()
                done += running[finished]
                report(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return prototype


@_compiled
def _suppress_in_grid(
    paths: Floats,
    marks: Floats,
    order: Indices,
    threshold_squared: float,
    cell: Indices,  # [N] cell of each path's last point
    neighbours: Indices,  # [C, 9] occupied cells around a cell, −1 for none
    newest: Indices,  # [C] last kept path of a cell, −1 for none
    older: Indices,  # [N] the one kept before it in the same cell, −1 for none
    prototype: Indices,  # [N]
) -> None:
    """The same greedy rule; candidates are the kept paths that end in the 3 × 3 cells around a path's end."""
    for path in order:
        prototype[path] = -1
        for near in neighbours[cell[path]]:
            other = newest[near] if near >= 0 else -1
            while other >= 0 and not _close(paths, marks, path, other, threshold_squared):
                other = older[other]
            if other >= 0:
                prototype[path] = other
                break
        if prototype[path] < 0:
            prototype[path] = path
            older[path] = newest[cell[path]]
            newest[cell[path]] = path


def suppress_all(
    paths: Floats,  # [N, T, 2]
    order: Indices,  # [N] in which paths may become prototypes
    threshold_m: float,
    report: Callable[[int], None],
) -> Indices:  # [N]
    """Greedy suppression over all paths at once, exact: last points farther apart than a cell exclude each other."""
    cell, neighbours = _endpoint_cells(paths[:, -1], threshold_m)
    newest, older = np.full(len(neighbours), -1, dtype=np.int64), np.full(len(paths), -1, dtype=np.int64)
    prototype, marks = np.full(len(paths), -1, dtype=np.int64), landmarks(paths)
    for start in range(0, len(order), ORDER_CHUNK):
        part = order[start : start + ORDER_CHUNK]
        _suppress_in_grid(paths, marks, part, threshold_m * threshold_m, cell, neighbours, newest, older, prototype)
        report(start + len(part))
    return prototype


def _endpoint_cells(
    ends: Floats,  # [N, 2]
    threshold_m: float,
) -> tuple[Indices, Indices]:  # [N], [C, 9]
    """The occupied cell of every end, and which occupied cells surround a cell. Cells are at least a threshold wide."""
    low = ends.min(0)
    # A hair more than the threshold: rounding of the division must not put close ends two cells apart.
    width_m = max(threshold_m * (1 + 1e-6), float((ends - low).max()) / MAX_CELLS)
    column_row = np.floor((ends - low) / width_m).astype(np.int64) + 1
    stride = 2 * MAX_CELLS
    occupied, cell = np.unique(column_row[:, 0] * stride + column_row[:, 1], return_inverse=True)
    steps = np.array([i * stride + j for i in (-1, 0, 1) for j in (-1, 0, 1)])
    around = occupied[:, None] + steps
    place = np.searchsorted(occupied, around).clip(max=len(occupied) - 1)
    return cell.astype(np.int64), np.where(occupied[place] == around, place, -1)
