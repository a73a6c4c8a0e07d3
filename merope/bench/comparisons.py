"""How far rows are from the row that they are compared with: cells of a table, and the same in words.

A verdict comes from an interval and from nothing else. Cells and words read the same ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from merope.bench.intervals import difference
from merope.bench.measured_rows import Row
from merope.bench.table_cells import BETTER, COLUMNS, RETURNS, cell
from merope.evaluate.summary import Interval

Verdict = Literal["higher", "lower", "not separated"]
ITSELF = "–"


@dataclass(frozen=True)
class Comparison:
    """A row less another one by one metric. Where there is no difference, `why_not` says why."""

    row: str
    against: str
    metric: str
    stretch: float
    apart: Interval | None
    why_not: str
    seeds: int  # that both have

    @property
    def cell(self) -> str:
        """+4.26 [+2.98, +5.50]: higher than merope."""
        if self.apart is None:
            return self.why_not
        said = verdict(self.apart)
        than = "" if said == "not separated" else f" than {self.against}"
        return f"{cell(self.apart, sign='+')}: {said}{than}"


def compare(row: Row, against: Row, metric: str, stretch: float = 1.0) -> Comparison:
    """A row with another one, by the clips and seeds of a test that both have."""
    seeds = len(set(row.tested(stretch)) & set(against.tested(stretch)))
    apart, why_not = None, "another test"
    if row is against:
        why_not = ITSELF
    elif row.is_comparable(against, stretch):
        apart = difference(row.grid(metric, stretch), against.grid(metric, stretch))
        why_not = "no common seed" if apart is None else ""
    if apart is not None and math.isnan(apart.mean):
        apart, why_not = None, "no common clip"
    return Comparison(row.name, against.name, metric, stretch, apart, why_not, seeds)


def verdict(row_minus_other: Interval) -> Verdict:
    """What an interval of the difference allows to say of the row."""
    if row_minus_other.low > 0.0:
        return "higher"
    return "lower" if row_minus_other.high < 0.0 else "not separated"


def in_words(comparisons: Sequence[Comparison]) -> list[str]:
    """A paragraph with a line per test and measure: which rows are separated from the other one, and which are not."""
    measures: dict[tuple[float, str], list[Comparison]] = {}
    for one in comparisons:
        if one.why_not != ITSELF:
            measures.setdefault((one.stretch, one.metric), []).append(one)
    lines = [_line(*measure, measures[measure]) for measure in sorted(measures, key=lambda measure: measure[0])]
    if not lines:
        return []
    return [f"Against `{comparisons[0].against}`, by the intervals of the differences:", "\n".join(lines)]


def _line(stretch: float, metric: str, comparisons: Sequence[Comparison]) -> str:
    """* AUC@10 (higher is better): higher: a, b (one seed); lower: c; not separated: d; not compared: e (why not)."""
    all_of_one = {one.seeds for one in comparisons if one.apart is not None} == {1}
    found: dict[str, list[str]] = {said: [] for said in (*get_args(Verdict), "not compared")}
    for one in comparisons:
        if one.apart is None:
            found["not compared"].append(f"`{one.row}` ({one.why_not})")
        else:
            few = " (one seed)" if one.seeds == 1 and not all_of_one else ""
            found[verdict(one.apart)].append(f"`{one.row}`{few}")
    test = "" if stretch == 1.0 else f"×{stretch:g} "
    about = f"{BETTER[metric]} is better" + (", one seed" if all_of_one else "")
    parts = [f"{said}: {', '.join(names)}" for said, names in found.items() if names]
    return f"* {test}{(COLUMNS | RETURNS)[metric]} ({about}): {'; '.join(parts)}."
