"""Block cost: q/k/v projection, attention under a camera encoding, output projection, against the plain block.

    python benchmarks/block.py [--out benchmarks/results/block-<gpu>.json] [--growth] [--shapes …]

Every row of a shape runs in one process on the same inputs. A row is timed only if it is right: on fresh random inputs,
for a curved drive, a straight one and coincident cameras, the error of output and of every gradient against float64 is
at most twice that of plain PyTorch attention in the same dtype. Times are medians of CUDA-graph replays, taken in
rounds over all methods (rounds.py): once without a pause, and once with a rest after every run. Memory is the peak of
an eager run beyond inputs, weights and plan.

"merope, paper's way" materialises keys and values of all query cameras in plain PyTorch, as the paper's code does.
"merope expanded" is the fused backend without the Hopper kernels: keys and values expanded in chunks of 1 GiB.
"phases" is MeRoPE with phases of directions in place of its rotation block.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from attention import HEAD_DIM, HEADS, SHAPES, driving_cameras, machine, plan_for
from rounds import measured
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

import merope
from merope import AttentionPlan, Cameras, Pinhole
from merope.attention import fused
from merope.attention.dispatch import Backend

CHANNELS = 3072
RESTS = (0.0, 4.0)  # after every run, in multiples of its time
METHODS = {  # encoding, backend, memory budget in bytes
    "plain": ("plain", "sdpa", 0),
    "gta fused": ("gta", "fused", 2**30),
    "ucpe fused": ("ucpe", "fused", 2**30),
    "merope, paper's way": ("merope", "sdpa", 2**36),
    "merope sdpa": ("merope", "sdpa", 2**30),
    "merope expanded": ("merope", "expanded", 2**30),
    "merope fused": ("merope", "fused", 2**30),
    "phases expanded": ("merope_phases", "expanded", 2**30),
    "phases fused": ("merope_phases", "fused", 2**30),
}
GROWTH = ["plain", "ucpe fused", "merope, paper's way", "merope fused"]
MANY_CAMERAS = {f"1 × {count} × 9×16": (1, count, 9, 16) for count in (64, 128)}
CHECKED_GRIDS = ((5, 7), (9, 16))  # tiles of 128 queries, and of 144


@dataclass(frozen=True)
class Row:
    """One measurement."""

    shape: str
    method: str
    direction: str  # "forward" or "forward+backward"
    rest: float  # of RESTS
    dtype: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    peak_mib: float
    time_ratio: float  # to the plain block
    memory_ratio: float
    graph: bool  # timed as a CUDA graph


class Weights(NamedTuple):
    """Of one block, shared by all methods."""

    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor

    @classmethod
    def random(cls, dtype: torch.dtype) -> "Weights":
        inner = HEADS * HEAD_DIM
        shapes = ((3 * inner, CHANNELS), (3 * inner,), (CHANNELS, inner), (CHANNELS,))
        return cls(*(torch.randn(shape, device="cuda", dtype=dtype) / CHANNELS**0.5 for shape in shapes))


@contextmanager
def chosen(backend: str) -> Iterator[Backend]:
    """The backend of a row; "expanded" is "fused" with the Hopper kernels never used."""
    original = fused.hopper_for
    if backend == "expanded":
        fused.hopper_for = lambda q, plan: None
    try:
        yield "fused" if backend == "expanded" else backend  # type: ignore[misc]
    finally:
        fused.hopper_for = original


def block(x: Tensor, weights: Weights, plan: AttentionPlan | None, backend: str, budget: int) -> Tensor:
    """The block that is timed; without a plan, plain attention on the same views.

    q, k and v are views [B, H, N, d] of one product, and the fused backend reads them where they lie.
    """
    qkv = linear(x, weights.qkv, weights.qkv_bias).unflatten(-1, (3, HEADS, HEAD_DIM))
    q, k, v = torch.unbind(qkv.permute(2, 0, 3, 1, 4))
    del qkv
    if plan is None:
        out = scaled_dot_product_attention(q, k, v)
    else:
        with chosen(backend) as name:
            out = merope.attend(q, k, v, plan, name, budget)
    del q, k, v
    return linear(out.transpose(1, 2).flatten(2), weights.out, weights.out_bias)


def step(
    x: Tensor, weights: Weights, plan: AttentionPlan | None, backend: str, budget: int, backward: bool
) -> Callable[[], object]:
    """One forward pass, or one forward and backward pass with gradients of the input and all weights."""
    if not backward:
        return torch.no_grad()(lambda: block(x, weights, plan, backend, budget))
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    gradient = torch.randn_like(x)

    def run() -> object:
        out = block(leaves[0], Weights(*leaves[1:]), plan, backend, budget)
        return torch.autograd.grad(out, leaves, gradient)

    return run


def rows_of(shape: tuple[int, int, int, int], methods: list[str], backward: bool, repeats: int) -> list[Row]:
    """All methods at one shape and direction, plain first, for every rest."""
    batch, count, height, width = shape
    name = f"{batch} × {count} × {height}×{width}"
    direction = "forward+backward" if backward else "forward"
    cameras = driving_cameras(batch, count, "cuda")
    dtype = torch.bfloat16
    weights = Weights.random(dtype)
    x = torch.randn(batch, count * height * width, CHANNELS, device="cuda", dtype=dtype)
    runs = {}
    for method in methods:
        encoding, backend, budget = METHODS[method]
        plan = None if encoding == "plain" else plan_for(encoding, cameras, (height, width))
        runs[method] = step(x, weights, plan, backend, budget, backward)
    rows = []
    for found in measured(runs, repeats, RESTS):
        row = Row(shape=name, direction=direction, dtype=str(dtype), **asdict(found))
        rows.append(row)
        print(
            f"{name:>16} {direction:<16} rest {row.rest:g} {row.method:<22} {row.median_ms:8.3f} ms "
            f"×{row.time_ratio:6.3f} {row.peak_mib:7.0f} MiB ×{row.memory_ratio:5.2f}",
            flush=True,
        )
    del runs
    torch.cuda.empty_cache()
    return rows


def scenes(device: str = "cuda") -> dict[str, Cameras]:
    """Where geometry is ordinary, and where it is degenerate."""
    lens = Pinhole(406.0, 406.0, 256.0, 144.0, 512, 288)
    straight = torch.eye(4, dtype=torch.float64).repeat(5, 1, 1)
    straight[:, 2, 3] = 1.7 * torch.arange(5)
    coincident = straight.clone()
    coincident[:3] = straight[1]
    return {
        "curved": driving_cameras(1, 5, device),
        "straight": Cameras(straight, lens).to(device),
        "coincident": Cameras(coincident, lens).to(device),
    }


def check(methods: list[str]) -> dict[str, float]:
    """Refuse to time a method whose worst error ratio to plain attention exceeds 2; the ratios by method."""
    worst = {}
    for method in methods:
        encoding, backend, _ = METHODS[method]
        if encoding == "plain":
            continue
        worst[method] = max(
            error_ratio(plan_for(encoding, cameras, grid), backend, seed)
            for grid in CHECKED_GRIDS
            for seed, cameras in enumerate(scenes().values())
        )
        refuse_worse(method, worst[method])
    return worst


def refuse_worse(method: str, ratio: float) -> None:
    """End where an error is more than twice that of plain attention: nothing is timed that is not right."""
    print(f"{method:<22} worst error of output and gradients: {ratio:.2f} × plain attention's", flush=True)
    if not ratio <= 2:
        raise SystemExit(f"{method}: error exceeds twice that of plain attention")


def error_ratio(plan: AttentionPlan, backend: str, seed: int) -> float:
    """Largest error of output and gradients in bfloat16, each over that of plain attention, after poisoning memory."""
    torch.manual_seed(seed)
    shape, dtype = (1, HEADS, plan.query_tokens, HEAD_DIM), torch.bfloat16
    exact = [torch.randn(shape, device="cuda", dtype=dtype).double().requires_grad_() for _ in range(3)]
    rounded = [x.detach().to(dtype).requires_grad_() for x in exact]
    gradient = torch.randn(shape, device="cuda", dtype=dtype)

    def results(attention: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, gradient.to(out.dtype))]

    def errors(attention: Callable[..., Tensor], reference: Callable[..., Tensor]) -> list[float]:
        right = results(reference, exact)
        torch.full((2**26,), torch.nan, device="cuda")  # freed at once: what is not written now reads as NaN
        pairs = zip(results(attention, rounded), right, strict=True)
        return [float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs]

    budget = 2**30 if backend == "sdpa" else 2**24  # of 5 cameras of 9×16 tokens, 3 at a time
    with chosen(backend) as name:
        ours = errors(
            lambda q, k, v: merope.attend(q, k, v, plan, backend=name, memory_budget=budget),
            lambda q, k, v: merope.attend(q, k, v, plan, backend="sdpa"),
        )
    plain = errors(scaled_dot_product_attention, scaled_dot_product_attention)
    return max(a / b for a, b in zip(ours, plain, strict=True))


def main() -> None:
    """Gate, run, and write the rows."""
    parser = argparse.ArgumentParser(description="time a camera attention block against the plain block")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the rows")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=[*SHAPES, *MANY_CAMERAS])
    parser.add_argument("--growth", action="store_true", help="also cameras 8 … 128 and grids up to 45×80")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    methods = ["plain", *(method for method in options.methods if method != "plain")]  # what all are compared with
    gate = check(methods)
    rows = []
    for shape in options.shapes:
        for backward in (False, True):
            rows += rows_of((SHAPES | MANY_CAMERAS)[shape], methods, backward, options.repeats)
    if options.growth:
        growth = [method for method in GROWTH if method in methods]
        more_cameras = [(1, count, 9, 16) for count in (8, 16, 32, 64, 128)]
        more_tokens = [(1, 13, 9 * n, 16 * n) for n in (2, 3, 5)]
        for shape in more_cameras + more_tokens:
            rows += rows_of(shape, growth, False, options.repeats)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": machine(), "error_ratio": gate, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
