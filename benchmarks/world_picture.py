"""Draws the results of a benchmark: every row with its interval, and what happens beyond the training scale.

python benchmarks/world_picture.py [--benchmark miniature] [--results benchmarks/results/miniature] [--out docs/images]
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from merope.bench.groups import BENCHMARKS, Groups
from merope.bench.intervals import interval
from merope.bench.measured_rows import Row
from merope.bench.table import read_rows
from merope.bench.table_cells import BETTER, COLUMNS, COMPARED, EVERY_CLIP
from merope.evaluate.summary import Interval

MARKED = "merope"
SWEPT = {
    MARKED: {"color": "tab:blue", "lw": 2.5, "zorder": 3},
    "none": {"color": "0.6", "lw": 1.2, "ls": "--"},
}


def reach(values: list[Interval]) -> list[list[float]]:  # [2, rows], as matplotlib wants error bars
    """How far intervals reach below and above their means; nothing where there is none."""
    pairs = [(v.mean - v.low, v.high - v.mean) for v in values]
    return [[max(0.0, side) if side == side else 0.0 for side in sides] for sides in zip(*pairs, strict=True)]


def draw_rows(rows: Mapping[str, Row], groups: Groups, out: Path) -> None:
    """A dot and a bar per row and metric, in the order of the tables, MeRoPE marked."""
    names = [name for group in groups.values() for name in group if name in rows]
    places = list(range(len(names)))[::-1]
    size = (10, 1.0 + 0.32 * len(names))
    figure, panels = plt.subplots(1, len(COMPARED), figsize=size, sharey=True, constrained_layout=True)
    for panel, metric in zip(panels, COMPARED, strict=True):
        values = [interval(rows[name].grid(metric)) for name in names]
        for name, place, value, *bars in zip(names, places, values, *reach(values), strict=True):
            colour = "tab:blue" if name == MARKED else "0.35"
            panel.errorbar(value.mean, place, xerr=[[b] for b in bars], fmt="o", color=colour, capsize=3, ms=5)
            if name == MARKED:
                panel.axvspan(value.low, value.high, color="tab:blue", alpha=0.12, lw=0)
        panel.set(xlabel=f"{COLUMNS[metric]}, {BETTER[metric]} is better")
        panel.grid(axis="x", lw=0.4)
    labels = [f"{name} (one seed)" if len(rows[name].seeds) == 1 else name for name in names]
    panels[0].set_yticks(places, labels)
    panels[0].set_ylim(-0.6, len(names) - 0.4)
    for label, name in zip(panels[0].get_yticklabels(), names, strict=True):
        label.set(color="tab:blue" if name == MARKED else "black", weight="bold" if name == MARKED else "normal")
    figure.savefig(out, dpi=130)
    plt.close(figure)


def draw_sweep(rows: Mapping[str, Row], out: Path) -> None:
    """What every clip has, however badly it was followed, against the stretch of the commanded path."""
    swept = sorted((row for row in rows.values() if len(row.stretches) > 1), key=lambda row: row.name == MARKED)
    figure, panels = plt.subplots(1, len(EVERY_CLIP), figsize=(10, 3.8), constrained_layout=True)
    for panel, metric in zip(panels, EVERY_CLIP, strict=True):
        for index, row in enumerate(swept):
            values = [interval(row.grid(metric, stretch)) for stretch in row.stretches]
            looks = SWEPT.get(row.name, {"color": plt.get_cmap("Dark2")(index % 8), "lw": 1.2})
            at = [stretch * 1.012 ** (index - len(swept) / 2) for stretch in row.stretches]  # bars side by side
            means = [value.mean for value in values]
            panel.errorbar(at, means, yerr=reach(values), marker="o", ms=4, capsize=2, label=row.name, **looks)
        stretches = sorted({stretch for row in swept for stretch in row.stretches})
        panel.set(xscale="log", xlabel="commanded metres, × those of training", ylabel=COLUMNS[metric])
        panel.set_xticks(stretches, [f"×{stretch:g}" for stretch in stretches])
        panel.minorticks_off()
        panel.grid(lw=0.4)
    panels[0].legend(fontsize=8)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main() -> None:
    """Read the results and draw."""
    parser = argparse.ArgumentParser(description="draw the results of a benchmark")
    parser.add_argument("--benchmark", choices=BENCHMARKS, default="world", help="whose rows are drawn (world)")
    parser.add_argument("--results", type=Path, help="(benchmarks/results/BENCHMARK)")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    rows = read_rows(options.results or Path("benchmarks/results") / options.benchmark)
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = [options.out / f"{options.benchmark}-rows.png"]
    draw_rows(rows, BENCHMARKS[options.benchmark], drawn[0])
    if any(len(row.stretches) > 1 for row in rows.values()):
        drawn.append(options.out / f"{options.benchmark}-sweep.png")
        draw_sweep(rows, drawn[-1])
    print("wrote", ", ".join(map(str, drawn)))


if __name__ == "__main__":
    main()
