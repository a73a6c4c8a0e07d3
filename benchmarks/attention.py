"""Attention cost: MeRoPE and other encodings against plain attention, in one process.

    python benchmarks/attention.py [--out benchmarks/results/attention-<gpu>.json]

Correctness comes first: a row is timed only if its error against float64 is at most twice that of plain PyTorch
attention in the same dtype. Times are medians of CUDA-graph replays, taken in rounds (rounds.py), with their 10th and
90th percentile. Memory is the peak beyond inputs and plans.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rounds import measured
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import merope
from merope import AttentionPlan, Cameras
from merope.train.provenance import commit

SHAPES = {  # batch, cameras, rows, columns
    "1 × 13 × 9×16": (1, 13, 9, 16),
    "8 × 13 × 9×16": (8, 13, 9, 16),
    "1 × 31 × 22×40": (1, 31, 22, 40),
    "1 × 21 × 30×52": (1, 21, 30, 52),
}
HEADS, HEAD_DIM = 6, 128
PLAIN = ("plain", "sdpa")


@dataclass(frozen=True)
class Row:
    """One measurement."""

    shape: str
    method: str
    backend: str
    direction: str  # "forward" or "forward+backward"
    dtype: str
    rest: float  # 0: without a pause
    median_ms: float
    p10_ms: float
    p90_ms: float
    peak_mib: float
    time_ratio: float  # to plain attention
    memory_ratio: float
    graph: bool  # timed as a CUDA graph
    error: float  # relative, against float64, on a smaller clip
    plain_error: float


def driving_cameras(batch: int, count: int, device: str) -> Cameras:
    """Clips that drive ahead and turn, a different turn in every sample."""
    yaw = 0.03 * torch.arange(count, dtype=torch.float64) * torch.linspace(-1, 1, batch, dtype=torch.float64)[:, None]
    poses = torch.eye(4, dtype=torch.float64).repeat(batch, count, 1, 1)
    poses[..., 0, 0], poses[..., 2, 2] = yaw.cos(), yaw.cos()
    poses[..., 0, 2], poses[..., 2, 0] = yaw.sin(), -yaw.sin()
    poses[..., 0, 3], poses[..., 2, 3] = yaw.sin().cumsum(-1), yaw.cos().cumsum(-1)
    return Cameras(poses, merope.Pinhole(406.0, 406.0, 256.0, 144.0, 512, 288)).to(device)


def plan_for(method: str, cameras: Cameras, grid: tuple[int, int]) -> AttentionPlan:
    """The plan of a method; homogeneous encodings get their translations scaled to about 1, as they need."""
    options = {}
    if method in ("gta", "ucpe"):
        options["translation_scale"] = merope.translation_scale(
            cameras.world_from_camera.cpu().view(-1, cameras.count, 4, 4)
        )
    return merope.encoding(method, **options).plan(cameras, grid).to(dtype=torch.float32)


def error_against_float64(method: str, backend: str, dtype: torch.dtype) -> tuple[float, float]:
    """Relative errors of the method and of plain attention in this dtype, on a clip of 5 cameras."""
    plan = plan_for(method, driving_cameras(1, 5, "cuda"), (5, 7))
    exact = [torch.randn(1, HEADS, plan.query_tokens, HEAD_DIM, device="cuda", dtype=dtype).double() for _ in range(3)]
    rounded = [x.to(dtype) for x in exact]

    def relative(ours: Tensor, reference: Tensor) -> float:
        return float((ours.double() - reference).norm() / reference.norm())

    plain = relative(scaled_dot_product_attention(*rounded), scaled_dot_product_attention(*exact))
    reference = merope.attend(*exact, plan, backend="sdpa")
    return relative(merope.attend(*rounded, plan, backend=backend), reference), plain


def rows_of(shape: str, dtype: torch.dtype, methods: list[tuple[str, str]], repeats: int) -> list[Row]:
    """Plain attention and every (method, backend), in one process."""
    batch, count, height, width = SHAPES[shape]
    cameras = driving_cameras(batch, count, "cuda")
    tokens = (batch, HEADS, count * height * width, HEAD_DIM)
    q, k, v = (torch.randn(tokens, device="cuda", dtype=dtype) for _ in range(3))
    errors = {PLAIN: (0.0, 0.0)} | {named: checked_errors(*named, dtype) for named in methods}
    plans = {named: plan_for(named[0], cameras, (height, width)) for named in methods}
    rows: list[Row] = []
    for direction in ("forward", "forward+backward"):
        runs = {"/".join(named): step(q, k, v, plans.get(named), named[1], direction) for named in errors}
        for found in measured(runs, repeats):
            method, backend = found.method.split("/")
            error, plain_error = errors[method, backend]
            about = {"method": method, "backend": backend, "error": error, "plain_error": plain_error}
            row = Row(shape=shape, direction=direction, dtype=str(dtype), **(asdict(found) | about))
            rows.append(row)
            print(
                f"{shape:>16}  {f'{found.method} {direction}':<30} {row.median_ms:9.3f} ms  ×{row.time_ratio:6.2f}  "
                f"{row.peak_mib:8.0f} MiB",
                flush=True,
            )
    return rows


def checked_errors(method: str, backend: str, dtype: torch.dtype) -> tuple[float, float]:
    """The method's error and plain attention's; nothing is timed that is more than twice as far off."""
    error, plain_error = error_against_float64(method, backend, dtype)
    if not error <= 2 * plain_error:
        raise SystemExit(f"{method}/{backend}: error {error:.3g} exceeds twice plain attention's {plain_error:.3g}")
    return error, plain_error


def step(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan | None, backend: str, direction: str
) -> Callable[[], object]:
    """The call that is timed."""

    def forward() -> Tensor:
        if plan is None:
            return scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(HEAD_DIM))
        return merope.attend(q, k, v, plan, backend=backend)  # type: ignore[arg-type]

    if direction == "forward":
        return torch.no_grad()(forward)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(forward().sum(), inputs)


def main() -> None:
    """Run all shapes and write the rows."""
    parser = argparse.ArgumentParser(description="time attention under camera encodings against plain attention")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the rows")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    methods = [
        (method, backend) for method in ("gta", "ucpe", "merope", "merope_phases") for backend in ("sdpa", "fused")
    ]
    rows = [row for shape in options.shapes for row in rows_of(shape, torch.bfloat16, methods, options.repeats)]
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1))


def machine() -> dict[str, str]:
    """GPU, versions and commit, as every result file carries them."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
    }


if __name__ == "__main__":
    main()
