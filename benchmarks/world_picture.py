"""Draws the results of the world benchmark: every row with its interval, and what happens beyond the training scale.

python benchmarks/world_picture.py [--results benchmarks/results/world] [--out docs/images]
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from merope.bench.world_intervals import interval
from merope.bench.world_table import COLUMNS, GROUPS, Row, read_rows
from merope.evaluate.summary import Interval

MARKED = "merope"
PERCENT_TICKS = (0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500)


def reach(values: list[Interval]) -> list[list[float]]:  # [2, rows], as matplotlib wants error bars
    """How far intervals reach below and above their means; nothing where there is none."""
    pairs = [(v.mean - v.low, v.high - v.mean) for v in values]
    return [[max(0.0, side) if side == side else 0.0 for side in sides] for sides in zip(*pairs, strict=True)]


def draw_rows(rows: Mapping[str, Row], metric: str, out: Path) -> None:
    """A dot and a bar per row, in the order of the tables, MeRoPE marked."""
    names = [name for group in GROUPS.values() for name in group if name in rows]
    values = [interval(rows[name].grid(metric)) for name in names]
    places = list(range(len(names)))[::-1]
    figure, panel = plt.subplots(figsize=(7, 0.8 + 0.32 * len(names)), constrained_layout=True)
    for name, place, value, *bars in zip(names, places, values, *reach(values), strict=True):
        colour = "tab:blue" if name == MARKED else "0.35"
        panel.errorbar(value.mean, place, xerr=[[b] for b in bars], fmt="o", color=colour, capsize=3, ms=5)
        if name == MARKED:
            panel.axvspan(value.low, value.high, color="tab:blue", alpha=0.12, lw=0)
    labels = [f"{name} (one seed)" if len(rows[name].seeds) == 1 else name for name in names]
    panel.set_yticks(places, labels)
    for label, name in zip(panel.get_yticklabels(), names, strict=True):
        label.set(color="tab:blue" if name == MARKED else "black", weight="bold" if name == MARKED else "normal")
    panel.set(xlabel=f"{COLUMNS[metric]}, lower is better (95 % intervals)", xlim=(0, None))
    panel.grid(axis="x", lw=0.4)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def draw_sweep(rows: Mapping[str, Row], out: Path) -> None:
    """Metric translation error against the stretch of the commanded path, a line per encoding."""
    swept = [row for row in rows.values() if len(row.stretches) > 1]
    figure, panel = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    for index, row in enumerate(sorted(swept, key=lambda row: row.name == MARKED)):
        values = [interval(row.grid("metric_tr_percent", stretch)) for stretch in row.stretches]
        looks = {"color": "tab:blue", "lw": 2.5, "zorder": 3} if row.name == MARKED else {"lw": 1.2}
        if row.name != MARKED:
            looks["color"] = plt.get_cmap("tab10")(1 + index % 9)
        at = [stretch * 1.012 ** (index - len(swept) / 2) for stretch in row.stretches]  # bars side by side
        means = [value.mean for value in values]
        panel.errorbar(at, means, yerr=reach(values), marker="o", ms=4, capsize=2, label=row.name, **looks)
    stretches = sorted({stretch for row in swept for stretch in row.stretches})
    panel.set(xscale="log", yscale="log", xlabel="commanded metres, × those of training", ylabel="metric tr %")
    panel.set_xticks(stretches, [f"×{stretch:g}" for stretch in stretches])
    low, high = panel.get_ylim()
    panel.set_yticks([tick for tick in PERCENT_TICKS if low <= tick <= high])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()
    panel.legend(fontsize=8, ncols=2)
    panel.grid(lw=0.4)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main() -> None:
    """Read the results and draw."""
    parser = argparse.ArgumentParser(description="draw the results of the world benchmark")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/world"))
    parser.add_argument("--metric", choices=tuple(COLUMNS)[:4], default="cammc", help="of the picture of rows")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    rows = read_rows(options.results)
    draw_rows(rows, options.metric, options.out / "world-rows.png")
    drawn = ["world-rows.png"]
    if any(len(row.stretches) > 1 for row in rows.values()):
        draw_sweep(rows, options.out / "world-sweep.png")
        drawn.append("world-sweep.png")
    print("wrote", ", ".join(str(options.out / name) for name in drawn))


if __name__ == "__main__":
    main()
