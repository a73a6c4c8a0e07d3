"""Attention where cameras see a part of the clip: its time over that of full attention, in one process.

    python benchmarks/visible.py [--device cpu|cuda] [--out benchmarks/results/visible-cpu.json]

64 cameras of 5×8 tokens, two heads of 128, float32, backend "auto". The rows take turns in rounds, and times are
medians of the rounds. "Pairs" is the share of pairs of tokens that are seen, what the time should come down to.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from attention import driving_cameras

import merope
from merope import AttentionPlan, Cameras, Visibility
from merope.train.provenance import commit, device_name

CAMERAS, GRID, HEADS, HEAD_DIM = 64, (5, 8), 2, 128
ENCODINGS = ("merope", "ucpe", "none")
SEES = {
    "full": None,
    "causal blocks of 3": Visibility.block_causal(CAMERAS, 3),
    "window of 12, sink of 3": Visibility.block_causal(CAMERAS, 3, last=12, sink=3),
    "two copies of 32": Visibility.teacher_forcing(CAMERAS // 2, 3),
}


def seconds(plan: AttentionPlan, backward: bool) -> float:
    """Of one call, and of its gradients of q, k and v."""
    shape = (1, HEADS, plan.query_tokens, HEAD_DIM)
    inputs = [torch.randn(shape, device=plan.device, requires_grad=backward) for _ in range(3)]
    start = time.perf_counter()
    out = merope.attend(*inputs, plan)
    if backward:
        out.sum().backward()
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rows(name: str, cameras: Cameras, rounds: int, backward: bool) -> list[dict[str, object]]:
    """One of each visibility."""
    encoding = merope.encoding(name, head_dim=HEAD_DIM)
    plans = {words: encoding.plan(cameras, GRID, sees=sees) for words, sees in SEES.items()}
    turns = [{words: seconds(plan, backward) for words, plan in plans.items()} for _ in range(rounds + 1)]
    medians = {words: statistics.median(turn[words] for turn in turns[1:]) for words in plans}
    return [
        {
            "encoding": name,
            "sees": words,
            "direction": "forward+backward" if backward else "forward",
            "pairs": round(seen_share(sees), 3),
            "seconds": round(medians[words], 4),
            "over_full": round(medians[words] / medians["full"], 3),
        }
        for words, sees in SEES.items()
    ]


def seen_share(sees: Visibility | None) -> float:
    """Of all pairs of cameras."""
    if sees is None:
        return 1.0
    starts, stops = sees.table().unbind(-1)
    return int((stops - starts).sum()) / CAMERAS**2


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description="attention over a part of the clip")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cameras = driving_cameras(1, CAMERAS, options.device)
    cameras = Cameras(cameras.world_from_camera, cameras.lens, plan_dtype=torch.float32)
    found = []
    for name in ENCODINGS:
        for backward in (False, True):
            found += rows(name, cameras, options.rounds, backward)
            print("\n".join(json.dumps(row) for row in found[-len(SEES) :]), flush=True)
    if options.out is not None:
        device = device_name(torch.device(options.device))
        machine = {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}
        report = {"machine": {**machine, "commit": commit()}, "rows": found}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
