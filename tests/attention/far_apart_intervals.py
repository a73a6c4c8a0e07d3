"""Attention in parts where the scores of one interval of keys are far above those of the other."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from merope import AttentionPlan, Visibility
from merope.attention.kernels.interval_calls import Call
from merope.attention.kernels.merged_parts import attend_in_parts, gradients_in_parts
from merope.attention.operators import Operator, phasors
from merope.attention.plan import Block
from merope.attention.visible_cameras import key_ranges
from merope.encodings.rotary import rotary_phases
from tests.gpu.errors import DEVICE, relative_errors, results

NATS = 200.0


def rotary(
    sees: Visibility, grid: tuple[int, int] = (1, 1), batch: int = 1, widths: tuple[int, int, int] = (8, 4, 4)
) -> AttentionPlan:
    """As Wan's own causal attention: values are not turned, and keys are the same for all cameras."""
    cameras, tokens = len(sees.intervals), grid[0] * grid[1]
    axes = [torch.arange(count, dtype=torch.float64, device=DEVICE) for count in (batch * cameras, *grid)]
    positions = torch.cartesian_prod(*axes).unflatten(0, (batch, cameras * tokens))
    phases = rotary_phases(positions, widths, 10000.0)
    query, key = (Operator(phasors(sign * phases)[:, None, None], "phasor") for sign in (-1, 1))
    return AttentionPlan(
        head_dim=sum(widths),
        blocks=(Block("native", 0, sum(widths), query, key, camera=False),),
        query_cameras=cameras,
        tokens_per_camera=tokens,
        query_has_camera=torch.ones(1, cameras * tokens, dtype=torch.bool, device=DEVICE),
        key_has_camera=torch.ones(1, cameras * tokens, dtype=torch.bool, device=DEVICE),
        transform_values=False,
        visible_keys=key_ranges(sees, cameras, cameras, tokens, 0, 0),
    )


def errors_far_apart(
    plan: AttentionPlan, dtype: torch.dtype, second_is_higher: bool
) -> tuple[list[float], list[float]]:
    """Relative errors of output and gradients, ours and plain PyTorch's with a mask. Nothing is turned.

    plan: of clean and noisy cameras, as many.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (2, 2, plan.query_tokens, plan.head_dim)
    q, k, v, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    q[..., 0] = plan.head_dim**0.5  # so that a key's first channel is added to its scores
    half = plan.key_tokens // 2
    k[:, :, :half, 0] = 0.0 if second_is_higher else NATS
    k[:, :, half:, 0] = NATS if second_is_higher else 0.0
    inputs = [x.to(DEVICE, dtype) for x in (q, k, v, grad)]
    mask = torch.stack([plan.seen_by(token) for token in range(plan.query_tokens)])

    def plain(*x: Tensor) -> Tensor:
        return scaled_dot_product_attention(*x, attn_mask=mask)

    exact = results(plain, [x.double() for x in inputs[:3]], inputs[3])
    ours = attended_in_parts(plan, *inputs)
    return relative_errors(ours, exact), relative_errors(results(plain, inputs[:3], inputs[3]), exact)


def attended_in_parts(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    q, k, v, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, grad))  # as they lie elsewhere
    scale = plan.head_dim**-0.5
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device=q.device)
    attend_in_parts(q, k, v, plan.runs, scale, out.transpose(1, 2), lse)
    of_q, of_keys = torch.full_like(q, torch.nan), [torch.zeros(x.shape, device=x.device) for x in (k, v)]

    def collect(calls: Sequence[Call], grads: Sequence[tuple[Tensor, Tensor]]) -> None:
        for call, both in zip(calls, grads, strict=True):
            for total, each in zip(of_keys, both, strict=True):
                total[:, :, call.keys] += each

    gradients_in_parts(grad, q, k, v, out, lse, plan.runs, scale, of_q, collect)
    return [out, of_q, *(x.to(k.dtype) for x in of_keys)]
