"""Draws the cost of a camera attention block against the plain one, from the rows that benchmarks/block.py writes.

python benchmarks/block_picture.py [--rows benchmarks/results/block-h200.json] [--out docs/images/block-cost.png]
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from block import GROWTH

LOOKS = {
    "merope, paper's way": ("MeRoPE, K/V materialised", "tab:gray", ":"),
    "ucpe fused": ("UCPE, fused", "tab:orange", "--"),
    "merope fused": ("MeRoPE, fused", "tab:blue", "-"),
}

TICKS = {"time_ratio": (1, 1.5, 2, 5, 10, 20, 30), "memory_ratio": (1, 1.5, 2, 5, 10, 20, 50)}


def shape_of(row: dict[str, object]) -> tuple[int, int, int, int]:
    """Batch, cameras, rows and columns of a row's shape."""
    batch, cameras, grid = str(row["shape"]).split(" × ")
    height, width = grid.split("×")
    return int(batch), int(cameras), int(height), int(width)


def draw(rows: list[dict[str, object]], out: Path) -> None:
    """Time and memory over the plain block's, against cameras of 9×16 tokens and against tokens of 13 cameras."""
    forward = [
        row for row in rows if row["direction"] == "forward" and row.get("rest", 0) == 0 and shape_of(row)[0] == 1
    ]
    by_cameras = [row for row in forward if shape_of(row)[2:] == (9, 16)]
    by_tokens = [row for row in forward if shape_of(row)[1] == 13]
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex="col", sharey="row", constrained_layout=True)
    for column, (some, label) in enumerate(((by_cameras, "cameras of 9×16 tokens"), (by_tokens, "tokens, 13 cameras"))):
        for line, (number, title) in enumerate((("time_ratio", "time"), ("memory_ratio", "peak memory"))):
            panel = axes[line][column]
            for method in GROWTH[1:]:
                name, colour, style = LOOKS[method]
                chosen = sorted((shape_of(row), row[number]) for row in some if row["method"] == method)
                at = [s[1] if column == 0 else s[1] * s[2] * s[3] for s, _ in chosen]
                panel.plot(at, [value for _, value in chosen], style, color=colour, marker="o", ms=3, label=name)
            panel.axhline(1, color="black", lw=0.6)
            panel.set(xscale="log", yscale="log")
            panel.set_yticks(TICKS[number], [f"{tick}×" for tick in TICKS[number]], minor=False)
            panel.set_xticks(sorted(set(at)), [str(tick) for tick in sorted(set(at))], minor=False)
            panel.minorticks_off()
            if column == 0:
                panel.set_ylabel(f"{title} / plain block's")
            if line == 1:
                panel.set_xlabel(label)
    axes[0][0].legend(fontsize=8)
    figure.savefig(out, dpi=130)


def main() -> None:
    """Read the rows and draw."""
    parser = argparse.ArgumentParser(description="draw the cost of a camera attention block")
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/results/block-h200.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/block-cost.png"))
    options = parser.parse_args()
    draw(json.loads(options.rows.read_text())["rows"], options.out)


if __name__ == "__main__":
    main()
