"""What rows cost: means over the seeds that say it, and a dash where none does."""

from pathlib import Path
from typing import Any

from merope.bench.cost_table import cost_table
from merope.bench.table import read_rows, tables
from tests.bench.made_up_results import write_result

ABOUT = {"parameters": 14_763_456, "rows_at_once": 3, "gpu": "H200", "generated_on": "H200", "torch": "2.11"}


def write_cost(folder: Path, row: str, seed: int, tests_s: list[float | None], **changes: Any) -> None:
    """A row with so many seconds of generation in each of its tests, None where a test does not say."""
    stretches = (1.0, 2.0, 4.0)[: len(tests_s)]
    sweep = write_result(folder, row, seed, 2.0, stretches)["sweep"]
    said = [{} if seconds is None else {"generated_s": seconds} for seconds in tests_s]
    sweep = [part | more | {"generated_on": "H200"} for part, more in zip(sweep, said[1:], strict=True)]
    write_result(folder, row, seed, 2.0, sweep=sweep, **ABOUT | said[0] | changes)


def costs(folder: Path) -> dict[str, dict[str, str]]:
    """The cells of every row by their column."""
    head, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in cost_table(read_rows(folder)).splitlines()
        if line.startswith("|")
    ]
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def test_numbers_are_means_over_seeds_of_sums_over_tests(tmp_path: Path) -> None:
    write_cost(tmp_path, "merope", 0, [10.0, 20.0, 40.0], trained_s=100.0)
    write_cost(tmp_path, "merope", 1, [30.0], trained_s=1900.0, rows_at_once=2, gpu="L4")
    write_cost(tmp_path, "gta", 5, [7.0, 8.0], trained_s=50.2, parameters=1_500_000)
    found = costs(tmp_path)
    assert found["merope"] == {
        "row": "merope",
        "seeds": "2",
        "parameters": "14.76 M",
        "trained s": "1,000",
        "rows at once": "3, 2",
        "clips generated": "48",  # 72 and 24
        "generated s": "50",  # 70 and 30
        "trained on": "H200, L4",
        "generated on": "H200",
        "torch": "2.11",
    }
    gta = [found["gta"][column] for column in ("seeds", "parameters", "trained s", "rows at once", "generated s")]
    assert gta == ["1", "1.50 M", "50", "3", "15"]


def test_what_a_file_does_not_say_is_left_out_and_not_zero(tmp_path: Path) -> None:
    write_cost(tmp_path, "merope", 0, [10.0, None], trained_s=100.0)  # a test without seconds: no sum of its seed
    write_cost(tmp_path, "merope", 1, [30.0, 40.0], trained_s=None, rows_at_once=None, gpu="")
    write_cost(tmp_path, "merope", 2, [50.0, 60.0], trained_s=300.0)
    write_result(tmp_path, "gta", 0, 2.0)  # says nothing of all this
    found = costs(tmp_path)
    assert found["merope"]["trained s"] == "200 (2 of 3 seeds)"
    assert found["merope"]["generated s"] == "90 (2 of 3 seeds)"
    assert (found["merope"]["rows at once"], found["merope"]["trained on"]) == ("3", "H200")
    unknown = {"parameters", "trained s", "rows at once", "generated s", "trained on", "generated on", "torch"}
    assert {column for column, text in found["gta"].items() if text == "–"} == unknown
    assert found["gta"]["clips generated"] == "24"


def test_no_seconds_are_seconds(tmp_path: Path) -> None:
    write_cost(tmp_path, "merope", 0, [0.0], trained_s=0.0)
    assert (costs(tmp_path)["merope"]["trained s"], costs(tmp_path)["merope"]["generated s"]) == ("0", "0")


def test_the_table_is_the_last_of_all(tmp_path: Path) -> None:
    write_cost(tmp_path, "merope", 0, [10.0], trained_s=100.0)
    rows = read_rows(tmp_path)
    assert tables(rows).endswith(f"### What the rows cost\n\n{cost_table(rows)}\n")
