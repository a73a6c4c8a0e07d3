"""Where the fused backend runs. Imports no Triton, so that asking is possible everywhere."""

import os
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from merope.attention.kernels.interval_calls import held_together, interval_calls, keys_of
from merope.attention.plan import AttentionPlan
from merope.attention.visible_cameras import Run

WIDTH_UNIT = 8
"""Heads are carried with a multiple of this many channels: PyTorch's fused kernels take no others."""
TRITON_INSTALLED = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs kernels on the CPU, for tests."""
HALF_OR_SINGLE = (torch.bfloat16, torch.float16, torch.float32)


def why_not_fused(q: Tensor, plan: AttentionPlan) -> str | None:
    """Why the fused backend cannot take this call; None when it can."""
    if q.dtype not in HALF_OR_SINGLE:
        return f"it computes in bfloat16, float16 and float32, not in {q.dtype}"
    if torch.version.hip is not None:
        return "it is written for NVIDIA GPUs, this is a ROCm build of PyTorch"
    reason = _why_no_table_gradients(plan, q.shape[0]) if learns_tables(plan) else None
    if reason is not None:
        return reason
    if not TRITON_INSTALLED:
        return "Triton is not installed (it comes with PyTorch's CUDA builds for Linux)"
    if INTERPRETED and not q.is_cuda:
        return None
    if not q.is_cuda:
        return f"it needs a CUDA GPU, the tensors are on {q.device}"
    # Imported here: torch.compile's decorators take seconds to import, and most machines never come this far.
    from merope.attention.kernels.prepared import capability

    if capability(q.device.index) < 80:
        return f"it needs compute capability 8.0 (Ampere), this GPU has {capability(q.device.index) / 10}"
    return None


def _why_no_table_gradients(plan: AttentionPlan, samples: int) -> str | None:
    """Why the tables of a plan that require gradients cannot get them; None when they can."""
    learned = [operator for block in plan.blocks for operator in block.operators if operator.table.requires_grad]
    if any(operator.form == "quaternion" for operator in learned):
        return "its kernels give no gradient to tables of quaternions, and this plan's require one"
    shared = any(o.rows is not None or o.table.shape[1] > 1 or o.table.shape[0] < samples for o in learned)
    if shared and torch.are_deterministic_algorithms_enabled():
        several = "gradients of tables by head, and of rows that tokens or samples share"
        return f"deterministic algorithms are asked for, and it adds up {several}, in any order"
    return None


def learns_tables(plan: AttentionPlan) -> bool:
    """Whether a call under this plan is to give gradients to its tables."""
    return torch.is_grad_enabled() and any(
        operator.table.requires_grad for block in plan.blocks for operator in block.operators
    )


def carried_width(plan: AttentionPlan) -> int:
    """Channels carried through softmax: the head's, and a second copy of camera channels if keys without one exist."""
    second = sum(block.stop - block.start for block in plan.camera_blocks) if plan.has_cameraless_keys else 0
    return -(-(plan.head_dim + second) // WIDTH_UNIT) * WIDTH_UNIT


def has_plain_values(plan: AttentionPlan) -> bool:
    """Whether values go through softmax as they are."""
    return not plan.transform_values and carried_width(plan) == plan.head_dim


def bytes_per_camera(
    k: Tensor,  # [B, H, Nk, d]
    width: int,
    backward: bool,
    parts: Sequence[Run],
    values_in_place: bool,
) -> int:
    """Bytes of keys and values as one query camera of one sample sees them, and of their gradients.

    parts: runs of queries of one group, which see different keys; none: all see the same. Each interval that is
        attended to has gradients of its own. If not all of these are held at once, they are added up in float32.
    values_in_place: values are read where they lie, and only keys are turned.
    """
    _, heads, tokens, _ = k.shape
    turned, held, sums = (2 - values_in_place) * tokens, 2 * tokens * backward, 0
    if parts and backward:
        together = [keys_of(calls) for calls in held_together(interval_calls(parts), tokens)]
        held, sums = 2 * max(together), 2 * tokens * (len(together) > 1)
    return heads * width * ((turned + held) * k.element_size() + 4 * sums)


def bytes_per_camera_of(plan: AttentionPlan, k: Tensor, backward: bool) -> int:
    """As `bytes_per_camera`, of all that a plan is attended to with."""
    in_place = plan.groups == 1 and has_plain_values(plan)
    return bytes_per_camera(k, carried_width(plan), backward, runs_in_parts(plan), in_place)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 of the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def runs_in_parts(plan: AttentionPlan) -> tuple[Run, ...]:
    """The runs of a plan if queries for which keys are the same see different ones: all, or those without a camera."""
    if plan.visible_keys is None or (plan.groups > 1 and plan.cameraless_queries.numel() == 0):
        return ()
    return plan.runs
