"""The tables of the world benchmark, from the results files of its rows: what is measured, and what is open."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from merope.bench.comparisons import Comparison, compare, in_words
from merope.bench.cost_table import cost_table
from merope.bench.groups import WORLD, Groups
from merope.bench.intervals import interval
from merope.bench.measured_rows import Row, check_alike
from merope.bench.table_cells import (
    COLUMNS,
    COMPARED,
    EVERY_CLIP,
    RETURNS,
    STRANGERS,
    SWEPT,
    bold,
    cell,
    floor_mean,
    markdown_table,
)
from merope.errors import invalid
from merope.formats.writing import replace_text

BEGIN, END = "<!-- world table: begin -->", "<!-- world table: end -->"


def read_rows(folder: Path) -> dict[str, Row]:
    """All rows of a results folder (`merope bench world --results`)."""
    rows: dict[str, Row] = {}
    for file in sorted(folder.glob("*-seed*.json")):
        row = _read_seed(file)
        rows.setdefault(row.name, Row(row.name, {})).seeds.update(row.seeds)
    if not rows:
        raise invalid(str(folder), "a folder with results of rows", "none", "run merope bench world … --results DIR")
    for row in rows.values():
        check_alike(row)
    return rows


def _read_seed(file: Path) -> Row:
    """One seed of a row. Its own tables are made once, so that an error names the file that lacks something."""
    try:
        result = json.loads(file.read_text())
        row = Row(result["row"], {result["seed"]: result})
        check_alike(row)
        tables({row.name: row})
    except (AttributeError, LookupError, RecursionError, StopIteration, TypeError, ValueError) as error:
        fix = "the file is damaged: move it away, or measure the row again"
        raise invalid(str(file), "results of merope bench world", f"{type(error).__name__}: {error}", fix) from None
    return row


def tables(rows: Mapping[str, Row], against: str = "merope", groups: Groups = WORLD) -> str:
    """All tables in Markdown, each group with the rows that are still open, then the sweep and what rows cost.

    All rows are compared with one row. A group that has its own (long-merope for merope, or history-none) is compared
    with that.
    """
    others = tuple(name for name in rows if not any(name in names for names in groups.values()))
    parts = [_about(rows)]
    for title, names in (groups | ({"Other rows": others} if others else {})).items():
        measured = [rows[name] for name in names if name in rows]
        missing = [name for name in names if name not in rows]
        parts.append(f"### {title}")
        own = [row for row in measured if row.name.endswith((f"-{against}", "-none"))]
        if measured:
            parts.append(group_table(measured, own[0] if own else rows.get(against)))
        if missing:
            parts.append("Open: " + ", ".join(missing) + ".")
    sweep = ["### Beyond the training scale", _sweep_table(rows, against)]
    cost = ["### What the rows cost", cost_table(rows)]
    return "\n\n".join([*parts, *_lens_table(rows), *sweep, *cost]) + "\n"


def _about(rows: Mapping[str, Row]) -> str:
    first = next(iter(rows.values()))
    row, strangers = first.any_seed, first.worlds_of_strangers(next(iter(first.seeds)))
    test, floor = row["test"], row["rows"]["floor"]["all"]
    clips = len(row["clips"])
    rot, metric_tr, cammc = (floor_mean(floor, name) for name in ("rot_deg", "metric_tr_percent", "cammc"))
    return (
        f"{clips} clips of {test['worlds']} unseen worlds (each as driven and with a turn of {test['turn_deg']:g}° to "
        f"the left and to the right), {test['steps']} denoising steps. Means over clips and seeds with 95 % intervals "
        "that resample worlds and seeds; a row with one seed has an interval over worlds alone. Pose floor, the "
        f"estimator on noisy true renders that stray from the command: rot {rot}°, metric tr {metric_tr} %, "
        f"CamMC {cammc}, {floor['failed_frames']} of {floor['frames']} frames lost."
        + (
            f" COLMAP is given the clips of {strangers} worlds; of true frames it registers "
            f"{floor['colmap_percent']:.1f} %."
            if "colmap_percent" in floor
            else ""
        )
    )


def group_table(rows: Sequence[Row], against: Row | None) -> str:
    """Rows with their numbers and, if there is one to compare with, how far they are from it, also in words."""
    returns = RETURNS if any(row.takes_history for row in rows) else {}
    columns = COLUMNS | returns | (STRANGERS if all(row.is_seen_by_strangers for row in rows) else {})
    metrics = (*COMPARED, *returns)
    title = [] if against is None else [f"{columns[metric]} − {against.name}" for metric in metrics]
    every: list[Comparison] = []
    lines = [["row", "seeds", "steps", "held-out loss", *columns.values(), "measured clips", "lost frames", *title]]
    for row in rows:
        numbers = [cell(interval(row.grid(metric))) for metric in columns]
        seeds = "one" if len(row.seeds) == 1 else str(len(row.seeds))
        loss = "–" if math.isnan(row.held_out_loss) else f"{row.held_out_loss:.4f}"
        about = [bold(row.name, row is against), seeds, f"{row.any_seed['steps']:,}", loss]
        compared = [] if against is None else [compare(row, against, metric) for metric in metrics]
        lines.append([*about, *numbers, row.measured(), row.lost(), *(one.cell for one in compared)])
        every += compared
    return "\n\n".join([markdown_table(lines), *in_words(every)])


def _lens_table(rows: Mapping[str, Row]) -> list[str]:
    """Rows whose lenses differ from clip to clip, by kind of lens."""
    lines = [["row", "lens", "worlds", *COLUMNS.values()]]
    for row in rows.values():
        kinds = {clip["world"]: clip["lens"] for clip in row.any_seed["clips"].values()}
        for kind in sorted(set(kinds.values())) if len(set(kinds.values())) > 1 else ():
            numbers = [cell(interval(row.grid(metric, lens=kind))) for metric in COLUMNS]
            lines.append([row.name, kind, str(list(kinds.values()).count(kind)), *numbers])
    return [] if len(lines) == 1 else ["### By lens", markdown_table(lines)]


def _sweep_table(rows: Mapping[str, Row], against: str) -> str:
    """Rows that were also tested on longer paths than they were trained on."""
    swept = [row for row in rows.values() if len(row.stretches) > 1]
    if not swept:
        return "Open: no row has been tested on stretched paths."
    other = rows.get(against)
    title = [] if other is None else [f"{COLUMNS[metric]} − {against}" for metric in EVERY_CLIP]
    numbered = [COLUMNS[metric] for metric in SWEPT]
    counted = ["measured clips", "lost frames", "floor: metric tr %"]
    lines = [["row", "stretch", "seeds", "worlds", *numbered, *counted, *title]]
    every: list[Comparison] = []
    for row in swept:
        for stretch in row.stretches:
            numbers = [cell(interval(row.grid(metric, stretch))) for metric in SWEPT]
            seeds = row.tested(stretch)
            part = row.part(seeds[0], stretch)
            floor = floor_mean(part["rows"]["floor"]["all"], "metric_tr_percent")
            about = [bold(row.name, row is other), f"×{stretch:g}", str(len(seeds)), str(part["test"]["worlds"])]
            compared = [] if other is None else [compare(row, other, metric, stretch) for metric in EVERY_CLIP]
            counts = [row.measured(stretch), row.lost(stretch), floor]
            lines.append([*about, *numbers, *counts, *(one.cell for one in compared)])
            every += compared if stretch != 1.0 else []  # that of the benchmark itself is above
    return "\n\n".join([markdown_table(lines), *in_words(every)])


def write_tables(text: str, file: Path) -> None:
    """Between the markers of a page, or into a new file with them. A page without markers is left alone."""
    page = file.read_text() if file.exists() else f"{BEGIN}\n{END}\n"
    if BEGIN not in page:
        fix = f"add the lines {BEGIN} and {END} where the tables belong, or name a new file"
        raise invalid(str(file), "a new file, or a page with two markers", "a page without them", fix)
    head, rest = page.split(BEGIN, 1)
    if END not in rest:
        raise invalid(str(file), f"a page with {END!r} after {BEGIN!r}", "only the first", "add the second marker")
    replace_text(file, f"{head}{BEGIN}\n\n{text}\n{END}{rest.split(END, 1)[1]}")
