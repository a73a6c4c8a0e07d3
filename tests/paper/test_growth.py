"""The growth tables show what they say: growth for GTA, none for others, and pictures on disk."""

import json
from pathlib import Path

import pytest

from merope.cli import main
from merope.paper.growth import METHODS


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("growth")
    main(["growth", "--out", str(folder)])
    return folder


def test_a_file_in_place_of_the_folder_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Path] = []
    monkeypatch.setattr("merope.paper.growth.run", measured.append)
    (tmp_path / "path.json").touch()
    assert main(["growth", "--out", str(tmp_path / "path.json")]) == 2
    assert "--out must be in a folder" in capsys.readouterr().err
    assert measured == []


def test_growth(growth: Path) -> None:
    rows = json.loads((growth / "growth.json").read_text())["growth"]
    by_method = {m: [row for row in rows if row["method"] == m] for m in METHODS}
    assert [row["baseline_m"] for row in by_method["gta"]] == [0.1, 1, 10, 100, 1000, 10000]
    assert by_method["gta"][-1]["logit"] > 3000 * by_method["gta"][0]["logit"]
    assert by_method["gta"][-1]["value_norm"] > 3000
    for orthogonal in ("merope", "merope_phases"):
        assert all(abs(row["value_norm"] - 1) < 1e-12 and row["largest_logit"] <= 1 for row in by_method[orthogonal])
        assert all(0.9 < row["logit"] < 1.1 for row in by_method[orthogonal])
    clamped = by_method["ucpe_clamped"]  # a clamp of what is attended to leaves the output to grow
    assert all(row["largest_logit"] <= 1 for row in clamped)
    assert [row["value_norm"] for row in clamped] == pytest.approx(
        [row["value_norm"] for row in by_method["gta"]], rel=1e-2
    )
    assert by_method["gta"][-1]["largest_logit"] > 1  # neither orthogonal nor clamped operators can
    assert [by_method["gta"][k]["logit"] for k in (0, 3, 5)] == pytest.approx([1.00, 34.8, 3473], rel=5e-3)


def test_attention_mass(growth: Path) -> None:
    mass = json.loads((growth / "growth.json").read_text())["attention_mass"]
    far = {
        method: {float(length): sum(shares[:3]) for length, shares in curves.items()} for method, curves in mass.items()
    }
    assert all(sum(shares) == pytest.approx(1) for curves in mass.values() for shares in curves.values())
    assert far["gta"][200] > 3 * far["gta"][1]
    assert max(*far["merope"].values(), *far["merope_phases"].values()) < 0.25
    published = {  # docs/reproduce.md: at 1, 50 and 200 m
        "gta": [0.23, 0.78, 0.79],
        "ucpe_clamped": [0.22, 0.29, 0.26],
        "merope": [0.18, 0.16, 0.19],
        "merope_phases": [0.18, 0.16, 0.19],
    }
    for method, shares in published.items():
        assert [far[method][length_m] for length_m in (1, 50, 200)] == pytest.approx(shares, abs=0.006)


def test_pictures(growth: Path) -> None:
    for name in ("growth.png", "attention-mass.png"):
        assert (growth / name).read_bytes().startswith(b"\x89PNG")
        assert (growth / name).stat().st_size > 10_000
