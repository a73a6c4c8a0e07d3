"""Block operators as sparse maps between channels, in the form that one kernel reads.

Every transform of attention under a plan (Oᵀ on queries, K on keys and values, O on the output, and the transposes of
these for gradients) takes each channel of a token to a sum of at most four others. A `ChannelMap` lists those terms;
their coefficients stay in the tables of one side of the plan, laid end to end in `SideTables`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self

import torch
from torch import Tensor

from merope.attention.operators import Operator
from merope.attention.plan import AttentionPlan, Block
from merope.geometry.quaternions import matrix_from_quaternion


class Gate(Enum):
    """For which tokens a term counts, as its factor: first + second · (1 where the token has a camera, else 0)."""

    ALL = (1.0, 0.0)
    WITH_CAMERA = (0.0, 1.0)
    WITHOUT_CAMERA = (1.0, -1.0)


@dataclass(frozen=True)
class Term:
    """out[channel `out`] += sign · coefficient · x[channel `source`]."""

    out: int
    source: int
    sign: float = 1.0
    operator: int | None = None  # which operator of the side holds the coefficient; None: it is 1
    entry: int = 0  # where in the operator's table row
    gate: Gate = Gate.ALL
    tap: int = 0  # among the terms of a tap no two have the same channel as out, nor as source

    def transposed(self) -> Self:
        return replace(self, out=self.source, source=self.out)


@dataclass(frozen=True, eq=False)
class SideTables:
    """The coefficients of all operators of one side (query or key), end to end."""

    shared: Tensor  # float32 [numbers], operators that all query cameras share
    grouped: Tensor  # float32 or float16 [numbers], operators that differ between query cameras
    rows: Tensor  # int32 [operators, N], table row of every token
    has_camera: Tensor  # int8 [B or 1, N]

    def of_tokens(self, tokens: slice) -> Self:
        """The tables of some tokens: views."""
        return replace(self, rows=self.rows[:, tokens], has_camera=self.has_camera[:, tokens])


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """A sparse map from `source_width` channels to W channels, T terms each, by token and query camera.

    index: source channel, offset into `SideTables.shared`, offset into `SideTables.grouped`; −1 for none.
    weight: sign (0 for no term), and the two numbers of the gate.
    inverse: which output channel a tap takes each source channel to; −1 for none.
    strides: of the operator behind each channel: batch, head, head groups, row, query camera, and its line in
        `SideTables.rows`. Offsets are entry + Σ stride · index.
    """

    source_width: int
    index: Tensor  # int32 or int64 [T, 3, W]
    weight: Tensor  # float32 [T, 3, W]
    inverse: Tensor  # int32 [T, source width]
    strides: Tensor  # as index [6, W]
    gated: bool
    grouped: bool
    per_head: bool

    @property
    def width(self) -> int:
        return self.index.shape[2]


@dataclass(frozen=True, eq=False)
class EntryMap:
    """The terms of a map by the table entries that they use: E entries per token, at most U terms each.

    index: source channel, output channel, −1 for none; and the entry's offset into the side's flat gradient
        (`SideLayout.gradient_start`).
    weight: sign (0 for no term), and the two numbers of the gate.
    strides: as of `ChannelMap`, of the operator behind each entry.
    """

    index: Tensor  # int32 or int64 [U, 3, E]
    weight: Tensor  # float32 [U, 3, E]
    strides: Tensor  # as index [6, E]
    gated: bool
    per_head: bool


@dataclass(frozen=True)
class _Place:
    """Where an operator's table lies in the flat buffer, and its strides there (0 along what it shares)."""

    offset: int
    batch: int
    head: int
    head_groups: int
    row: int
    group: int
    line: int

    @property
    def strides(self) -> tuple[int, ...]:
        """In the order of `ChannelMap.strides`."""
        return self.batch, self.head, self.head_groups, self.row, self.group, self.line


