"""One camera branch by itself, as benchmarks/model.py times it: projections, attention under the encoding, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from model_scenes import (
    METHODS,
    OURS,
    PAPERS,
    Clip,
    Method,
    Row,
    branch_attention,
    forget_peak,
    peak_gib,
    relative_difference,
    speak,
    spread,
    timed,
    with_ratios,
)
from torch import Tensor

from merope.adapters.branch_config import branch_heads, make_encoding
from merope.adapters.camera_attention import CameraAttention
from merope.adapters.conditioning import CameraCondition
from merope.generate.conditions import latent_cameras


def one_branch(
    clip: Clip, method: Method, compression: int, backward: bool, architecture: Mapping[str, Any], device: torch.device
) -> Callable[[], Tensor]:
    """One pass through the camera branch of one block; returns what it adds to the block."""
    torch.manual_seed(3)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, head_dim = branch_heads(architecture["num_attention_heads"], architecture["attention_head_dim"], compression)
    width = heads * head_dim * compression
    encoding = make_encoding(method.encoding, head_dim, {}, method.config.translation_scale)
    with torch.device(device):
        branch = CameraAttention(width, heads, encoding).to(dtype)
    speak([branch])
    cameras, (frames, rows, columns) = latent_cameras(clip.cameras(), 4).to(device), clip.grid
    plan = encoding.plan(cameras, (rows, columns)).to(dtype=torch.float32)
    condition = CameraCondition(cameras, (rows, columns), made_by={}, samples=1, plan=plan)
    hidden, gradient = torch.randn(2, 1, frames * rows * columns, width, device=device, dtype=dtype)
    leaves = [hidden.requires_grad_(), *branch.parameters()]

    def run() -> Tensor:
        with branch_attention(method.attention), torch.set_grad_enabled(backward):
            out = branch.camera_output(hidden, condition)
            if backward:
                torch.autograd.grad(out, leaves, gradient)
            return out.detach()

    return run


def branch_rows(
    clip: Clip, compression: int, backward: bool, architecture: Mapping[str, Any], device: torch.device, repeats: int
) -> list[Row]:
    """One branch under every method, taking turns; ours must add what the paper's way adds."""
    methods = METHODS[1:]
    runs = {m: one_branch(clip, m, compression, backward, architecture, device) for m in methods}
    outputs = {method: run() for method, run in runs.items()}
    difference = relative_difference(outputs[OURS], outputs[PAPERS])
    if not difference < 0.02:  # nor where both are zero
        raise SystemExit(f"{clip.name}, C = {compression}: our branch differs from the paper's way by {difference:.3f}")
    del outputs
    peaks_gib = {}
    for method, run in runs.items():
        run()
        forget_peak(device)
        before = peak_gib(device)
        run()
        peaks_gib[method] = peak_gib(device) - before
    times: dict[Method, list[float]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method, run in runs.items():
            times[method].append(timed(run, device))
    return with_ratios([branch_row(clip, m, compression, backward, times[m], peaks_gib[m]) for m in methods])


def branch_row(clip: Clip, method: Method, compression: int, backward: bool, seconds: list[float], peak: float) -> Row:
    timing = spread("branch", seconds)
    return {
        "what": "branch",
        "method": method.name,
        "clip": clip.name,
        "compression": compression,
        "direction": "forward+backward" if backward else "forward",
        **timing,
        "clips_per_s": 1 / timing["branch_s"],
        "peak_memory_gib": peak,  # beyond weights, plan and input
    }
