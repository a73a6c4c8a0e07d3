"""PyTorch's own fused attention with its log-sum-exp, forward and backward as two separate calls.

A chunk of query cameras is attended to, its expanded keys and values are dropped, and the backward pass expands them
again. That needs the backward kernels themselves: the autograd of scaled_dot_product_attention would keep the chunk.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Kernel = Literal["cudnn", "flash", "efficient", "cpu"]


def kernel_for(x: Tensor, keys: int) -> Kernel:  # x [..., W]
    """cuDNN for half precision and up to 128 channels, FlashAttention up to 256, else memory-efficient attention.

    cuDNN takes no single key, which an interval of extra tokens may be.
    """
    if not x.is_cuda:
        return "cpu"
    if x.dtype == torch.float32 or x.shape[-1] > 256:
        return "efficient"
    # cuDNN's backward pass adds in any order; FlashAttention's heeds PyTorch's switch.
    cudnn = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return "cudnn" if x.shape[-1] <= 128 and keys > 1 and cudnn else "flash"


def attention_forward(
    q: Tensor,  # [B, H, Nq, W]
    k: Tensor,  # [B, H, Nk, W]
    v: Tensor,  # [B, H, Nk, W]
    scale: float,
) -> tuple[Tensor, Tensor]:  # [B, H, Nq, W], float32 [B, H, Nq]
    """softmax(q kᵀ · scale) v and the log of the softmax's denominators."""
    aten = torch.ops.aten
    kernel = kernel_for(q, k.shape[2])
    if kernel == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)[:2]
    elif kernel == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
    elif kernel == "efficient":
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    return out, lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]].contiguous()


def attention_backward(
    grad: Tensor,  # [B, H, Nq, W]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,  # [B, H, Nq]
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given what the forward pass returned."""
    aten = torch.ops.aten
    kernel = kernel_for(q, k.shape[2])
    queries, keys = q.shape[2], k.shape[2]
    no_dropout, not_causal = 0.0, False
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, q, k, v, out, lse[..., None], seed, seed, None, None, None),
            *(queries, keys, no_dropout, not_causal),
            scale=scale,
        )
    if kernel == "flash":
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse, None, None, queries, keys, no_dropout, not_causal),
            *(unused, unused),
            scale=scale,
        )
    if kernel == "efficient":
        padded = pad(lse, (0, -queries % 32), value=torch.inf)
        wanted = (True, True, True, False)
        return aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, padded, seed, seed, no_dropout, wanted, scale=scale
        )[:3]
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, no_dropout, not_causal, scale=scale
    )
