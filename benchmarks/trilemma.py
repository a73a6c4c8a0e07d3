"""Per-token orthogonal operators against metric translation and direction phases: what docs/trilemma.md shows.

    python benchmarks/trilemma.py [--dims 12 24 48] [--steps 300] [--seed 0]

About a minute on one core. A run with other options prints its table and leaves the stored files alone.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from merope.paper.trilemma import Row, direction_rows, run, table

DIMS, STEPS, SEED = (12, 24, 48), 300, 0
ROOT = Path(__file__).parents[1]


def draw(rows: list[Row], path: Path) -> None:
    """Residuals against head size: cameras that look anywhere and, for comparison, cameras that all look one way."""
    import matplotlib.pyplot as plt

    turned = [row for row in rows if row.rotations == "all"]
    still = [row for row in rows if row.rotations == "none"]
    dims = [row.dim for row in turned]
    curves: tuple[tuple[str, list[float], dict[str, object]], ...] = (
        ("blind to translation (U = I)", [row.blind for row in turned], {"color": "#999999", "linestyle": "--"}),
        ("plane waves D(o) W(R), trained", [row.plane_waves for row in turned], {"color": "#dd8452", "marker": "o"}),
        ("any per-token U(R, o), trained", [row.any_map for row in turned], {"color": "#c44e52", "marker": "s"}),
        ("floor: no per-token U is below", [row.floor for row in turned], {"color": "#c44e52", "linewidth": 1}),
        (
            "plane waves, cameras not rotated",
            [row.plane_waves for row in still],
            {"color": "#55a868", "marker": "^", "ms": 10},
        ),
        ("MeRoPE, any rotation", [row.merope for row in turned], {"color": "#4c72b0", "marker": "o", "ms": 4}),
    )
    figure, axis = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    for label, values, style in curves:
        axis.plot(dims, values, label=label, **style)
    axis.fill_between(dims, [row.floor for row in turned], color="#c44e52", alpha=0.12, linewidth=0)
    axis.set(xlabel="channels d", ylabel="‖U_iᵀU_j − τ_ij‖² / d", xticks=dims, ylim=(-0.06, 1.6))
    axis.set_title("Metric translation by orthogonal operators")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="center", bbox_to_anchor=(0.5, 0.36))
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    """Run, print, and store what the page shows."""
    parser = argparse.ArgumentParser(description="the impossibility theorem as an experiment")
    parser.add_argument("--dims", type=int, nargs="+", default=list(DIMS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    started = time.perf_counter()
    rows = run(tuple(options.dims), options.steps, options.seed)
    directions = direction_rows(tuple(options.dims), options.seed)
    print("metric translation", table(rows), "direction phases", table(directions), sep="\n")
    print(f"{time.perf_counter() - started:.0f} s")
    if (tuple(options.dims), options.steps, options.seed) != (DIMS, STEPS, SEED):
        return
    results = ROOT / "benchmarks" / "results" / "trilemma.json"
    results.parent.mkdir(exist_ok=True)
    tables = {"rows": [asdict(row) for row in rows], "directions": [asdict(row) for row in directions]}
    results.write_text(json.dumps({"steps": STEPS, "seed": SEED, **tables}, indent=1) + "\n")
    print(f"wrote {results}")
    draw(rows, ROOT / "docs" / "images" / "trilemma.png")


if __name__ == "__main__":
    main()
