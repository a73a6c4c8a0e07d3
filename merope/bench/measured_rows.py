"""A row of a benchmark as its results files have it: all seeds, all tests, and what it may be compared with."""

import math
from dataclasses import dataclass
from typing import Any

from merope.bench.intervals import Grid, grid, interval
from merope.bench.result_files import Result, parts_of
from merope.bench.table_cells import RETURNS, STRANGERS
from merope.errors import invalid

SAME_TRAINING = ("steps", "batch_size", "data")
"""What two rows must share to be compared, beside test, VAE and which weights were trained."""


@dataclass(frozen=True, eq=False)
class Row:
    """All seeds of one row."""

    name: str
    seeds: dict[int, Result]

    @property
    def any_seed(self) -> Result:
        return next(iter(self.seeds.values()))

    @property
    def is_from_scratch(self) -> bool:
        return self.any_seed.get("pretrained") is None

    @property
    def stretches(self) -> tuple[float, ...]:
        """Stretches that some seed was tested at; the first is the benchmark's own."""
        found = [part["test"]["stretch"] for result in self.seeds.values() for part in parts_of(result)]
        return (found[0], *sorted(set(found) - {found[0]}))

    def tested(self, stretch: float) -> list[int]:
        """Seeds that were tested at a stretch."""
        return [
            seed
            for seed, result in self.seeds.items()
            if any(part["test"]["stretch"] == stretch for part in parts_of(result))
        ]

    def grid(self, metric: str, stretch: float = 1.0, lens: str | None = None) -> Grid:
        """A metric of all clips of a test, or of those through one kind of lens."""
        clips = {seed: self.part(seed, stretch)["clips"] for seed in self.tested(stretch)}
        if metric in STRANGERS | RETURNS:
            unseen = dict.fromkeys(STRANGERS | RETURNS)
            clips = {seed: {name: unseen | clip for name, clip in some.items()} for seed, some in clips.items()}
        return grid(clips, metric, lens)

    def lost(self, stretch: float = 1.0) -> str:
        """Frames without a pose, of all frames of all seeds."""
        parts = [self.part(seed, stretch)["rows"]["generated"]["all"] for seed in self.tested(stretch)]
        return f"{sum(part['failed_frames'] for part in parts)}/{sum(part['frames'] for part in parts)}"

    def measured(self, stretch: float = 1.0) -> str:
        """Clips with pose errors, of all clips of all seeds: what the errors are means of."""
        clips = self.grid("cammc", stretch)
        return f"{interval(clips).count}/{clips.values.size}"

    @property
    def is_seen_by_strangers(self) -> bool:
        """Whether COLMAP was asked about clips of every seed."""
        return all(self.worlds_of_strangers(seed) for seed in self.seeds)

    def worlds_of_strangers(self, seed: int) -> int:
        """Worlds whose clips COLMAP was asked about."""
        return len({clip["world"] for clip in self.seeds[seed]["clips"].values() if "colmap_percent" in clip})

    @property
    def takes_history(self) -> bool:
        """Whether its model is shown what an earlier drive saw."""
        branch = self.any_seed.get("branch", "none")
        return branch != "none" and branch.get("history") is not None

    @property
    def held_out_loss(self) -> float:
        """Mean of the seeds' last validation losses."""
        losses = [result["validation_loss"] for result in self.seeds.values()]
        return math.nan if None in losses else sum(losses) / len(losses)

    def is_comparable(self, other: "Row", stretch: float = 1.0) -> bool:
        """Whether both were trained alike and tested on the same clips."""
        tests = [row.part(seed, stretch)["test"] for row in (self, other) for seed in row.tested(stretch)[:1]]
        if len(tests) < 2 or tests[0] != tests[1] or self.is_from_scratch != other.is_from_scratch:
            return False
        return _alike(self.any_seed) == _alike(other.any_seed)

    def part(self, seed: int, stretch: float) -> Result:
        """One test of one seed."""
        return next(part for part in parts_of(self.seeds[seed]) if part["test"]["stretch"] == stretch)


def _alike(result: Result) -> dict[str, Any]:
    """What the results of rows must share to be compared.

    Files of before do not say their VAE, nor which weights were trained: all of them.
    """
    said = {"vae": result.get("vae", ""), "trainable": result.get("trainable", "all")}
    return {key: result[key] for key in SAME_TRAINING} | said


def check_alike(row: Row) -> None:
    """Seeds of a row are of one training and one test at every stretch."""
    every = [_alike(result) for result in row.seeds.values()]
    said = {key: [alike[key] for alike in every] for key in every[0]}
    for stretch in row.stretches:
        said[f"test ×{stretch:g}"] = [row.part(seed, stretch)["test"] for seed in row.tested(stretch)]
    for key, values in said.items():
        if any(value != values[0] for value in values):
            fix = "make the seeds of a row alike, or move some of their files away"
            raise invalid(f"{key} of {row.name}", "the same for all seeds", "different ones", fix)
