# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, no-untyped-call, misc"
"""Gradients of a plan's tables, for encodings that learn what the tables hold (a depth: RayRoPE, CRePE).

A map takes x to out[channel] = Σ sign · gate · coefficient · x[source], so the gradient of a coefficient is the sum of
sign · gate · grad[channel] · x[source] over the terms that use it, over the heads, and over the tokens, samples and
query cameras that share its table row. `add_uses` adds that for one map to a flat float32 gradient of the map's side.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from merope.attention.kernels.channel_maps import EntryMap, SideLayout, SideTables
from merope.attention.kernels.prepared import made_once, map_terms, side_layouts
from merope.attention.kernels.transforms import OF_TOKENS, channel_strides, heads_per_program, load_tap, table_row
from merope.attention.plan import AttentionPlan

USES_AT_ONCE = 2  # an entry of a phasor has two; matrices that are tiled over many channels have more
COUNTS = ("all_tokens", "camera_stride", "first_sample", "heads", "uses", "first_camera", "cameras")
"""Kernel arguments that are not compiled in: there would be a kernel for every clip."""
STRIDES = ("grad_batch", "grad_camera", "grad_head", "grad_token", "x_batch", "x_head", "x_token")


@dataclass(frozen=True)
class TablePart:
    """Where the gradient of one table lies in the flat gradient of its side."""

    start: int
    shape: torch.Size


@dataclass(frozen=True, eq=False)
class LearnedTables:
    """Which tables of a plan require gradients, and where the maps of its `PreparedPlan` use them (None: nowhere)."""

    turn: EntryMap | None
    back: EntryMap | None
    key: EntryMap | None
    value: EntryMap | None
    query_parts: tuple[TablePart, ...]  # in the order of blocks
    key_parts: tuple[TablePart, ...]
    query_numbers: int  # of the flat gradients
    key_numbers: int


@dataclass(frozen=True, eq=False)
class TableGradients:
    """Gradients of a plan's tables while they are added up."""

    learned: LearnedTables
    query: Tensor  # float32 [numbers], flat as `SideLayout` says
    key: Tensor  # float32 [numbers]

    @classmethod
    def zeros(cls, learned: LearnedTables, device: torch.device) -> Self:
        sizes = (learned.query_numbers, learned.key_numbers)
        return cls(learned, *(torch.zeros(size, dtype=torch.float32, device=device) for size in sizes))

    def by_table(self) -> list[Tensor]:
        """Views of the sums, for the tables in the order of `learned_tables`."""
        sides = ((self.query, self.learned.query_parts), (self.key, self.learned.key_parts))
        return [flat[part.start :][: part.shape.numel()].view(part.shape) for flat, parts in sides for part in parts]


def learned_tables(plan: AttentionPlan) -> tuple[LearnedTables, list[Tensor]]:
    """Where the tables that require gradients are used, and these tables: the query side's, then the key side's."""
    tables = [operator.table for layout in side_layouts(plan) for operator in layout.operators]
    learned = made_once("learned tables", plan, lambda: _learned(plan))
    return learned, [table for table in tables if table.requires_grad]


def _learned(plan: AttentionPlan) -> LearnedTables:
    queries, keys = side_layouts(plan)
    terms = map_terms(plan)
    query_parts, key_parts = _parts(queries), _parts(keys)
    return LearnedTables(
        turn=queries.entry_map(terms.turn, plan.device),
        back=queries.entry_map(terms.back, plan.device),
        key=keys.entry_map(terms.key, plan.device),
        value=keys.entry_map(terms.value, plan.device),
        query_parts=query_parts,
        key_parts=key_parts,
        query_numbers=queries.shared_numbers + queries.grouped_numbers if query_parts else 0,
        key_numbers=keys.shared_numbers + keys.grouped_numbers if key_parts else 0,
    )


def _parts(layout: SideLayout) -> tuple[TablePart, ...]:
    tables = enumerate(operator.table for operator in layout.operators)
    return tuple(TablePart(layout.gradient_start(at), table.shape) for at, table in tables if table.requires_grad)


