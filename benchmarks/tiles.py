"""Forward attention in tiles of 128 and of 144 queries, each forced in turn, over plain attention. Needs a Hopper GPU.

    python benchmarks/tiles.py [--out benchmarks/results/kernel-choices-<gpu>.json] [--repeats 20]

bfloat16, 6 heads of 128, MeRoPE and phases of directions. Nothing is timed before outputs and gradients are right. The
rule that chooses a tile (`takes_wide_tiles` in merope/attention/kernels/hopper.py) rests on these ratios.
"""

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import torch
from attention import HEAD_DIM, HEADS, SHAPES, driving_cameras, machine, plan_for
from block import MANY_CAMERAS, check
from rounds import captured, times_in_rounds
from torch.nn.functional import scaled_dot_product_attention

import merope
from merope.attention.kernels import hopper

METHODS = {"merope": "merope", "phases": "merope_phases"}
TILES = {128: False, 144: True}  # queries, and what takes_wide_tiles says


@torch.no_grad()
def row_of(name: str, shape: tuple[int, int, int, int], repeats: int) -> dict[str, str | float]:
    """Milliseconds of plain attention, and the ratio to it of every method in either tile."""
    batch, count, height, width = shape
    tokens = (batch, HEADS, count * height * width, HEAD_DIM)
    q, k, v = (torch.randn(tokens, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    plans = {m: plan_for(e, driving_cameras(batch, count, "cuda"), (height, width)) for m, e in METHODS.items()}
    replays = {"plain": captured(lambda: scaled_dot_product_attention(q, k, v))}
    for method, plan in plans.items():
        for queries, wide in TILES.items():
            with patch.object(hopper, "takes_wide_tiles", lambda *_, wide=wide, **__: wide):
                replay = captured(lambda plan=plan: merope.attend(q, k, v, plan, backend="fused"))
            replays[f"{method} in tiles of {queries}"] = replay
    medians = {what: times.median_ms for what, times in times_in_rounds(replays, repeats).items()}
    plain_ms = medians.pop("plain")
    return {"shape": name, "plain_ms": plain_ms} | {what: median / plain_ms for what, median in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="time tiles of 128 and of 144 queries")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    check([f"{method} fused" for method in METHODS])
    rows = []
    for name, shape in (SHAPES | MANY_CAMERAS).items():
        rows.append(row_of(name, shape, options.repeats))
        print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else value for key, value in rows[-1].items()))
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
