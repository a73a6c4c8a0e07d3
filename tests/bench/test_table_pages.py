"""Pages with tables: what stands between their markers, and what is left alone."""

from pathlib import Path

import pytest

from merope.bench.groups import BENCHMARKS
from merope.bench.table import BEGIN, END, write_tables
from merope.cli import main

ROOT = Path(__file__).parents[2]


def test_tables_go_between_the_markers_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_tables("first\n", page)
    assert page.read_text() == f"{BEGIN}\n\nfirst\n\n{END}\n"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    for text in ("one\n", "two\n"):
        write_tables(text, page)
        assert page.read_text() == f"above\n{BEGIN}\n\n{text}\n{END}\nbelow\n"
    page.write_text(f"above\n{BEGIN}\nold\n")
    with pytest.raises(ValueError, match="add the second marker"):
        write_tables("one", page)
    assert page.read_text() == f"above\n{BEGIN}\nold\n"


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("what somebody wrote\n")
    with pytest.raises(ValueError, match=r"README\.md must be a new file, or a page with two markers"):
        write_tables("tables", page)
    assert page.read_text() == "what somebody wrote\n"


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_page_shows_what_the_results_say(
    benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of each page leaves it as it is, and prints what stands between its markers."""
    page, results = ROOT / "docs" / f"{benchmark}-benchmark.md", ROOT / "benchmarks" / "results" / benchmark
    before, made = page.read_text(), tmp_path / "page.md"
    made.write_text(before)
    command = ["bench", "table", str(results), "--benchmark", benchmark]
    assert main([*command, "--out", str(made)]) == 0
    assert made.read_text() == before
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.strip() == before.split(BEGIN)[1].split(END)[0].strip()
