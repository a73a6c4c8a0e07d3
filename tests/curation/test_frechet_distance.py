"""The discrete Fréchet distance, decisions about it and greedy suppression, against their definitions."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merope.curation.frechet_distance import discrete_frechet, frechet_below, suppress_all, suppress_groups
from tests.curation.drives import drives

# Multiples of a half: squares, sums and roots of squares are exact, so that distances equal to the threshold occur.
halves = st.integers(-6, 6).map(lambda n: n / 2)


def paths_of(min_points: int = 1, max_points: int = 8) -> st.SearchStrategy[np.ndarray]:
    points = st.lists(st.tuples(halves, halves), min_size=min_points, max_size=max_points)
    return points.map(lambda rows: np.array(rows, dtype=np.float64))


def frechet_by_enumeration(a: np.ndarray, b: np.ndarray) -> float:
    """Smallest over all couplings, each written out."""

    def couplings(i: int, j: int) -> Iterator[list[tuple[int, int]]]:
        if (i, j) == (len(a) - 1, len(b) - 1):
            yield [(i, j)]
        for di, dj in ((1, 0), (0, 1), (1, 1)):
            if i + di < len(a) and j + dj < len(b):
                yield from ([(i, j), *rest] for rest in couplings(i + di, j + dj))

    return min(max(float(np.linalg.norm(a[i] - b[j])) for i, j in coupling) for coupling in couplings(0, 0))


def greedy_by_definition(paths: np.ndarray, order: list[int], threshold_m: float) -> set[int]:
    kept: list[int] = []
    for path in order:
        if all(discrete_frechet(paths[path], paths[other]) >= threshold_m for other in kept):
            kept.append(path)
    return set(kept)


def silent(done: int) -> None:
    """Nobody listens."""


@given(paths_of(max_points=4), paths_of(max_points=4))
def test_reference_is_the_definition(a: np.ndarray, b: np.ndarray) -> None:
    assert discrete_frechet(a, b) == pytest.approx(frechet_by_enumeration(a, b), abs=1e-12)


@settings(max_examples=200)
@given(paths_of(), paths_of(), st.integers(1, 20).map(lambda n: n / 2))
def test_decision_equals_reference(a: np.ndarray, b: np.ndarray, threshold_m: float) -> None:
    distance_m = discrete_frechet(a, b)
    assert frechet_below(a, b, threshold_m**2) == (distance_m < threshold_m)
    squared = round(4 * distance_m**2) / 4  # exactly the squared distance
    assert not frechet_below(a, b, squared)
    assert frechet_below(a, b, squared + 0.125)


@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(2, 30))
def test_decision_turns_at_the_distance(seed: int, points_a: int, points_b: int) -> None:
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(points_a, 2)).cumsum(0), random.normal(size=(points_b, 2)).cumsum(0)
    distance_m = discrete_frechet(a, b)
    assert frechet_below(a, b, (distance_m * (1 + 1e-9)) ** 2)
    assert not frechet_below(a, b, (distance_m * (1 - 1e-9)) ** 2)


@settings(max_examples=200)
@given(paths_of(6, 6), st.lists(st.tuples(halves, halves), min_size=6, max_size=6), st.sampled_from([0.5, 1.0, 2.5]))
def test_bounds_never_contradict_the_distance(a: np.ndarray, change: list[tuple[float, float]], scale: float) -> None:
    pair = np.stack((a, a + scale * np.array(change) / 2))
    order = np.arange(2)
    both_kept = discrete_frechet(pair[0], pair[1]) >= 1.0
    for prototype in (suppress_groups(pair, [order], 1.0, silent), suppress_all(pair, order, 1.0, silent)):
        assert (prototype[1] == 1) == both_kept


@given(st.integers(0, 10_000))
def test_suppression_is_greedy_in_the_given_order(seed: int) -> None:
    paths = drives(40, points=6, seed=seed).numpy()
    order = np.random.default_rng(seed).permutation(40)
    expected = greedy_by_definition(paths, order.tolist(), 2.0)
    for prototype in (suppress_groups(paths, [order], 2.0, silent), suppress_all(paths, order, 2.0, silent)):
        assert set(np.flatnonzero(prototype == np.arange(40))) == expected


def test_grid_of_the_global_scope_takes_any_extent() -> None:
    paths = drives(150, points=8).numpy()
    paths[:3] += np.array([1e30, -1e30])
    order = np.arange(150)
    prototype = suppress_all(paths, order, 0.05, silent)
    assert set(np.flatnonzero(prototype == order)) == greedy_by_definition(paths, order.tolist(), 0.05)
