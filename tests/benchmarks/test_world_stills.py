"""benchmarks/world_stills.py: true frames above those of the rows, each in its place."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import world_stills

from merope.bench.stills import earlier_stills, read_stills, true_stills
from merope.world.commanded import MANOEUVRES
from tests.bench.grey_stills import HEIGHT, WIDTH, write_grey_stills

GREYS = 40 + 8 * torch.arange(2 * 3 * 4).reshape(2, 3, 4)  # worlds, manoeuvres, frames
FRAME_HEIGHT_PX = round(world_stills.FRAME_PX * HEIGHT / WIDTH)
LEFT, ORIGINAL, RIGHT = 1, 0, 2  # in the order of the manoeuvres


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["world_stills.py", *words])
    world_stills.main()


def test_every_frame_is_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """World 1 of two rows. The columns: given, two of the left turn, two as driven, two of the right turn."""
    for row, lighter in (("merope", 0), ("ucpe", 20)):
        file = write_grey_stills(tmp_path, row, GREYS + lighter)
    out = tmp_path / "sheet.png"
    words = ["--rows", "merope", "ucpe", "--worlds", "1", "--out", str(out)]
    run(monkeypatch, "--results", str(tmp_path / "results"), *words)
    with Image.open(out) as picture:
        drawn = np.asarray(picture.convert("RGB")).astype(float)
    shown = [(ORIGINAL, 0), (LEFT, 1), (LEFT, 2), (ORIGINAL, 1), (ORIGINAL, 2), (RIGHT, 1), (RIGHT, 2)]
    truth, step_px = true_stills(read_stills(file), 1), FRAME_HEIGHT_PX + world_stills.GAP_PX
    last_row_px = drawn.shape[0] - world_stills.MARGIN_PX - FRAME_HEIGHT_PX
    lefts_px = list(world_stills.column_lefts(world_stills.column_groups(read_stills(file)), 0).values())
    start_px = drawn.shape[1] - world_stills.MARGIN_PX - world_stills.FRAME_PX - lefts_px[-1]
    for (manoeuvre, still), left_px in zip(shown, lefts_px, strict=True):
        columns = slice(start_px + left_px, start_px + left_px + world_stills.FRAME_PX)
        cells = [drawn[y_px : y_px + FRAME_HEIGHT_PX, columns] for y_px in (last_row_px - step_px, last_row_px)]
        for cell, lighter in zip(cells, (0, 20), strict=True):
            assert abs(cell.mean() - float(GREYS[1, manoeuvre, still + 1] + lighter)) < 2.0
        y_px = last_row_px - 2 * step_px - world_stills.TRUTH_GAP_PX
        seen = drawn[y_px : y_px + FRAME_HEIGHT_PX, columns]
        assert abs(seen.mean() - float(truth[manoeuvre, still].float().mean())) < 2.0
        assert seen.std() > 5.0


def test_what_rows_with_history_were_shown_stands_below_the_truth(tmp_path: Path) -> None:
    files = [write_grey_stills(tmp_path, "none", GREYS)]
    history = ("branch.history=sa", "history.frames=2", "history.conflict_rate=0.0")
    files.append(write_grey_stills(tmp_path, "history-sa", GREYS, *history))
    rows = [read_stills(file) for file in files]
    lines = world_stills.lines_of_world(rows, world=1)
    assert list(lines) == [world_stills.TRUTH, world_stills.EARLIER, "none", "history-sa"]
    assert list(world_stills.lines_of_world(rows[:1], world=1)) == [world_stills.TRUTH, "none"]
    assert rows[1].earlier is not None
    seen, shown = earlier_stills(rows[1], rows[1].earlier, 1), lines[world_stills.EARLIER]
    near = [f"near {frame / rows[1].clips.frame_rate_hz:.2f} s" for frame in rows[1].earlier.matched]
    for column, cell in shown.items():
        k = column.still - 1  # two pictures of each path, below its last two frames
        assert torch.equal(cell.picture, seen[MANOEUVRES.index(column.manoeuvre), k])
        assert cell.caption == near[k]
    assert len(shown) == 2 * len(MANOEUVRES)
    picture = world_stills.sheet(rows, [1])
    assert len(picture) - len(world_stills.sheet(rows[:1], [1])) == 2 * (FRAME_HEIGHT_PX + world_stills.GAP_PX)


def test_where_lenses_are_mixed_a_sheet_names_them(tmp_path: Path) -> None:
    mixed = read_stills(write_grey_stills(tmp_path, "mixed", GREYS, "data.fov_deg=[60.0,150.0]", "data.xi=[0.0,1.5]"))
    assert [world_stills.mixed_lens(mixed.clips, world) for world in (0, 1)] == ["wide, 92°", "fisheye, 135°"]
    assert world_stills.mixed_lens(read_stills(write_grey_stills(tmp_path, "same", GREYS)).clips, 0) == ""


def test_sheets_that_would_mislead_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_grey_stills(tmp_path, "merope", GREYS)
    write_grey_stills(tmp_path, "gta", GREYS, "data.fov_deg=[60.0,60.0]")  # another lens: other true frames
    results = tmp_path / "results"
    assert [stills.row for stills in world_stills.comparable(results, 0, None)] == ["gta"]  # the first of Table 1
    with pytest.raises(ValueError, match="--rows must be rows with the clips of merope, got gta"):
        run(monkeypatch, "--results", str(results), "--rows", "merope", "gta")
    with pytest.raises(ValueError, match="--rows must be rows with stills"):
        run(monkeypatch, "--results", str(results), "--rows", "prope")
    with pytest.raises(ValueError, match="--worlds must be from 0 to 1"):
        run(monkeypatch, "--results", str(results), "--rows", "gta", "--worlds", "2")
    with pytest.raises(ValueError, match="stills of encodings"):
        run(monkeypatch, "--results", str(tmp_path / "empty"))
