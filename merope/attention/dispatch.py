"""attend: one call for every encoding and every backend."""

import logging
from typing import Literal

import torch
from torch import Tensor

from merope.attention.kernels.support import why_not_fused
from merope.attention.length_clamp import with_clamped_lengths
from merope.attention.plan import AttentionPlan
from merope.attention.reference import attend_reference
from merope.attention.sdpa import attend_sdpa
from merope.errors import invalid

Backend = Literal["auto", "reference", "sdpa", "fused"]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_logger = logging.getLogger("merope")
_told: set[str] = set()


def attend(
    q: Tensor,  # [B, H, Nq, d]
    k: Tensor,  # [B, H, Nk, d]
    v: Tensor,  # [B, H, Nk, d]
    plan: AttentionPlan,
    backend: Backend = "auto",
    memory_budget: int = 2**30,  # bytes
) -> Tensor:  # [B, H, Nq, d]
    """Geometry-aware attention (paper, Eq. 1) under a plan made by `Encoding.plan`.

    Backends: "reference" (dense, the definition), "sdpa" (PyTorch's fused attention, any device), "fused" (Triton
    kernels around it, NVIDIA GPUs), "auto" ("fused" where it runs, else "sdpa"; the logger "merope" says once why). A
    named backend never falls back to another. `memory_budget` bounds what "sdpa" allocates beyond inputs, plan and
    output, and what "fused" allocates for keys and values as the query cameras see them.
    The result has the dtype of q; transforms run in float32, or in float64 for float64 input.
    """
    _check_tensors(q, k, v, plan)
    if not isinstance(memory_budget, int) or memory_budget <= 0:
        raise invalid("memory_budget", "a positive int, in bytes", repr(memory_budget), "2**30 is 1 GiB")
    if backend not in ("auto", "reference", "sdpa", "fused"):
        raise invalid("backend", '"auto", "reference", "sdpa" or "fused"', repr(backend), 'use "auto"')
    with torch.autocast(q.device.type, enabled=False):  # the dtype of q was chosen by the caller
        if plan.clamps_lengths:
            q, k, v = with_clamped_lengths(q, k, v, plan)
        if backend == "reference":
            return attend_reference(q, k, v, plan)
        if backend == "fused" or (backend == "auto" and _picks_fused(q, k, plan, memory_budget)):
            reason = why_not_fused(q, plan)
            if reason is not None:
                raise invalid("backend", '"auto", "sdpa" or "reference" here', '"fused"', reason)
            from merope.attention.fused import attend_fused

            return attend_fused(q, k, v, plan, memory_budget)
        return attend_sdpa(q, k, v, plan, memory_budget)


def _picks_fused(q: Tensor, k: Tensor, plan: AttentionPlan, memory_budget: int) -> bool:
    """Whether "auto" is "fused"; says why not, once per reason."""
    reason = why_not_fused(q, plan) if q.is_cuda else f"the tensors are on {q.device}, its kernels need a CUDA GPU"
    if reason is None and not _fits(q, k, plan, memory_budget):
        reason = "one query camera does not fit its memory budget"
    if reason is not None and not torch.compiler.is_compiling() and reason not in _told:
        _told.add(reason)
        _logger.log(logging.WARNING if q.is_cuda else logging.INFO, 'backend "auto" is "sdpa", not "fused": %s', reason)
    return reason is None


def _fits(q: Tensor, k: Tensor, plan: AttentionPlan, memory_budget: int) -> bool:
    """Whether "fused" keeps to a memory budget: always where nothing is expanded."""
    from merope.attention.fused import bytes_needed

    return bytes_needed(q, k, plan, torch.is_grad_enabled()) <= memory_budget


def make_ready(plan: AttentionPlan, dtype: torch.dtype) -> None:
    """Make now what backend "auto" will keep on a plan, for inputs of a dtype on its device.

    `attend` does so at its first call, but not inside a graph of torch.compile.
    """
    like = torch.empty(0, dtype=dtype, device=plan.device)
    if like.is_cuda and why_not_fused(like, plan) is None:
        from merope.attention import fused

        fused.make_ready(like, plan)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
    if not isinstance(plan, AttentionPlan):
        fix = "make one with merope.encoding(name, head_dim=…).plan(cameras, grid)"
        raise invalid("plan", "an AttentionPlan", type(plan).__name__, fix)
    plan_batch = plan.batch
    for name, x, tokens in (("q", q, plan.query_tokens), ("k", k, plan.key_tokens), ("v", v, plan.key_tokens)):
        if not isinstance(x, Tensor) or x.ndim != 4 or 0 in x.shape:
            expected = "[batch, heads, tokens, head_dim] and not empty"
            raise invalid(name, expected, list(getattr(x, "shape", [type(x).__name__])), "split the heads first")
        if x.dtype not in FLOATS or x.dtype != q.dtype:
            raise invalid(name, f"floating point, of one dtype with q ({q.dtype})", x.dtype, "cast q, k and v alike")
        if x.device != plan.device:
            raise invalid(name, f"on the plan's device {plan.device}", x.device, f"use plan.to({str(x.device)!r})")
        if x.shape[2] != tokens:
            fix = "the plan's cameras × grid, plus extra tokens, must be the sequence"
            raise invalid(name, f"of the plan's {tokens} tokens", x.shape[2], fix)
        if x.shape[3] != plan.head_dim:
            fix = f"make the encoding with head_dim={x.shape[3]}"
            raise invalid(name, f"of the plan's head_dim {plan.head_dim}", x.shape[3], fix)
        if x.shape[:2] != q.shape[:2]:
            raise invalid(name, f"of q's batch and heads {list(q.shape[:2])}", list(x.shape[:2]), "repeat k and v")
        if plan_batch not in (1, x.shape[0]):
            fix = "plan for the cameras of every sample"
            raise invalid(name, f"a batch of the plan's {plan_batch} clips", x.shape[0], fix)
