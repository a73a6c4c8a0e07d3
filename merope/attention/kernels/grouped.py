"""Attention whose keys and values differ between query cameras: expand a chunk of cameras, attend, drop.

`grouped_attention_forward` and `grouped_attention_backward` are the seam for other kernels: turned queries and plain
keys and values in, attended values and log-sum-exp out, in the channels that a `PreparedPlan` carries.

Where a plan says what is seen, a chunk has cameras that see the same keys, and these alone are expanded. Keys that all
cameras share are turned once, and attended to in parts (`merope.attention.kernels.merged_parts`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from merope.attention.kernels.channel_maps import ChannelMap, SideTables
from merope.attention.kernels.chunks import Chunk, camera_chunks
from merope.attention.kernels.interval_calls import Call, held_together, interval_calls, segments
from merope.attention.kernels.merged_parts import attend_in_parts, gradients_in_parts
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
    if len(chunks) == 1 and not chunks[0].parts:
        keys, values = _expanded(k, v, maps, chunks[0])
        out, lse = attention_forward(chunks[0].of(by_camera).transpose(1, 2), keys, values, scale)
        return out.transpose(1, 2).reshape(turned.shape).contiguous(), lse
    attended = torch.empty_like(by_camera)
    shape = (*by_camera.shape[:2], turned.shape[2], maps.tokens_per_group)
    lse = turned.new_empty(shape, dtype=torch.float32)
    for chunk in chunks:
        keys, values = _expanded(k, v, maps, chunk)
        queries = chunk.of(by_camera).transpose(1, 2)
        if chunk.parts:
            attend_in_parts(queries, keys, values, chunk.parts, scale, chunk.of(attended), chunk.of(lse))
        else:
            out, some_lse = attention_forward(queries, keys, values, scale)
            chunk.put(attended, out.transpose(1, 2))
            chunk.put(lse, some_lse)
            del out
        del keys, values  # before the next chunk is expanded
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
    make = torch.zeros if maps.runs and maps.groups > 1 else torch.empty
    dtype = torch.float32 if split else k.dtype
    gradients = make((2, batch, tokens, heads, head_dim), dtype=dtype, device=k.device)
    by_camera = [x.unflatten(1, (maps.groups, -1)) for x in (grad, turned, attended)]
    grad_turned, by_camera_lse = torch.empty_like(by_camera[1]), lse.unflatten(0, (-1, maps.groups))
    for chunk in chunks:
        some_grad, queries, out = (chunk.of(x).transpose(1, 2) for x in by_camera)
        keys, values = _expanded(k, v, maps, chunk)
        some_lse = chunk.of(by_camera_lse).contiguous()  # cuDNN does not heed its strides
        if chunk.parts:
            sums = _KeySums(k, v, gradients[:, chunk.samples], maps, chunk, of_tables)
            of_queries = chunk.of(grad_turned).transpose(1, 2)
            given = (some_grad, queries, keys, values, out, some_lse)
            gradients_in_parts(*given, chunk.parts, scale, of_queries, sums.add)
            sums.finish()
            del sums
        else:
            grads = attention_backward(some_grad, queries, keys, values, out, some_lse, scale)
            chunk.put(grad_turned, grads[0].transpose(1, 2))
            add = chunk.cameras.start > 0 or (split and bool(maps.runs))
            _collect(grads[1:], gradients[:, chunk.samples], maps, chunk, add)
            if of_tables is not None:
                _collect_tables(grads[1:], k, v, maps, chunk, of_tables)
            del grads
        del keys, values
    return grad_turned.view_as(turned), gradients.to(k.dtype)


class _KeySums:
    """Kᵀ of the gradients of keys and values, added up over the calls of a chunk that is attended to in parts."""

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        out: Tensor,  # [2, samples, Nk, H, d] to write to
        maps: PreparedPlan,
        chunk: Chunk,
        of_tables: TableGradients | None,
    ) -> None:
        self.out, self.maps, self.chunk, self.of_tables = out, maps, chunk, of_tables
        self.inputs = [x[chunk.samples] for x in (k, v)]
        calls, tokens = interval_calls(chunk.parts), k.shape[2]
        self.segments = segments(calls, tokens)
        self.written: set[int] = set()  # numbers of segments
        once = len(list(held_together(calls, tokens))) == 1
        self.sums = out if once else torch.empty_like(out, dtype=torch.float32)

    def add(self, calls: Sequence[Call], grads: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Keys that are first seen are written, others added to. All calls that see a segment are read in one go."""
        for number, keys in enumerate(self.segments):
            seen = [(call.place_of(keys), grad) for call, grad in zip(calls, grads, strict=True) if call.sees_all(keys)]
            for side, channel_map in enumerate((self.maps.key, self.maps.value) if seen else ()):
                parts = [grad[side][:, None, :, place] for place, grad in seen]
                out, add = self.sums[side][:, keys], number in self.written
                reduce(parts, channel_map, *self._where(keys), out=out, add=add)
            self.written |= {number} if seen else set()
        if self.of_tables is not None:
            self._add_tables(calls, grads, self.of_tables)

    def finish(self) -> None:
        """Keys that nobody sees have a gradient of zero; sums are rounded."""
        for number, keys in enumerate(self.segments):
            if number not in self.written:
                self.sums[:, :, keys] = 0
        if self.sums is not self.out:
            self.out.copy_(self.sums)

    def _add_tables(
        self, calls: Sequence[Call], grads: Sequence[tuple[Tensor, Tensor]], of_tables: TableGradients
    ) -> None:
        entries = (of_tables.learned.key, of_tables.learned.value)
        for call, both in zip(calls, grads, strict=True):
            for grad, x, used in zip(both, self.inputs, entries, strict=True):
                add_uses(grad[:, None], x[:, :, call.keys], used, *self._where(call.keys), out=of_tables.key)

    def _where(self, keys: slice) -> tuple[SideTables, int, range]:
        return self.maps.key_tables.of_tokens(keys), self.chunk.samples.start, self.chunk.cameras


def _places(keys: tuple[slice, ...]) -> Iterator[tuple[slice, slice]]:
    """Where each interval of keys lies among all that are seen, and the interval."""
    start = 0
    for each in keys:
        stop = start + each.stop - each.start
        yield slice(start, stop), each
        start = stop


def _expanded(k: Tensor, v: Tensor, maps: PreparedPlan, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Keys and values as the cameras of a chunk see them, each [pairs, H, seen keys, W]."""
    in_place = maps.groups == 1 and maps.plain_values and _lies_well(v)
    values = v[chunk.samples] if in_place else _expanded_side(v, maps.value, maps, chunk)
    return _expanded_side(k, maps.key, maps, chunk), values


def _expanded_side(x: Tensor, channel_map: ChannelMap, maps: PreparedPlan, chunk: Chunk) -> Tensor:
    samples, count = x[chunk.samples].shape[0], sum(each.stop - each.start for each in chunk.keys)
    out = x.new_empty((samples, len(chunk.cameras), count, x.shape[1], maps.width))
    for place, tokens in _places(chunk.keys):
        where = (maps.key_tables.of_tokens(tokens), chunk.samples.start, chunk.cameras)
        expand(x[chunk.samples, :, tokens], channel_map, *where, out=out[:, :, place])
    return out.flatten(0, 1).transpose(1, 2)


def _lies_well(x: Tensor) -> bool:
    """Whether attention kernels take a view as it is: rows of its own that start at multiples of 16 bytes."""
    steps = [stride * x.element_size() for stride in x.stride()[:-1]]
    return x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


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
            reduce([by_sample[:, :, :, place]], channel_map, *where, out=target[:, tokens], add=add)


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
