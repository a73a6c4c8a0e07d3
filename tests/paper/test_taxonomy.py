"""`merope taxonomy` measures the paper's Table 1, and says so when a measurement contradicts it."""

import json

import pytest

from merope.cli import main
from merope.paper import taxonomy


@pytest.fixture(scope="module")
def rows() -> list[taxonomy.Properties]:
    return [taxonomy.measure(name) for name in taxonomy.MEASURED]


def test_all_ten_methods_agree_with_the_paper(rows: list[taxonomy.Properties]) -> None:
    of_paper = [row for row in rows if row.name in taxonomy.PAPER]
    assert [row.name for row in of_paper] == list(taxonomy.PAPER)
    assert len(of_paper) == 10
    for row in of_paper:
        assert row.measured == taxonomy.PAPER[row.name], row


def test_direction_phases_give_up_what_merope_does(rows: list[taxonomy.Properties]) -> None:
    (papers,) = (row for row in rows if row.name == "merope")
    (ours,) = (row for row in rows if row.name == "merope_phases")
    assert ours.measured == papers.measured == (True, False, True)
    assert ours.agrees_with_paper  # which does not speak of it
    assert ours.factorisation_defect > 0.1


def test_the_clamp_bounds_logits_and_costs_the_relative_pose(rows: list[taxonomy.Properties]) -> None:
    (clamped,) = (row for row in rows if row.name == "ucpe_clamped")
    assert clamped.measured == (False, True, False)
    assert clamped.world_change > 0.1  # of features, although U keeps still
    assert clamped.blind_directions == 0


def test_numbers_behind_the_answers(rows: list[taxonomy.Properties]) -> None:
    by_name = {row.name: row for row in rows}
    assert by_name["raynova"].world_change > 0.1
    assert by_name["viewrope"].blind_directions == 3
    assert by_name["merope"].scale_change > 1e-3
    assert {row.name for row in rows if row.depth_change > 0.1} == {"urope", "rayrope", "crepe"}
    assert {row.name for row in rows if row.groups > 1} == {"urope", "rayrope", "crepe", "merope", "merope_phases"}
    for row in rows:
        grows = row.name in ("cape", "gta", "prope", "ucpe", "ucpe_clamped")
        assert (row.norm_defect > 1e3) == grows  # at 10 km
        is_clamped = row.name == "ucpe_clamped"
        assert row.logit_exponent == pytest.approx(1.0 if grows and not is_clamped else 0.0, abs=0.1)
        transforms_values = row.name != "cape"  # which acts on logits only
        assert row.value_exponent == pytest.approx(1.0 if grows and transforms_values else 0.0, abs=0.1)


def test_command_prints_and_succeeds(
    rows: list[taxonomy.Properties], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(taxonomy, "measure", lambda name: next(row for row in rows if row.name == name))
    assert main(["taxonomy", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {entry["name"]: entry["A"] for entry in printed}["merope"] is True
    assert [entry["name"] for entry in printed if entry["paper"] is None] == [
        "merope_phases",
        "ucpe_clamped",
    ]
    assert main(["taxonomy"]) == 0
    *_, line = (line for line in capsys.readouterr().out.splitlines() if line.startswith("merope"))
    assert line.split()[:4] == ["merope_phases", "Yes", "No", "Yes"]
    assert line.endswith("not in the paper")


def test_ctrl_c_is_a_line_and_a_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(taxonomy, "measure", interrupted)
    assert main(["taxonomy"]) == 130
    assert capsys.readouterr().err.endswith("merope: stopped\n")


def test_command_fails_on_a_contradiction(
    rows: list[taxonomy.Properties], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(taxonomy, "measure", lambda name: next(row for row in rows if row.name == name))
    monkeypatch.setitem(taxonomy.PAPER, "gta", (True, True, True))
    assert main(["taxonomy"]) == 1
    assert "the paper says otherwise" in capsys.readouterr().out
