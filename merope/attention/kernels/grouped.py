"""Attention whose keys and values differ between query cameras: expand a chunk of cameras, attend, drop.

`grouped_attention_forward` and `grouped_attention_backward` are the seam for other kernels: turned queries and plain
keys and values in, attended values and log-sum-exp out, in the channels that a `PreparedPlan` carries.
"""

import torch
from torch import Tensor

from merope.attention.kernels.chunks import Chunk, camera_chunks
from merope.attention.kernels.prepared import PreparedPlan
from merope.attention.kernels.softmax_attention import attention_backward, attention_forward
from merope.attention.kernels.table_gradients import TableGradients, add_uses
from merope.attention.kernels.transforms import expand, reduce


def grouped_attention_forward(
    turned: Tensor,  # [B, groups · P, H, W] queries after Oᵀ
    k: Tensor,  # [B, H, Nk, d]
    v: Tensor,  # [B, H, Nk, d]
    maps: PreparedPlan,
    scale: float,
    memory_budget: int,  # bytes
) -> tuple[Tensor, Tensor]:  # [B, groups · P, H, W], float32 [B · groups, H, P]
    """Attended values before O, and the log-sum-exp of every query."""
    chunks = list(camera_chunks(k, maps, memory_budget, backward=False))
    by_camera = turned.view(-1, maps.tokens_per_group, *turned.shape[2:])
    if len(chunks) == 1:
        keys, values = _expanded(k, v, maps, chunks[0])
        out, lse = attention_forward(by_camera.transpose(1, 2), keys, values, scale)
        return out.transpose(1, 2).reshape(turned.shape), lse
    attended = torch.empty_like(by_camera)
    lse = turned.new_empty((by_camera.shape[0], turned.shape[2], maps.tokens_per_group), dtype=torch.float32)
    for chunk in chunks:
        keys, values = _expanded(k, v, maps, chunk)
        out, lse[chunk.pairs] = attention_forward(by_camera[chunk.pairs].transpose(1, 2), keys, values, scale)
        attended[chunk.pairs] = out.transpose(1, 2)
        del keys, values, out  # before the next chunk is expanded
    return attended.view_as(turned), lse


def grouped_attention_backward(
    grad: Tensor,  # [B, groups · P, H, W] of the attended values
    turned: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Tensor,  # [B, groups · P, H, W]
    lse: Tensor,  # [B · groups, H, P]
    maps: PreparedPlan,
    scale: float,
    memory_budget: int,
    of_tables: TableGradients | None,
) -> tuple[Tensor, Tensor]:  # [B, groups · P, H, W], [2, B, Nk, H, d]
    """Gradients of the turned queries, and of keys and values as they came; those of key tables go to `of_tables`."""
    chunks = list(camera_chunks(k, maps, memory_budget, backward=True))
    split = any(len(chunk.cameras) < maps.groups for chunk in chunks)
    batch, heads, tokens, head_dim = k.shape
    dtype = torch.float32 if split else k.dtype  # sums over chunks are rounded once, at the end
    gradients = torch.empty((2, batch, tokens, heads, head_dim), dtype=dtype, device=k.device)
    by_camera = [x.view(-1, maps.tokens_per_group, *x.shape[2:]) for x in (grad, turned, attended)]
    grad_turned = torch.empty_like(by_camera[1])
    for chunk in chunks:
        some_grad, queries, out = (x[chunk.pairs].transpose(1, 2) for x in by_camera)
        keys, values = _expanded(k, v, maps, chunk)
        grads = attention_backward(some_grad, queries, keys, values, out, lse[chunk.pairs], scale)
        grad_turned[chunk.pairs] = grads[0].transpose(1, 2)
        _collect(grads[1:], gradients[:, chunk.samples], maps, chunk)
        if of_tables is not None:
            _collect_tables(grads[1:], k, v, maps, chunk, of_tables)
        del keys, values, grads
    return grad_turned.view_as(turned), gradients.to(k.dtype)


def _expanded(k: Tensor, v: Tensor, maps: PreparedPlan, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Keys and values as the cameras of a chunk see them, each [pairs, H, Nk, W]."""
    where = (maps.key_tables, chunk.samples.start, chunk.cameras)
    keys = expand(k[chunk.samples], maps.key, *where)
    values = expand(v[chunk.samples], maps.value, *where)
    return keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1).transpose(1, 2)


def _collect(
    grads: tuple[Tensor, ...],  # of keys and values, each [pairs, H, Nk, W]
    out: Tensor,  # [2, samples, Nk, H, d]
    maps: PreparedPlan,
    chunk: Chunk,
) -> None:
    """Kᵀ of every camera's gradient, summed: written by the first chunk of a sample, added by the others."""
    where = (maps.key_tables, chunk.samples.start, chunk.cameras)
    for grad, channel_map, target in zip(grads, (maps.key, maps.value), out, strict=True):
        by_sample = grad.unflatten(0, (-1, len(chunk.cameras)))
        reduce(by_sample, channel_map, *where, out=target, add=chunk.cameras.start > 0)


def _collect_tables(
    grads: tuple[Tensor, ...],  # of keys and values, each [pairs, H, Nk, W]
    k: Tensor,
    v: Tensor,
    maps: PreparedPlan,
    chunk: Chunk,
    of_tables: TableGradients,
) -> None:
    """What the cameras of a chunk add to the gradients of key tables."""
    entries = (of_tables.learned.key, of_tables.learned.value)
    where = (maps.key_tables, chunk.samples.start, chunk.cameras)
    for grad, x, used in zip(grads, (k, v), entries, strict=True):
        by_sample = grad.unflatten(0, (-1, len(chunk.cameras)))
        add_uses(by_sample, x[chunk.samples], used, *where, out=of_tables.key)
