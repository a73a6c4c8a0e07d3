"""benchmarks/world_attention.py on a small latent model: a row for every length, and a picture."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import world_attention
from latent_folder import CLIPS, write_latent_model

from merope.formats.video import read_image

ROOT = Path(__file__).parents[2]


def test_attention_of_a_model_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_latent_model(tmp_path / "model")
    files = ["--out", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "picture.png")]
    words = ["--models", f"merope={tmp_path / 'model'}", "--worlds", "1", "--steps", "1", *files]
    run(monkeypatch, *words)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["length_m"] for row in rows] == list(world_attention.LENGTHS_M)
    for row in rows:
        assert len(row["mass"]) == 1 + (CLIPS.frames - 1) // 4
        assert sum(row["mass"]) == pytest.approx(1.0, abs=1e-4)
        assert row["farthest"] == pytest.approx(sum(row["mass"][:3]))
    assert rows[0]["mass"] != rows[-1]["mass"]  # the metres are in the keys
    check_drawn(tmp_path / "picture.png", tmp_path / "picture-amplitude.png")
    check_rows_are_drawn(tmp_path, rows, monkeypatch)


def test_the_page_has_the_numbers_of_the_files() -> None:
    results = ROOT / "benchmarks" / "results" / "miniature"
    models = world_attention.of_rows(results, ["ucpe", "merope", "direction-phases", "raynova"])
    assert world_attention.numbers(models) in (ROOT / "docs" / "miniature-benchmark.md").read_text()


def check_rows_are_drawn(folder: Path, drives: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows of a benchmark left; one has two seeds."""
    kept = folder / "results" / "attention"
    kept.mkdir(parents=True)
    for row, seed in (("merope", 0), ("merope", 1), ("ucpe", 0)):
        (kept / f"{row}-seed{seed}.json").write_text(json.dumps({"row": row, "seed": seed, "drives": drives}))
    results, picture = ["--results", str(folder / "results")], folder / "rows-attention.png"
    assert list(world_attention.of_rows(folder / "results", None)) == ["ucpe", "merope"]  # as in the tables
    run(monkeypatch, *results, "--picture", str(picture))
    check_drawn(picture, folder / "rows-amplitude.png")
    with pytest.raises(ValueError, match="--rows must be some of merope, ucpe"):
        run(monkeypatch, *results, "--rows", "gta")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["world_attention.py", *words])
    world_attention.main()


def check_drawn(*pictures: Path) -> None:
    for picture in pictures:
        assert read_image(picture, 32, 120).float().std() > 1.0  # not an empty sheet
