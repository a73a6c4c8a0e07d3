"""Errors of the fused backend against float64, over those of other ways to compute the same in the same dtype.

    python benchmarks/fused_errors.py [--visible] [--out benchmarks/results/fused-errors-<gpu>.json]

Output and gradients of q, k and v, for every encoding without content, in bfloat16 and float16, in the cases of
tests/gpu/errors.py. "÷ plain" is over PyTorch's attention without any encoding, "÷ sdpa" over the sdpa backend under
the same plan. These are the numbers themselves; tests/gpu asserts that they are small enough. With --visible, of plans
made with `sees`; plain attention then has the same mask.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from attention import machine

sys.path.insert(0, str(Path(__file__).parents[1]))

from merope import AttentionPlan
from tests.gpu.errors import GEOMETRIC, PARTS, cases, errors_of, visible_cases


@dataclass(frozen=True)
class Row:
    """One case; errors are relative, in the order of PARTS."""

    encoding: str
    case: str
    dtype: str
    errors: list[float]
    over_plain: list[float]
    over_sdpa: list[float]


def row_of(name: str, case: str, plan: AttentionPlan, factor: float, dtype: torch.dtype) -> Row:
    errors = errors_of(plan, dtype, factor)
    return Row(name, case, str(dtype).removeprefix("torch."), errors.ours, errors.over_plain, errors.over_sdpa)


def line(row: Row) -> str:
    """For the terminal: every part over plain and over sdpa."""
    parts = [f"{part} {a:.2f} {b:.2f}" for part, a, b in zip(PARTS, row.over_plain, row.over_sdpa, strict=True)]
    return f"{row.encoding:<14}{row.case:<14}{row.dtype:<10}" + "  ".join(parts)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="errors of the fused backend")
    parser.add_argument("--visible", action="store_true", help="of plans made with `sees`")
    parser.add_argument("--encodings", nargs="*", default=GEOMETRIC, choices=GEOMETRIC)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.encodings:
        for case, (plan, factor) in (visible_cases if options.visible else cases)(name).items():
            for dtype in (torch.bfloat16, torch.float16):
                rows.append(row_of(name, case, plan, factor, dtype))
                print(line(rows[-1]), flush=True)
    if options.out is not None:
        result = {"machine": machine(), "parts": PARTS, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
