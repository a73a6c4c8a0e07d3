"""Plain attention and MeRoPE's, forward and backward, once each: something for a profiler to look at.

    ncu --clock-control none --set full -k regex:"attend_bf16|gradients_bf16|fprop|bprop" python benchmarks/launches.py

Counters that were read so are in benchmarks/results/counters-h200.json, and in docs/kernels.md in words.
"""

import argparse

import torch
from attention import HEAD_DIM, HEADS, SHAPES, driving_cameras
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import merope


def main() -> None:
    """Launch every kernel once, cuDNN's first."""
    parser = argparse.ArgumentParser(description="launch plain attention and MeRoPE's once each")
    parser.add_argument("--shape", choices=SHAPES, default="1 × 31 × 22×40")
    options = parser.parse_args()
    batch, cameras, rows, columns = SHAPES[options.shape]
    plan = merope.encoding("merope", head_dim=HEAD_DIM).plan(driving_cameras(batch, cameras, "cuda"), (rows, columns))
    size = (batch, plan.query_tokens, HEADS, HEAD_DIM)
    *inputs, grad = (torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    plain = [x.contiguous().requires_grad_() for x in inputs]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(*plain)
    torch.autograd.grad(out, plain, grad.contiguous())
    turned = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.grad(merope.attend(*turned, plan, backend="fused"), turned, grad)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
