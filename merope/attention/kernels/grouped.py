"""Attention whose keys and values differ between query cameras: expand a chunk of cameras, attend, drop.

`grouped_attention_forward` and `grouped_attention_backward` are the seam for other kernels: turned queries and plain
keys and values in, attended values and log-sum-exp out, in the channels that a `PreparedPlan` carries.

Where a plan says what is seen, a chunk has cameras that see the same keys, and these alone are expanded. Keys that all
cameras share are turned once, and attended to run by run.
"""

from collections.abc import Iterator

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
    by_camera = turned.unflatten(1, (maps.groups, -1))
    if len(chunks) == 1:
        keys, values = _expanded(k, v, maps, chunks[0])
        out, lse = _attend(chunks[0].of(by_camera).transpose(1, 2), keys, values, chunks[0], scale)
        return out.transpose(1, 2).reshape(turned.shape).contiguous(), lse
    attended = torch.empty_like(by_camera)
    shape = (*by_camera.shape[:2], turned.shape[2], maps.tokens_per_group)
    lse = turned.new_empty(shape, dtype=torch.float32)
    for chunk in chunks:
        keys, values = _expanded(k, v, maps, chunk)
        out, some_lse = _attend(chunk.of(by_camera).transpose(1, 2), keys, values, chunk, scale)
        chunk.put(attended, out.transpose(1, 2))
        chunk.put(lse, some_lse)
        del keys, values, out  # before the next chunk is expanded
    return attended.view_as(turned), lse.flatten(0, 1)


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
    batch, heads, tokens, head_dim = k.shape
    # Sums over chunks are rounded once, at the end. Keys that no camera sees have a gradient of zero.
    split = any(len(chunk.cameras) < maps.groups for chunk in chunks)
    make = torch.zeros if maps.runs else torch.empty
    dtype = torch.float32 if split else k.dtype
    gradients = make((2, batch, tokens, heads, head_dim), dtype=dtype, device=k.device)
    by_camera = [x.unflatten(1, (maps.groups, -1)) for x in (grad, turned, attended)]
    grad_turned, by_camera_lse = torch.empty_like(by_camera[1]), lse.unflatten(0, (-1, maps.groups))
    for chunk in chunks:
        some_grad, queries, out = (chunk.of(x).transpose(1, 2) for x in by_camera)
        keys, values = _expanded(k, v, maps, chunk)
        some_lse = chunk.of(by_camera_lse).contiguous()  # cuDNN does not heed its strides
        grads = _gradients(some_grad, queries, keys, values, out, some_lse, chunk, scale)
        chunk.put(grad_turned, grads[0].transpose(1, 2))
        add = chunk.cameras.start > 0 or (split and bool(maps.runs))
        _collect(grads[1:], gradients[:, chunk.samples], maps, chunk, add)
        if of_tables is not None:
            _collect_tables(grads[1:], k, v, maps, chunk, of_tables)
        del keys, values, grads
    return grad_turned.view_as(turned), gradients.to(k.dtype)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, chunk: Chunk, scale: float
) -> tuple[Tensor, Tensor]:  # [pairs, H, P, W], float32 [pairs, H, P]
    if not chunk.parts:
        return attention_forward(q, keys, values, scale)
    some = [
        attention_forward(q[:, :, part.queries], part.seen(keys, 2), part.seen(values, 2), scale)
        for part in chunk.parts
    ]
    token_major = torch.cat([out.transpose(1, 2) for out, _ in some], dim=1)
    return token_major.transpose(1, 2), torch.cat([lse for _, lse in some], dim=2)


def _gradients(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, chunk: Chunk, scale: float
) -> tuple[Tensor, ...]:
    """Of q, of keys and of values."""
    if not chunk.parts:
        return attention_backward(grad, q, keys, values, out, lse, scale)
    grad_q, sums = [], [torch.zeros_like(x, dtype=torch.float32) for x in (keys, values)]
    for part in chunk.parts:
        own_grad, own_q, own_out, own_lse = (x[:, :, part.queries] for x in (grad, q, out, lse))
        seen = (part.seen(keys, 2), part.seen(values, 2))
        some = attention_backward(own_grad, own_q, *seen, own_out, own_lse.contiguous(), scale)
        grad_q.append(some[0])
        for total, each in zip(sums, some[1:], strict=True):
            for place, tokens in _places(part.keys):
                total[:, :, tokens] += each[:, :, place]
    return torch.cat(grad_q, dim=2), *sums


def _places(keys: tuple[slice, ...]) -> Iterator[tuple[slice, slice]]:
    """Where each interval of keys lies among all that are seen, and the interval."""
    start = 0
    for each in keys:
        stop = start + each.stop - each.start
        yield slice(start, stop), each
        start = stop


def _expanded(k: Tensor, v: Tensor, maps: PreparedPlan, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Keys and values as the cameras of a chunk see them, each [pairs, H, seen keys, W]."""
    samples, count = k[chunk.samples].shape[0], sum(each.stop - each.start for each in chunk.keys)
    shape = (samples, len(chunk.cameras), count, k.shape[1], maps.width)
    both = k.new_empty(shape), v.new_empty(shape)
    for out, x, channel_map in zip(both, (k, v), (maps.key, maps.value), strict=True):
        for place, tokens in _places(chunk.keys):
            where = (maps.key_tables.of_tokens(tokens), chunk.samples.start, chunk.cameras)
            expand(x[chunk.samples, :, tokens], channel_map, *where, out=out[:, :, place])
    return both[0].flatten(0, 1).transpose(1, 2), both[1].flatten(0, 1).transpose(1, 2)


def _collect(
    grads: tuple[Tensor, ...],  # of keys and values, each [pairs, H, seen keys, W]
    out: Tensor,  # [2, samples, Nk, H, d]
    maps: PreparedPlan,
    chunk: Chunk,
    add: bool,
) -> None:
    """Kᵀ of every camera's gradient, summed: written, or added to what is there."""
    for grad, channel_map, target in zip(grads, (maps.key, maps.value), out, strict=True):
        by_sample = grad.unflatten(0, (-1, len(chunk.cameras)))
        for place, tokens in _places(chunk.keys):
            where = (maps.key_tables.of_tokens(tokens), chunk.samples.start, chunk.cameras)
            reduce(by_sample[:, :, :, place], channel_map, *where, out=target[:, tokens], add=add)


def _collect_tables(
    grads: tuple[Tensor, ...],  # of keys and values, each [pairs, H, seen keys, W]
    k: Tensor,
    v: Tensor,
    maps: PreparedPlan,
    chunk: Chunk,
    of_tables: TableGradients,
) -> None:
    """What the cameras of a chunk add to the gradients of key tables."""
    entries = (of_tables.learned.key, of_tables.learned.value)
    for grad, x, used in zip(grads, (k, v), entries, strict=True):
        by_sample = grad.unflatten(0, (-1, len(chunk.cameras)))
        for place, tokens in _places(chunk.keys):
            where = (maps.key_tables.of_tokens(tokens), chunk.samples.start, chunk.cameras)
            add_uses(by_sample[:, :, :, place], x[chunk.samples, :, tokens], used, *where, out=of_tables.key)
