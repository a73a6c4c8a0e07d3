"""Errors of the fused backend against float64, over those of other ways to compute the same in the same dtype.

    python benchmarks/fused_errors.py [--out benchmarks/results/fused-errors-<gpu>.json]

Output and gradients of q, k and v, for every encoding without content, in bfloat16 and float16: ordinary and degenerate
geometry, cross-attention, batches, many cameras, few keys, and peaked attention (queries × 30: logits of that standard
deviation). "÷ plain" is over PyTorch's attention without any encoding, "÷ sdpa" over the sdpa backend under the same
plan; a case is fine if either is at most 2, because an encoding rounds more numbers than plain attention has. Memory is
filled with NaN before every call: what is not written shows. Exit 1 if a case is not fine.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from attention import driving_cameras, machine
from block import scenes
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import merope
from merope import AttentionPlan, Cameras
from merope.encodings import ENCODINGS

HEADS = 2
PARTS = ("out", "dq", "dk", "dv")
ORDINARY, PEAKED = 1.0, 30.0


@dataclass(frozen=True)
class Row:
    """One case; errors are relative, in the order of PARTS."""

    encoding: str
    case: str
    dtype: str
    errors: list[float]
    over_plain: list[float]
    over_sdpa: list[float]

    @property
    def is_fine(self) -> bool:
        return all(min(a, b) <= 2 for a, b in zip(self.over_plain, self.over_sdpa, strict=True))


def cases(name: str, device: str) -> dict[str, tuple[AttentionPlan, float]]:
    """Plans of an encoding, and the factor on the queries."""
    encoding = merope.encoding(name)
    plans = {scene: (encoding.plan(cameras, (5, 7)), ORDINARY) for scene, cameras in scenes(device).items()}
    curved, many = driving_cameras(1, 5, device), driving_cameras(1, 48, device)
    other = Cameras(curved.world_from_camera[:, :3].flip(1), curved.lens)
    plans["cross"] = encoding.plan(curved, (5, 7), key=other, key_grid=(4, 9)), ORDINARY
    clips, other_clips = driving_cameras(3, 5, device), driving_cameras(3, 4, device)  # each sample its own drive
    plans["batch"] = encoding.plan(clips, (5, 7)), ORDINARY
    plans["batch, cross"] = encoding.plan(clips, (5, 7), key=other_clips, key_grid=(4, 9)), ORDINARY
    plans["many cameras"] = encoding.plan(many, (2, 3)), ORDINARY
    plans["few keys"] = encoding.plan(driving_cameras(1, 2, device), (1, 3)), ORDINARY
    plans["peaked"] = encoding.plan(curved, (5, 7)), PEAKED
    return plans


def results(attention: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Output and gradients of one call, after memory was filled with NaN."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    torch.full((2**24,), torch.nan, device=gradient.device)  # freed at once: what is not written now reads as NaN
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]


def relative_errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)]


def row_of(name: str, case: str, plan: AttentionPlan, factor: float, dtype: torch.dtype, backend: str) -> Row:
    generator = torch.Generator().manual_seed(0)
    sizes = (plan.query_tokens, plan.key_tokens, plan.key_tokens, plan.query_tokens)
    drawn = [torch.randn(plan.batch, HEADS, count, plan.head_dim, generator=generator) for count in sizes]
    *rounded, gradient = (x.to(plan.device, dtype) for x in (factor * drawn[0], *drawn[1:]))
    exact = [x.double() for x in rounded]

    def under(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: merope.attend(q, k, v, plan, backend=backend)  # type: ignore[arg-type]

    right = results(under("sdpa"), exact, gradient)
    ours = relative_errors(results(under(backend), rounded, gradient), right)
    sdpa = relative_errors(results(under("sdpa"), rounded, gradient), right)
    plain = relative_errors(
        results(scaled_dot_product_attention, rounded, gradient),
        results(scaled_dot_product_attention, exact, gradient),
    )
    ratios = [[a / b for a, b in zip(ours, other, strict=True)] for other in (plain, sdpa)]
    return Row(name, case, str(dtype).removeprefix("torch."), ours, *ratios)


def line(row: Row) -> str:
    """For the terminal: every part over plain and over sdpa."""
    parts = [f"{part} {a:.2f} {b:.2f}" for part, a, b in zip(PARTS, row.over_plain, row.over_sdpa, strict=True)]
    return f"{'ok' if row.is_fine else 'FAIL':<5}{row.encoding:<10}{row.case:<14}{row.dtype:<10}" + "  ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="errors of the fused backend")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for name in (name for name, kind in ENCODINGS.items() if kind.content_channels == 0):
        for case, (plan, factor) in cases(name, "cuda").items():
            for dtype in (torch.bfloat16, torch.float16):
                rows.append(row_of(name, case, plan, factor, dtype, "fused"))
                print(line(rows[-1]), flush=True)
    if options.out is not None:
        result = {"machine": machine(), "parts": PARTS, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(row.is_fine for row in rows))


if __name__ == "__main__":
    sys.exit(main())
