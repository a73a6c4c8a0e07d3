"""Attention where cameras see a part of the clip, on a GPU: over full attention, and over plain attention.

    python benchmarks/visible_kernels.py [--out benchmarks/results/visible-<gpu>.json]

31 cameras of 22×40 tokens, 6 heads of 128, bfloat16. "Over full" is the time over that of the same method in which
every camera sees every other. The rows of a stream are one block of 3 cameras against a window of 12, of which all is
seen, over PyTorch's attention of the same sizes. Times are medians of CUDA-graph replays, taken in rounds (rounds.py).
Errors are those of `python benchmarks/fused_errors.py --visible`.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from attention import HEAD_DIM, HEADS, driving_cameras, machine
from block import chosen
from rounds import Replay, captured, times_in_rounds
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import merope
from merope import AttentionPlan, Visibility

CAMERAS, GRID, BLOCK, WINDOW = 31, (22, 40), 3, 12
METHODS = {  # encoding, backend
    "merope fused": ("merope", "fused"),
    "merope expanded": ("merope", "expanded"),
    "ucpe fused": ("ucpe", "fused"),
}
SEES = {
    "full": None,
    "causal blocks of 3": Visibility.block_causal(CAMERAS, BLOCK),
    "the last 12 and the first 3": Visibility.block_causal(CAMERAS, BLOCK, last=WINDOW, sink=3),
}
TARGETS = {("merope fused", "causal blocks of 3", "forward"): 0.65, ("merope fused", "a stream", "forward"): 1.2}


@dataclass(frozen=True)
class Row:
    """One measurement."""

    method: str
    sees: str
    direction: str  # "forward" or "forward+backward"
    pairs: float  # share of pairs of cameras that are seen
    median_ms: float
    ratio: float  # to full attention, or for a stream to plain attention
    target: float | None

    def __str__(self) -> str:
        target = "" if self.target is None else f"  (at most {self.target})"
        where = f"{self.direction:<17}{self.method:<16}{self.sees:<29}"
        return f"{where}{self.pairs:5.2f} of pairs {self.median_ms:8.3f} ms  ×{self.ratio:5.2f}{target}"


def replay_of(attention: Callable[..., Tensor], queries: int, keys: int, backward: bool) -> Replay:
    """One call, or one call and its gradients."""
    shapes = [(1, HEADS, count, HEAD_DIM) for count in (queries, keys, keys)]
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for shape in shapes]

    def run() -> object:
        out = attention(*leaves)
        return torch.autograd.grad(out, leaves, out.detach()) if backward else out

    return captured(run if backward else torch.no_grad()(run))


def under(plan: AttentionPlan, backend: str) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with chosen(backend) as name:
            return merope.attend(q, k, v, plan, name)

    return attention


def rows_over_full(method: str, backward: bool, repeats: int) -> list[Row]:
    """One of each visibility."""
    (name, backend), cameras = METHODS[method], driving_cameras(1, CAMERAS, "cuda")
    plans = {
        w: merope.encoding(name).plan(cameras, GRID, sees=sees).to(dtype=torch.float32) for w, sees in SEES.items()
    }
    tokens = CAMERAS * GRID[0] * GRID[1]
    replays = {words: replay_of(under(plan, backend), tokens, tokens, backward) for words, plan in plans.items()}
    times = times_in_rounds(replays, repeats)
    rows: list[Row] = []
    for words, sees in SEES.items():
        share = 1.0 if sees is None else float((sees.table()[..., 1] - sees.table()[..., 0]).sum()) / CAMERAS**2
        rows.append(_row(method, words, backward, share, times[words].median_ms, times["full"].median_ms))
        print(rows[-1], flush=True)
    return rows


def rows_of_a_stream(method: str, backward: bool, repeats: int) -> list[Row]:
    """One block against its window, after plain attention of the same sizes."""
    (name, backend), keys = METHODS[method], driving_cameras(1, WINDOW, "cuda")
    own, sees = keys.at(slice(WINDOW - BLOCK, WINDOW)), Visibility.block_causal(BLOCK, BLOCK, cached=WINDOW - BLOCK)
    plan = merope.encoding(name).plan(own, GRID, key=keys, sees=sees).to(dtype=torch.float32)
    attentions = {"plain": scaled_dot_product_attention, "ours": under(plan, backend)}
    sizes = (plan.query_tokens, plan.key_tokens, backward)
    times = times_in_rounds({what: replay_of(attention, *sizes) for what, attention in attentions.items()}, repeats)
    plain, ours = times["plain"].median_ms, times["ours"].median_ms
    rows = [
        _row("plain", "a stream", backward, 1.0, plain, plain),
        _row(method, "a stream", backward, 1.0, ours, plain),
    ]
    print(*rows, sep="\n", flush=True)
    return rows


def _row(method: str, sees: str, backward: bool, share: float, median_ms: float, over_ms: float) -> Row:
    direction = "forward+backward" if backward else "forward"
    target = TARGETS.get((method, sees, direction))
    return Row(method, sees, direction, round(share, 3), median_ms, median_ms / over_ms, target)


def main() -> None:
    """Time, print and write."""
    parser = argparse.ArgumentParser(description="attention over a part of the clip, on a GPU")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for method in options.methods:
        for backward in (False, True):
            rows += rows_over_full(method, backward, options.repeats)
            rows += rows_of_a_stream(method, backward, options.repeats)
    if options.out is not None:
        result = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
