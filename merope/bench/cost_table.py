"""What rows of a benchmark cost, from their results files: a table of parameters and seconds.

A number that a file does not have is left out. It is never taken for zero.
"""

from collections.abc import Iterable, Mapping

from merope.bench.measured_rows import Row
from merope.bench.result_files import Result, parts_of
from merope.bench.table_cells import markdown_table

UNKNOWN = "–"
CAPTION = (
    "Means over seeds. Parameters are all weights of the trained model, its VAE included where it has one. Seconds are "
    "wall time: of training with the rendering of its clips, over all pieces, and of generating the clips of all "
    "tests, the sweep included. They are what was paid, beside whatever else ran on the machine, and do not say which "
    "method is faster."
)


def cost_table(rows: Mapping[str, Row]) -> str:
    """A line per row, below a sentence that says what its numbers are."""
    head = ["row", "seeds", "parameters", "trained s", "rows at once", "clips generated", "generated s"]
    lines = [[*head, "trained on", "generated on", "torch"]]
    for row in rows.values():
        seeds = row.seeds.values()
        numbers = [
            _mean([result.get("trained_s") for result in seeds]),
            _every(result.get("rows_at_once") for result in seeds),
            _mean([sum(len(part["clips"]) for part in parts_of(result)) for result in seeds]),
            _mean([generation_s(result) for result in seeds]),
        ]
        millions = [_millions(result.get("parameters")) for result in seeds]
        generated_on = _every(part.get("generated_on") for result in seeds for part in parts_of(result))
        machine = [_every(result.get("gpu") for result in seeds), generated_on]
        torch = _every(result.get("torch") for result in seeds)
        lines.append([row.name, str(len(row.seeds)), _every(millions), *numbers, *machine, torch])
    return f"{CAPTION}\n\n{markdown_table(lines)}"


def generation_s(result: Result) -> float | None:
    """Seconds of all tests of a results file, None if some test does not say."""
    every = [part.get("generated_s") for part in parts_of(result)]
    known = [seconds for seconds in every if seconds is not None]
    return sum(known) if len(known) == len(every) else None


def _mean(numbers: list[float | None]) -> str:
    """Of the seeds that have the number, which are counted where some have not."""
    known = [number for number in numbers if number is not None]
    if not known:
        return UNKNOWN
    mean = f"{sum(known) / len(known):,.0f}"
    return mean if len(known) == len(numbers) else f"{mean} ({len(known)} of {len(numbers)} seeds)"


def _every(values: Iterable[object]) -> str:
    """What seeds say, once each, in their order; mostly all say the same."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value not in (None, ""))) or UNKNOWN


def _millions(parameters: int | None) -> str | None:
    return None if parameters is None else f"{parameters / 1e6:.2f} M"
