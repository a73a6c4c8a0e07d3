"""Tables that learn a depth (RayRoPE, CRePE): made by kernels against made op by op, values, gradients and times.

    python benchmarks/learned_tables.py [--out benchmarks/results/learned-tables-h200.json]

The clips are of the world benchmark's size: 13 cameras of 9×16 tokens each, 24 clips. Differences are relative to the
largest entry; tables are float32, and the exit code is 1 if one exceeds 1e-5. Times are the best of some. "Attention"
is forward and backward of three heads of 128 in bfloat16 under the fused backend, with the gradients of the tables: the
same code in both rows.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from attention import driving_cameras
from torch import Tensor

import merope
from merope import AttentionPlan, Cameras
from merope.train.provenance import commit, device_name

ENCODINGS = ("rayrope", "crepe")
CAMERAS, GRID, HEADS, REPEATS = 13, (9, 16), 3, 5
LIMIT = 1e-5
PARTS = ("query table", "key table", "gradient of content")


@contextmanager
def made(by_kernels: bool) -> Iterator[None]:
    """Tables made by the kernels, or op by op."""
    if by_kernels:
        yield
        return
    with (
        patch("merope.encodings.rayrope.kernels_run_on", return_value=False),
        patch("merope.encodings.expected_phasors.kernels_run_on", return_value=False),
    ):
        yield


def cameras_of(clips: int, device: torch.device) -> Cameras:
    """Drives that turn, planned in float32 as in training."""
    cameras = driving_cameras(clips, CAMERAS, str(device))
    return Cameras(cameras.world_from_camera, cameras.lens, plan_dtype=torch.float32)


def content(clips: int, device: torch.device) -> Tensor:  # [clips, tokens, 2], requires a gradient
    """What a layer would predict: depths and how sure it is."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(clips, CAMERAS * GRID[0] * GRID[1], 2, generator=generator)
    return (torch.tensor([0.5, 1.0]) + 0.3 * noise).to(device).requires_grad_()


def tables(plan: AttentionPlan) -> list[Tensor]:
    return [side.table for side in plan.blocks[0].operators]


def differences(name: str, clips: int, device: torch.device) -> dict[str, float]:
    """Largest difference of the two ways, relative to the largest entry, of every part."""
    cameras, found = cameras_of(clips, device), []
    for by_kernels in (True, False):
        depths = content(clips, device)
        with made(by_kernels):
            both = tables(merope.encoding(name).plan(cameras, GRID, content=depths))
            generator = torch.Generator(device).manual_seed(2)
            upstream = [torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype) for x in both]
            found.append([*(x.detach() for x in both), *torch.autograd.grad(both, depths, upstream)])
    return {part: float((a - b).abs().max() / b.abs().max()) for part, a, b in zip(PARTS, *found, strict=True)}


def times_ms(name: str, by_kernels: bool, clips: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of the tables, of their gradients, and of attention between the two; GiB at the highest."""
    encoding, cameras, depths = merope.encoding(name), cameras_of(clips, device), content(clips, device)
    size = (clips, HEADS, CAMERAS * GRID[0] * GRID[1], encoding.head_dim)
    qkv = [torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def once() -> list[float]:
        marks = [time.perf_counter()]

        def mark(work: Callable[[], Any]) -> Any:
            result = work()
            torch.cuda.synchronize(device)
            marks.append(time.perf_counter())
            return result

        plan = mark(lambda: encoding.plan(cameras, GRID, content=depths))
        inputs = (*qkv, *tables(plan))
        grads = mark(
            lambda: torch.autograd.grad(
                merope.attend(*qkv, plan, backend="fused").float().square().sum(), inputs, retain_graph=True
            )
        )
        mark(lambda: torch.autograd.grad(tables(plan), depths, grads[3:]))
        return [1e3 * (b - a) for a, b in pairwise(marks)]

    with made(by_kernels):
        once()
        torch.cuda.reset_peak_memory_stats(device)
        best = [min(column) for column in zip(*(once() for _ in range(REPEATS)), strict=True)]
    peak_gib = torch.cuda.max_memory_allocated(device) / 2**30
    return dict(zip(("tables", "attention", "gradients of tables"), best, strict=True)) | {"peak_gib": peak_gib}


def main() -> int:
    """Compare, time, print and write."""
    parser = argparse.ArgumentParser(description="learned tables by kernels and op by op")
    parser.add_argument("--clips", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/learned-tables-h200.json"))
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for name in ENCODINGS:
        row: dict[str, Any] = {"encoding": name, "differences": differences(name, 2, device)}
        for by_kernels in (True, False):
            row["kernels" if by_kernels else "op by op"] = times_ms(name, by_kernels, options.clips, device)
        print(json.dumps(row, indent=1))
        rows.append(row)
    machine = {"gpu": device_name(device), "torch": torch.__version__, "commit": commit()}
    options.out.write_text(json.dumps({"machine": machine, "clips": options.clips, "rows": rows}, indent=1) + "\n")
    return int(any(value > LIMIT for row in rows for value in row["differences"].values()))


if __name__ == "__main__":
    sys.exit(main())
