"""What tables say of rows against another one: in cells and in words, both by the same intervals."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merope.bench.comparisons import compare, in_words, verdict
from merope.bench.groups import BENCHMARKS
from merope.bench.table import group_table, read_rows, tables
from merope.bench.table_cells import COMPARED
from merope.evaluate.summary import Interval
from tests.bench.made_up_results import write_result

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@given(low=st.floats(-10, 10), width=st.floats(0, 10))
def test_a_verdict_comes_from_the_interval_alone(low: float, width: float) -> None:
    said = verdict(Interval(low + width / 2, low, low + width, 9))
    assert said == ("higher" if low > 0 else "lower" if low + width < 0 else "not separated")


def test_no_interval_no_verdict() -> None:
    assert verdict(Interval(5.0, math.nan, math.nan, 1)) == "not separated"


def test_a_cell_says_what_its_row_is_to_the_other_one(tmp_path: Path) -> None:
    write_result(tmp_path, "merope", 0, 2.0)
    write_result(tmp_path, "gta", 0, 3.0)
    rows = read_rows(tmp_path)
    more = compare(rows["gta"], rows["merope"], "cammc")
    assert more.apart is not None
    assert more.apart.low > 0.0
    assert re.fullmatch(r"\+\d\.\d\d \[\+\d\.\d\d, \+\d\.\d\d\]: higher than merope", more.cell)
    assert compare(rows["merope"], rows["gta"], "cammc").cell.endswith("]: lower than gta")
    assert compare(rows["gta"], rows["gta"], "cammc").cell == "–"


def test_words_name_every_row_once_by_its_verdict(tmp_path: Path) -> None:
    for seed in (0, 1):
        for row, level in (("merope", 2.0), ("gta", 3.0), ("prope", 1.0), ("ucpe", 2.0)):
            write_result(tmp_path, row, seed, level)
    write_result(tmp_path, "raynova", 1, 1.0)
    write_result(tmp_path, "urope", 7, 3.0)
    write_result(tmp_path, "none", 0, 9.0, steps=50)
    blind = write_result(tmp_path, "rayrope", 0, 3.0)
    for clip in blind["clips"].values():
        clip["cammc"] = None
    write_result(tmp_path, "rayrope", 0, 3.0, clips=blind["clips"])
    rows = read_rows(tmp_path)
    table = group_table(list(rows.values()), rows["merope"])
    assert table.splitlines()[-4:] == [
        "",
        "* CamMC (lower is better): higher: `gta`; lower: `prope`, `raynova` (one seed); not separated: `ucpe`; "
        "not compared: `none` (another test), `rayrope` (no common clip), `urope` (no common seed).",
        *(
            f"* {measure} (higher is better): higher: `prope`, `raynova` (one seed); "
            "lower: `gta`, `rayrope` (one seed); not separated: `ucpe`; "
            "not compared: `none` (another test), `urope` (no common seed)."
            for measure in ("AUC@10", "PSNR dB")
        ),
    ]
    assert "\n\nAgainst `merope`, by the intervals of the differences:\n\n" in table


def test_one_seed_of_all_rows_is_said_once(tmp_path: Path) -> None:
    write_result(tmp_path, "merope", 0, 2.0)
    write_result(tmp_path, "gta", 0, 3.0)
    write_result(tmp_path, "urope", 7, 3.0)
    rows = read_rows(tmp_path)
    *_, line = in_words([compare(row, rows["merope"], "psnr_db") for row in rows.values()])
    assert line == "* PSNR dB (higher is better, one seed): lower: `gta`; not compared: `urope` (no common seed)."


def test_nothing_is_said_where_nothing_is_compared(tmp_path: Path) -> None:
    write_result(tmp_path, "merope", 0, 2.0)
    rows = read_rows(tmp_path)
    assert "Against" not in tables(rows)
    assert "Against" not in group_table([rows["merope"]], None)


def test_the_sweep_has_a_line_per_stretch_and_measure(tmp_path: Path) -> None:
    write_result(tmp_path, "merope", 0, 2.0, stretches=(1.0, 2.0, 4.0))
    write_result(tmp_path, "gta", 0, 2.5, stretches=(1.0, 4.0, 2.0, 8.0))
    sweep = tables(read_rows(tmp_path)).partition("### Beyond the training scale")[2].partition("###")[0]
    lines = [line for line in sweep.splitlines() if line.startswith("* ")]
    measures = ("AUC@10 (higher is better, one seed)", "PSNR dB (higher is better, one seed)")
    expected = [f"* ×{stretch} {measure}: lower: `gta`." for stretch in (2, 4) for measure in measures]
    *_, first, second = lines
    assert lines[:-2] == expected
    assert (first, second) == (
        "* ×8 AUC@10 (higher is better): not compared: `gta` (another test).",
        "* ×8 PSNR dB (higher is better): not compared: `gta` (another test).",
    )


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_words_say_what_the_cells_say(benchmark: str) -> None:
    """Of the rows in the repository: every cell of a metric, and the part of its line that names the row."""
    rows = read_rows(RESULTS / benchmark)
    for metric in COMPARED:
        compared = [compare(row, rows["merope"], metric) for row in rows.values() if row.name != "merope"]
        *_, line = in_words(compared)
        parts = line.rstrip(".").partition("): ")[2].split("; ")
        for one in compared:
            (said,) = [part.partition(": ")[0] for part in parts if f"`{one.row}`" in part]
            assert re.search(rf": {said}(?: than merope)?$", one.cell) or (said, one.apart) == ("not compared", None)
