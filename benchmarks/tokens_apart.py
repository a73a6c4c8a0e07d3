"""Block cost where some tokens have no camera, against the plain block over the same tokens.

    python benchmarks/tokens_apart.py [--out benchmarks/results/tokens-apart-<gpu>.json] [--shape 31 22 40]

"extra" has 64 tokens after the cameras'. "rim" has a fisheye's lens that leaves some patches of every camera without a
ray. "all" is neither, for comparison. Timed as in `benchmarks/block.py`, and only where the error is at most twice that
of plain attention, for plans of five cameras with the same kinds of tokens.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from attention import driving_cameras, machine
from block import CHANNELS, CHECKED_GRIDS, METHODS, RESTS, Weights, error_ratio, refuse_worse, step
from rounds import measured

import merope
from merope import AttentionPlan, Cameras, UnifiedCamera

EXTRA = 64
CHOSEN = ["plain", "merope expanded", "merope fused", "phases expanded", "phases fused"]


@dataclass(frozen=True)
class Row:
    """One measurement."""

    kind: str
    tokens: int
    without_camera: float  # share of all tokens
    method: str
    direction: str  # "forward" or "forward+backward"
    rest: float  # of RESTS
    median_ms: float
    p10_ms: float
    p90_ms: float
    peak_mib: float
    time_ratio: float  # to the plain block
    memory_ratio: float
    graph: bool  # timed as a CUDA graph


def fisheye(grid: tuple[int, int]) -> UnifiedCamera:
    """Its image circle cuts the corners of an image of square patches."""
    rows, columns = grid
    width, height = 16 * columns, 16 * rows
    xi = 1.8
    radius = 0.78 * (width**2 + height**2) ** 0.5 / 2  # pixels from the centre to the last ray
    focal = radius * (xi**2 - 1) ** 0.5
    return UnifiedCamera(focal, focal, width / 2, height / 2, xi, width, height)


def plan_of(encoding: str, kind: str, cameras: int, grid: tuple[int, int]) -> AttentionPlan:
    """Of one clip that drives ahead and turns."""
    drive = driving_cameras(1, cameras, "cuda")
    if kind == "rim":
        drive = Cameras(drive.world_from_camera, fisheye(grid).to("cuda"))
    plan = merope.encoding(encoding).plan(drive, grid, extra_tokens=EXTRA if kind == "extra" else 0)
    return plan.to(dtype=torch.float32)


def rows_of(kind: str, cameras: int, grid: tuple[int, int], backward: bool, repeats: int) -> list[Row]:
    """All methods over the same tokens, plain first."""
    direction = "forward+backward" if backward else "forward"
    plans: dict[str, Callable[[], AttentionPlan | None]] = {"plain": lambda: None}
    for name in ("merope", "merope_phases"):
        plans[name] = lambda name=name: plan_of(name, kind, cameras, grid)
    flags = plan_of("merope", kind, cameras, grid).key_has_camera
    tokens, share = flags.shape[1], 1 - float(flags.float().mean())
    weights = Weights.random(torch.bfloat16)
    x = torch.randn(1, tokens, CHANNELS, device="cuda", dtype=torch.bfloat16)
    runs = {}
    for method in CHOSEN:
        encoding, backend, budget = METHODS[method]
        runs[method] = step(x, weights, plans[encoding](), backend, budget, backward)
    rows = []
    for found in measured(runs, repeats, RESTS):
        row = Row(kind=kind, tokens=tokens, without_camera=share, direction=direction, **asdict(found))
        rows.append(row)
        print(
            f"{kind:<6} {tokens} tokens, {share:5.1%} without a camera  {direction:<16} rest {row.rest:g} "
            f"{row.method:<16} {row.median_ms:8.3f} ms ×{row.time_ratio:6.3f} "
            f"{row.peak_mib:7.0f} MiB ×{row.memory_ratio:5.2f}",
            flush=True,
        )
    del runs
    torch.cuda.empty_cache()
    return rows


def check(kinds: list[str]) -> dict[str, float]:
    """Refuse to time a method whose worst error ratio to plain attention exceeds 2; the ratios by method."""
    worst = {}
    for method in CHOSEN[1:]:
        encoding, backend, _ = METHODS[method]
        worst[method] = max(
            error_ratio(plan_of(encoding, kind, 5, grid), backend, seed)
            for seed, kind in enumerate(kinds)
            for grid in CHECKED_GRIDS
        )
        refuse_worse(method, worst[method])
    return worst


def main() -> None:
    """Gate, run, and write the rows."""
    parser = argparse.ArgumentParser(description="time a block where some tokens have no camera")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the rows")
    parser.add_argument("--kinds", nargs="*", default=["all", "extra", "rim"], choices=["all", "extra", "rim"])
    parser.add_argument("--shape", nargs=3, type=int, default=[31, 22, 40], metavar=("CAMERAS", "ROWS", "COLUMNS"))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    cameras, *grid = options.shape
    gate = check(options.kinds)
    rows = []
    for kind in options.kinds:
        for backward in (False, True):
            rows += rows_of(kind, cameras, (grid[0], grid[1]), backward, options.repeats)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": machine(), "error_ratio": gate, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
