"""Rows of a benchmark on one sheet: what the camera would see, and what each of them generated (Figures 5, 6, 8 to 10).

    python benchmarks/world_stills.py [--results benchmarks/results/miniature] [--rows ucpe merope] [--worlds 0]

Reads the stills that rows left in their results folder. What the camera would see is rendered here, and so is what an
earlier drive saw, where a row was shown that. All three paths of a world begin with the same frames, so that they
differ by the command alone. Where lenses are mixed, the sheet says that of each world.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from merope.bench.groups import BENCHMARKS
from merope.bench.lens_kinds import field_of_view_deg, lens_kind
from merope.bench.stills import Stills, earlier_stills, read_stills, true_stills
from merope.errors import invalid
from merope.formats.video import write_image
from merope.world.clips import WorldClips
from merope.world.commanded import FIRST_TEST_SEED, MANOEUVRES

FRAME_PX, GAP_PX, TRUTH_GAP_PX, GROUP_GAP_PX, MARGIN_PX = 192, 4, 8, 20, 20
TITLE_PX, TIMES_PX, FONT_PX, CAPTION_PX = 30, 24, 16, 12
LABEL_LETTERS = 15
PAPER, INK, GREY = "#ffffff", "#222222", "#777777"
TRUTH, EARLIER = "what the camera would see", "seen on an earlier drive"


@dataclass(frozen=True)
class Column:
    """A frame of a path."""

    manoeuvre: str
    still: int  # which of the frames that are kept

    @property
    def pick(self) -> tuple[int, int]:
        return MANOEUVRES.index(self.manoeuvre), self.still


@dataclass(frozen=True, eq=False)
class Cell:
    """What a line of the sheet shows in a column."""

    picture: Tensor  # uint8 [H, W, 3]
    caption: str = ""


def column_groups(stills: Stills) -> dict[str, list[Column]]:
    """By title: the frame that all paths begin with, then the last two of every path."""
    later, turn = range(1, len(stills.frames))[-2:], f"{stills.test.turn_deg:g}° further"
    titles = {"left": f"{turn} left", "original": "as driven", "right": f"{turn} right"}
    paths = {title: [Column(name, still) for still in later] for name, title in titles.items()}
    return {"given": [Column("original", 0)]} | paths


def comparable(results: Path, seed: int, wanted: Sequence[str] | None) -> list[Stills]:
    """The stills of some rows, which must be of the same clips; by default the encodings that are."""
    encodings = dict.fromkeys(row for groups in BENCHMARKS.values() for row in groups["Encodings"])
    files = {row: results / "stills" / f"{row}-seed{seed}.webp" for row in wanted or encodings}
    for row, file in files.items():
        if wanted and not file.exists():
            raise invalid("--rows", f"rows with stills in {file.parent}", row, "make it again with --results")
    found = [read_stills(file) for file in files.values() if file.exists()]
    if not found:
        raise invalid(str(results / "stills"), "stills of encodings", "none", "name others with --rows")
    alike = [stills for stills in found if _same_truth(stills, found[0])]
    if wanted and len(alike) < len(found):
        other = next(stills.row for stills in found if not _same_truth(stills, found[0]))
        raise invalid("--rows", f"rows with the clips of {found[0].row}", other, "draw it on a sheet of its own")
    return alike


def _same_truth(one: Stills, other: Stills) -> bool:
    seen = [(s.clips, s.frames, s.test.turn_deg, s.test.stretch) for s in (one, other)]
    return seen[0] == seen[1]


def sheet(rows: Sequence[Stills], worlds: Sequence[int]) -> Tensor:  # uint8 [H', W', 3]
    """World below world, each with a line of true frames and a line per row."""
    few = min(len(stills.pictures) for stills in rows)
    for world in worlds:
        if not 0 <= world < few:
            raise invalid("--worlds", f"from 0 to {few - 1}, of which all rows have stills", world, "choose others")
    return torch.cat([_world_part(rows, world) for world in worlds])


def _world_part(rows: Sequence[Stills], world: int) -> Tensor:  # uint8 [H', W', 3]
    """The lines of one world below its titles."""
    lines, groups, clips = lines_of_world(rows, world), column_groups(rows[0]), rows[0].clips
    frame_height_px = round(FRAME_PX * clips.height / clips.width)
    font = ImageFont.load_default(FONT_PX)
    labels = {name: "\n".join(wrap(name, LABEL_LETTERS)) for name in lines}
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    label_px = round(max(draw.multiline_textbbox((0, 0), label, font)[2] for label in labels.values())) + MARGIN_PX
    lefts_px = column_lefts(groups, MARGIN_PX + label_px)
    tops_px = line_tops(lines, MARGIN_PX + TITLE_PX + TIMES_PX, frame_height_px)
    size_px = max(lefts_px.values()) + FRAME_PX + MARGIN_PX, max(tops_px.values()) + frame_height_px + MARGIN_PX
    part = Image.new("RGB", size_px, PAPER)
    draw = ImageDraw.Draw(part)
    draw.text((MARGIN_PX, MARGIN_PX + TITLE_PX / 2), f"world {world}", INK, font, "lm")
    draw.text((MARGIN_PX, MARGIN_PX + TITLE_PX + TIMES_PX / 2), mixed_lens(clips, world), GREY, font, "lm")
    _draw_titles(draw, groups, lefts_px, rows[0], font)
    for name, cells in lines.items():
        middle = (MARGIN_PX, tops_px[name] + frame_height_px / 2)
        draw.multiline_text(middle, labels[name], INK, font, "lm", spacing=4)
        for column, cell in cells.items():
            frame = Image.fromarray(cell.picture.numpy()).resize((FRAME_PX, frame_height_px), Image.Resampling.LANCZOS)
            _write_on(frame, cell.caption)
            part.paste(frame, (lefts_px[column], tops_px[name]))
    return torch.from_numpy(np.asarray(part).copy())


def lines_of_world(rows: Sequence[Stills], world: int) -> dict[str, dict[Column, Cell]]:
    """By label: the truth, what an earlier drive saw if a row was shown that, and the rows."""
    columns = [column for group in column_groups(rows[0]).values() for column in group]
    true = true_stills(rows[0], world)
    lines = {TRUTH: {column: Cell(true[column.pick]) for column in columns}}
    told = next((stills for stills in rows if stills.earlier is not None), None)
    if told is not None:
        lines[EARLIER] = _earlier_line(told, world)
    made = {stills.row: stills.pictures[world] for stills in rows}
    return lines | {row: {column: Cell(made[row][column.pick]) for column in columns} for row in made}


def _earlier_line(stills: Stills, world: int) -> dict[Column, Cell]:
    """The pictures that a row was shown, in the order of the columns; the last ones where they are too many."""
    assert stills.earlier is not None
    seen, stride = earlier_stills(stills, stills.earlier, world), stills.earlier.latent_stride
    near_s = [frame * stride / stills.clips.frame_rate_hz for frame in stills.earlier.matched]
    (given, *paths), cells = column_groups(stills).values(), dict[Column, Cell]()
    for columns in ([*given, *path] if path[0].manoeuvre == given[0].manoeuvre else path for path in paths):
        for column, k in zip(reversed(columns), reversed(range(len(near_s))), strict=False):
            picture = seen[MANOEUVRES.index(column.manoeuvre), k]
            cells[column] = Cell(picture, f"near {near_s[k]:.2f} s")
    return cells


def mixed_lens(clips: WorldClips, world: int) -> str:
    """The lens of a world, where they differ."""
    if clips.fov_deg[0] == clips.fov_deg[1] and clips.xi[0] == clips.xi[1]:
        return ""
    lens = clips.lens(FIRST_TEST_SEED + world)
    return f"{lens_kind(lens)}, {field_of_view_deg(lens):.0f}°"


def line_tops(lines: Iterable[str], start_px: int, height_px: int) -> dict[str, int]:
    """Where every line begins: those of the true world stand apart from the rows."""
    tops, y_px, is_true = dict[str, int](), start_px, True
    for name in lines:
        if is_true and name not in (TRUTH, EARLIER):
            y_px, is_true = y_px + TRUTH_GAP_PX, False
        tops[name] = y_px
        y_px += height_px + GAP_PX
    return tops


def _write_on(frame: Image.Image, caption: str) -> None:
    """Write a few words into the lower left corner."""
    if not caption:
        return
    draw, font = ImageDraw.Draw(frame), ImageFont.load_default(CAPTION_PX)
    corner = (GAP_PX, frame.height - GAP_PX)
    draw.rectangle(draw.textbbox(corner, caption, font, "lb"), fill=INK)
    draw.text(corner, caption, PAPER, font, "lb")


def column_lefts(groups: Mapping[str, Sequence[Column]], start_px: int) -> dict[Column, int]:
    """Where every column begins."""
    lefts, x_px = dict[Column, int](), start_px
    for columns in groups.values():
        for column in columns:
            lefts[column] = x_px
            x_px += FRAME_PX + GAP_PX
        x_px += GROUP_GAP_PX - GAP_PX
    return lefts


def _draw_titles(
    draw: ImageDraw.ImageDraw,
    groups: Mapping[str, Sequence[Column]],
    lefts_px: Mapping[Column, int],
    stills: Stills,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """What is commanded over each group of columns, with a line below it, and the time over each column."""
    for title, columns in groups.items():
        first_px, last_px = lefts_px[columns[0]], lefts_px[columns[-1]] + FRAME_PX
        draw.text(((first_px + last_px) / 2, MARGIN_PX + TITLE_PX / 2), title, INK, font, "mm")
        draw.line((first_px, MARGIN_PX + TITLE_PX, last_px - 1, MARGIN_PX + TITLE_PX), GREY)
        for column in columns:
            middle = (lefts_px[column] + FRAME_PX / 2, MARGIN_PX + TITLE_PX + TIMES_PX / 2)
            time_s = stills.frames[column.still] / stills.clips.frame_rate_hz
            draw.text(middle, f"{time_s:.2f} s", GREY, font, "mm")


def main() -> None:
    """Read stills, render the truth, and draw."""
    parser = argparse.ArgumentParser(description="rows of a benchmark side by side")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/miniature"))
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="in this order (the encodings)")
    parser.add_argument("--worlds", nargs="+", type=int, default=[0], metavar="NUMBER", help="of the test (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the rows (0)")
    parser.add_argument("--out", type=Path, default=Path("docs/images/miniature-stills.png"))
    options = parser.parse_args()
    write_image(sheet(comparable(options.results, options.seed, options.rows), options.worlds), options.out)
    print(f"wrote {options.out}, {options.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