class SideLayout:
    """The operators of one side in order, and where each one's numbers lie.

    A flat gradient of the side has the shared numbers first, then the grouped ones.
    """

    def __init__(self, operators: list[Operator]) -> None:
        self.operators = operators
        self.places: list[_Place] = []
        used = {False: 0, True: 0}
        for line, operator in enumerate(operators):
            batch, heads, groups, rows = operator.table.shape[:4]
            numbers = row_numbers(operator)
            place = _Place(
                offset=used[groups > 1],
                batch=heads * groups * rows * numbers if batch > 1 else 0,
                head=groups * rows * numbers if heads > 1 else 0,
                head_groups=heads,
                row=numbers,
                group=rows * numbers if groups > 1 else 0,
                line=line,
            )
            self.places.append(place)
            used[groups > 1] += batch * heads * groups * rows * numbers
        self.shared_numbers, self.grouped_numbers = used[False], used[True]

    def tables(self, has_camera: Tensor, grouped_dtype: torch.dtype) -> SideTables:
        """The flat buffers; quaternions are written out one query camera at a time, to hold little beside them."""
        tokens, device = has_camera.shape[1], has_camera.device
        shared = torch.empty(self.shared_numbers, dtype=torch.float32, device=device)
        grouped = torch.empty(self.grouped_numbers, dtype=grouped_dtype, device=device)
        every = torch.arange(tokens, dtype=torch.int32, device=device)
        rows = [every if operator.rows is None else operator.rows.int() for operator in self.operators]
        for operator, place in zip(self.operators, self.places, strict=True):
            buffer = shared if operator.groups == 1 else grouped
            shape = (*operator.table.shape[:4], row_numbers(operator))
            part = buffer[place.offset :][: torch.Size(shape).numel()].view(shape)
            table = operator.table.detach()
            if operator.form != "quaternion":
                part.view(table.shape).copy_(table)
                continue
            for group in range(operator.groups):
                part[:, :, group] = matrix_from_quaternion(table[:, :, group]).flatten(3)
        lines = torch.stack(rows) if rows else torch.zeros((0, tokens), dtype=torch.int32, device=device)
        return SideTables(shared, grouped, lines, has_camera.to(torch.int8))

    def channel_map(self, terms: Iterable[Term], source_width: int, width: int, device: torch.device) -> ChannelMap:
        """The terms as tensors, by tap and output channel."""
        terms = list(terms)
        taps = 1 + max(term.tap for term in terms)
        index = [[[-1] * width for _ in range(3)] for _ in range(taps)]
        weight = [[[0.0] * width for _ in range(3)] for _ in range(taps)]
        inverse = [[-1] * source_width for _ in range(taps)]
        strides = [[0] * width for _ in range(6)]
        for term in terms:
            assert index[term.tap][0][term.out] < 0, "two terms of a tap go to one channel"
            assert inverse[term.tap][term.source] < 0, "two terms of a tap come from one channel"
            index[term.tap][0][term.out], inverse[term.tap][term.source] = term.source, term.out
            for part, number in enumerate((term.sign, *term.gate.value)):
                weight[term.tap][part][term.out] = number
            if term.operator is not None:
                place = self.places[term.operator]
                index[term.tap][2 if place.group else 1][term.out] = place.offset + term.entry
                for part, stride in enumerate(place.strides):
                    strides[part][term.out] = stride
        integer = _offset_dtype(max(self.shared_numbers, self.grouped_numbers))
        used = [self.places[term.operator] for term in terms if term.operator is not None]
        return ChannelMap(
            source_width=source_width,
            index=torch.tensor(index, dtype=integer, device=device),
            weight=torch.tensor(weight, dtype=torch.float32, device=device),
            inverse=torch.tensor(inverse, dtype=torch.int32, device=device),
            strides=torch.tensor(strides, dtype=integer, device=device),
            gated=any(term.gate is not Gate.ALL for term in terms),
            grouped=any(place.group > 0 for place in used),
            per_head=any(place.head > 0 for place in used),
        )

    def entry_map(self, terms: Iterable[Term], device: torch.device) -> EntryMap | None:
        """The terms whose coefficients require a gradient, by entry; None when there are none."""
        uses: dict[tuple[int, int], list[Term]] = {}
        for term in terms:
            if term.operator is not None and self.operators[term.operator].table.requires_grad:
                uses.setdefault((term.operator, term.entry), []).append(term)
        if not uses:
            return None
        most = max(map(len, uses.values()))
        index = [[[-1] * len(uses) for _ in range(3)] for _ in range(most)]
        weight = [[[0.0] * len(uses) for _ in range(3)] for _ in range(most)]
        for column, ((operator, entry), users) in enumerate(sorted(uses.items())):
            for use in range(most):
                index[use][2][column] = self.gradient_start(operator) + entry
            for use, term in enumerate(users):
                index[use][0][column], index[use][1][column] = term.source, term.out
                for part, number in enumerate((term.sign, *term.gate.value)):
                    weight[use][part][column] = number
        places = [self.places[operator] for operator, _ in sorted(uses)]
        integer = _offset_dtype(self.shared_numbers + self.grouped_numbers)
        strides = list(zip(*(place.strides for place in places), strict=True))
        return EntryMap(
            index=torch.tensor(index, dtype=integer, device=device),
            weight=torch.tensor(weight, dtype=torch.float32, device=device),
            strides=torch.tensor(strides, dtype=integer, device=device),
            gated=any(term.gate is not Gate.ALL for users in uses.values() for term in users),
            per_head=any(place.head > 0 for place in places),
        )

    def gradient_start(self, operator: int) -> int:
        """Where an operator's numbers start in a flat gradient of the side."""
        place = self.places[operator]
        return place.offset + (self.shared_numbers if place.group else 0)


def _offset_dtype(numbers: int) -> torch.dtype:
    return torch.int64 if numbers >= 2**31 else torch.int32


def row_numbers(operator: Operator) -> int:
    """Numbers per table row in the flat buffer: quaternions are written out as matrices."""
    return 2 * operator.table.shape[4] if operator.form == "phasor" else operator.matrix_numbers


def operator_terms(block: Block, operator: Operator, number: int, gate: Gate) -> Iterator[Term]:
    """out = M x on the channels of a block, term by term."""
    matrices, size, width = operator.table.shape[4], operator.size, block.stop - block.start
    tuples = width // (matrices * size)
    for matrix in range(matrices):
        for repeat in range(tuples):
            number_of_tuple = matrix * tuples + repeat
            first, step = block.start + number_of_tuple * size, 1
            if operator.split_halves:
                first, step = block.start + number_of_tuple, width // 2
            for i in range(size):
                for j in range(size):
                    if operator.form == "phasor":
                        entry, sign = matrix * 2 + (i != j), -1.0 if (i, j) == (0, 1) else 1.0
                    else:
                        entry, sign = (matrix * size + i) * size + j, 1.0
                    tap = (j - i) % size
                    yield Term(first + i * step, first + j * step, sign, number, entry, gate, tap)


def identity_terms(plan: AttentionPlan, blocks: Iterable[Block]) -> Iterator[Term]:
    """Channels that none of the blocks touches."""
    touched = {channel for block in blocks for channel in range(block.start, block.stop)}
    return (Term(channel, channel) for channel in range(plan.head_dim) if channel not in touched)


def second_copies(plan: AttentionPlan) -> Iterator[tuple[int, int]]:
    """(carried channel, channel of the head): where camera channels of keys without a camera are carried."""
    channels = [channel for block in plan.camera_blocks for channel in range(block.start, block.stop)]
    return zip(range(plan.head_dim, plan.head_dim + len(channels)), channels, strict=True)
