"""Means over worlds and training seeds with 95 % intervals, by a bootstrap that keeps rows paired.

A repeated benchmark would draw other worlds and train other seeds. So both are resampled, worlds with all of their
manoeuvres. Every row sees the same draws: two rows are compared on the worlds and seeds that they share. Few seeds give
few different draws. With two seeds an interval tells much more about worlds than about training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from merope.evaluate.summary import Interval
from merope.world.commanded import MANOEUVRES

RESAMPLES = 4000
BOOTSTRAP_SEED = 0
Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Grid:
    """One metric of one row; NaN where a clip has no number."""

    seeds: tuple[int, ...]
    values: Numbers  # [seeds, worlds, manoeuvres]


def grid(
    clips: Mapping[int, Mapping[str, Mapping[str, Any]]],  # by seed, then by name
    metric: str,
    lens: str | None = None,
) -> Grid:
    """A metric of the clips of some seeds, which are of one test; of one kind of lens, or of all."""
    seeds = tuple(sorted(clips))
    return Grid(seeds, np.stack([_clip_values(list(clips[seed].values()), metric, lens) for seed in seeds]))


def _clip_values(clips: Sequence[Mapping[str, Any]], metric: str, lens: str | None) -> Numbers:  # [worlds, manoeuvres]
    wanted = {
        (clip["world"], clip["manoeuvre"]): clip[metric] if lens in (None, clip["lens"]) else None for clip in clips
    }
    worlds = sorted({world for world, _ in wanted})
    return np.array([[wanted[world, name] for name in MANOEUVRES] for world in worlds], dtype=np.float64)


def interval(of: Grid) -> Interval:
    """The mean over clips with a number, and the central 95 % of its resampled means; `count` counts such clips.

    There is no interval if all numbers are of one world and one seed, however many other clips failed.
    """
    has_number = ~np.isnan(of.values)
    sums = np.where(has_number, of.values, 0.0).sum(axis=-1)
    counts = has_number.sum(axis=-1, dtype=np.float64)
    total = float(counts.sum())
    mean = float(sums.sum()) / total if total else math.nan
    if (counts > 0).sum() < 2:  # one world of one seed: every draw of it is the same
        return Interval(mean, math.nan, math.nan, int(total))
    seed_weights, world_weights = _weights("seeds", sums.shape[0]), _weights("worlds", sums.shape[1])
    top, bottom = (((seed_weights @ table) * world_weights).sum(axis=-1) for table in (sums, counts))
    low, high = np.quantile(top[bottom > 0] / bottom[bottom > 0], (0.025, 0.975))
    return Interval(mean, float(low), float(high), int(total))


def difference(row: Grid, against: Grid) -> Interval | None:
    """Row minus other row over the clips and seeds that both have; None where they share no seed."""
    common = sorted(set(row.seeds) & set(against.seeds))
    if not common:
        return None
    mine, theirs = (some.values[[some.seeds.index(seed) for seed in common]] for some in (row, against))
    return interval(Grid(tuple(common), mine - theirs))


@lru_cache
def _weights(what: Literal["seeds", "worlds"], count: int) -> Numbers:  # [RESAMPLES, count]
    """How often each of `count` seeds or worlds is drawn. Every call gives the same draws."""
    dice = np.random.default_rng((BOOTSTRAP_SEED, what == "worlds", count))
    return dice.multinomial(count, np.full(count, 1.0 / count), size=RESAMPLES).astype(np.float64)
