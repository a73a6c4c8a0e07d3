"""A stranger's CPU, the option `--strangers-cpu` of the test suite.

Two products of different shapes may agree to the last bit on one processor and differ on another, where the linear
algebra library chooses other kernels. Here the CPU kernels of PyTorch are replaced by ones that add up their terms in
an order drawn from the shapes of the operands. A comparison to the last bit then holds only where the very same
computation ran twice, or where nothing was added up.

The kernels are replaced for the whole process: in every thread, in backward passes, and in the products that compiled
code calls. New Python processes, NumPy and gradients of convolutions are as they were. Tests that cannot bear it are
marked `usual_sums`, with the reason.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]


@contextmanager
def strangers_cpu() -> Iterator[None]:
    """Add up in a stranger's order while the context is open."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, reordered in REORDERED.items():
            _replace(library, name, reordered)
    try:
        yield
    finally:
        library._destroy()


def _replace(library: torch.library.Library, name: str, reordered: Callable[..., Any]) -> None:
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: torch.DispatchKeySet, *args: Any, **options: Any) -> Any:
        return reordered(lambda *args, **options: original.call_boxed(keys, *args, **options), *args, **options)

    library.impl(name, kernel, "CPU", with_keyset=True)


@cache
def _order(terms: int, *shapes: torch.Size) -> Tensor:  # [terms] int64
    """Return the order in which operands of these shapes add up `terms` terms."""
    order = list(range(terms))
    random.Random(hash(shapes)).shuffle(order)
    return torch.tensor(order, dtype=torch.int64)


def _taken(terms: Tensor, dim: int, order: Tensor) -> Tensor:
    """Return the terms in this order, with their strides, on which compiled code relies."""
    if terms.shape[dim] != len(order):
        return terms  # shapes that do not fit are the kernel's to refuse
    taken = terms.index_select(dim, order)
    return taken if terms.is_contiguous() else torch.empty_like(terms).copy_(taken)


def _product(original: Kernel, *args: Tensor, **options: Any) -> Tensor:
    *added, left, right = args
    order = _order(left.shape[-1], left.shape, right.shape)
    return original(*added, _taken(left, -1, order), _taken(right, max(right.ndim - 2, 0), order), **options)


def _reordered(terms: Tensor, dims: list[int] | None) -> Tensor:
    if terms.ndim > 0:
        for dim in dims or range(terms.ndim):
            terms = _taken(terms, dim, _order(terms.shape[dim], terms.shape))
    return terms


def _sum(original: Kernel, terms: Tensor, dims: list[int] | None = None, *rest: Any, **options: Any) -> Tensor:
    return original(_reordered(terms, dims), dims, *rest, **options)


def _norm(
    original: Kernel, terms: Tensor, power=2, dims: list[int] | None = None, *rest: Any, **options: Any
) -> Tensor:
    return original(_reordered(terms, dims), power, dims, *rest, **options)


def _attention(
    original: Kernel, query: Tensor, key: Tensor, value: Tensor, dropout=0.0, causal=False, *, attn_mask=None, **options
) -> tuple[Tensor, Tensor]:
    channels = _order(query.shape[-1], query.shape, key.shape)
    query, key = _taken(query, -1, channels), _taken(key, -1, channels)
    if not causal:
        tokens = _order(key.shape[-2], query.shape, key.shape)
        key, value = _taken(key, -2, tokens), _taken(value, -2, tokens)
        if attn_mask is not None and attn_mask.shape[-1] > 1:
            attn_mask = _taken(attn_mask, -1, tokens)
    return original(query, key, value, dropout, causal, attn_mask=attn_mask, **options)


def _attention_backward(original: Kernel, of_output: Tensor | None, query: Tensor, key: Tensor, *rest, **options):
    if of_output is None:  # no gradient arrived
        return original(of_output, query, key, *rest, **options)
    order = _order(query.shape[-1], query.shape, key.shape)
    of_query, of_key, of_value = original(of_output, _taken(query, -1, order), _taken(key, -1, order), *rest, **options)
    return _taken(of_query, -1, order.argsort()), _taken(of_key, -1, order.argsort()), of_value


def _convolution(original: Kernel, image: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *_, transposed, _, groups = rest
    if groups == 1:
        order = _order(image.shape[1], image.shape, weight.shape)
        image, weight = _taken(image, 1, order), _taken(weight, 0 if transposed else 1, order)
    return original(image, weight, bias, *rest)


REORDERED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mm.out", "bmm.out", "addmm.out", "baddbmm.out"), _product),
    **dict.fromkeys(("mv", "dot"), _product),
    **dict.fromkeys(("sum.dim_IntList", "mean.dim"), _sum),
    "linalg_vector_norm": _norm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "convolution": _convolution,
}