def add_uses(
    grad: Tensor,  # [B, cameras, H, N, W] of the map's output, last dimension dense
    x: Tensor,  # [B, H, N, source width] that the map was applied to, last dimension dense
    entries: EntryMap | None,
    tables: SideTables,
    first_sample: int,
    cameras: range,
    out: Tensor,  # float32 [numbers], flat gradient of the side
) -> None:
    """Add to `out` the gradients of the coefficients of one map, of samples first_sample … and the given query cameras.

    A row that belongs to one token of one sample is added to by one program, always in the same order. Rows that
    tokens or samples share, and tables by head, are added to in any order: their last bits may differ between runs.
    """
    if entries is None:
        return
    batch, heads, tokens, _ = x.shape
    uses, _, count = entries.index.shape
    padded = triton.next_power_of_2(count)
    _add_uses[(tokens, batch)](
        *(grad, x, out, tables.rows, tables.has_camera, entries.index, entries.weight, entries.strides),
        *(tables.rows.stride(0), tables.has_camera.stride(0) if tables.has_camera.shape[0] > 1 else 0),
        *(first_sample, heads, uses),
        *(cameras.start, len(cameras), *grad.stride()[:4], *x.stride()[:3]),
        ENTRIES=count,
        PADDED=padded,
        USES=min(triton.next_power_of_2(uses), USES_AT_ONCE),
        HEADS=heads_per_program(heads, entries.per_head),
        GATED=entries.gated,
        PER_HEAD=entries.per_head,
        num_warps=min(max(padded // 32, 1), 16),  # a lane per entry
    )


@triton.jit(do_not_specialize=(*COUNTS, *STRIDES), do_not_specialize_on_alignment=("grad", "x", *OF_TOKENS))
def _add_uses(
    grad, x, out,
    rows, has_camera, index, weight, strides, all_tokens, camera_stride, first_sample, heads, uses,
    first_camera, cameras,
    grad_batch, grad_camera, grad_head, grad_token, x_batch, x_head, x_token,
    ENTRIES: tl.constexpr, PADDED: tl.constexpr, USES: tl.constexpr, HEADS: tl.constexpr,
    GATED: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """One token of all heads, some heads and some uses of every entry at a time: tensors are [HEADS, PADDED].

    Every lane reads what its entry needs and holds it for all heads: nothing crosses threads.
    """
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sample = first_sample + batch
    entry = tl.arange(0, PADDED)[None, :]
    keep = entry < ENTRIES
    line, row, by_sample, by_head, head_groups, by_camera = channel_strides(strides, entry, keep, ENTRIES)
    posed = tl.load(has_camera + sample * camera_stride + token).to(tl.float32)
    for first_use in range(0, uses, USES):
        users = ()
        for use in tl.static_range(USES):
            users += (load_tap(index, weight, entry, keep & (first_use + use < uses), first_use + use, ENTRIES, GATED),)
        for first_head in range(0, heads, HEADS):
            head = (first_head + tl.arange(0, HEADS))[:, None]
            there = keep & (head < heads)
            offset = users[0][2] + table_row(
                rows, sample, token, keep, all_tokens, head, heads, line, row, by_sample, by_head, head_groups, PER_HEAD
            )
            values = ()
            for use in tl.static_range(USES):
                source, _, _, without, change = users[use]
                factor = without + change * posed if GATED else without
                value = tl.load(
                    x + batch * x_batch + token * x_token + (head * x_head + source),
                    mask=there & (source >= 0),
                    other=0.0,
                )
                values += (value.to(tl.float32) * factor,)
            read = grad + batch * grad_batch + token * grad_token
            write = out + (offset + first_camera * by_camera)
            for _ in range(cameras):
                total = tl.zeros((HEADS, PADDED), tl.float32)
                for use in tl.static_range(USES):
                    channel = users[use][1]
                    received = tl.load(read + (head * grad_head + channel), mask=there & (channel >= 0), other=0.0)
                    total += values[use] * received.to(tl.float32)
                if PER_HEAD:
                    tl.atomic_add(write, total, mask=there, sem="relaxed")
                else:
                    tl.atomic_add(write, tl.sum(total, 0, keep_dims=True), mask=keep, sem="relaxed")
                read += grad_camera
                write += by_camera
