"""Block operators: the tables of small matrices that every camera encoding is made of.

B batch, H head, G group (the query's camera), R table row, N token, L distinct matrices per token, s size of a matrix,
C channels of the block. Sizes of 1 in B, H and G are shared by all; other sizes of H are groups of neighbouring heads.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from merope.attention.visible_cameras import Run
from merope.geometry.quaternions import matrix_from_quaternion

Form = Literal["matrix", "quaternion", "phasor"]


@dataclass(frozen=True, eq=False)
class Operator:
    """One side (query or key) of a block: for every token, L matrices of size s, each tiled over C / (L·s) s-tuples.

    `form` says how a matrix is stored: "matrix" (s², any s), "quaternion" (a 3-D rotation, w x y z) or "phasor"
    (cos, sin of a rotary pair, [[c, −s], [s, c]]; shorter than 1 is allowed).
    A table row serves one token, or, with `rows`, every token that names it: a translation depends on the camera alone,
    so its table has one row per camera.
    `split_halves` pairs channel f with f + C/2 instead of its neighbour (L matrices of size 2 only).
    """

    table: Tensor  # [B, H, G, R, L, s, s] | [B, H, G, R, L, 4] | [B, H, G, R, L, 2]
    form: Form
    rows: Tensor | None = None  # int64 [N]
    split_halves: bool = False

    @property
    def groups(self) -> int:
        """Number of query cameras that see different operators; 1 when all see the same."""
        return self.table.shape[2]

    @property
    def size(self) -> int:
        """Rows (and columns) of one matrix, s."""
        return {"quaternion": 3, "phasor": 2}.get(self.form, self.table.shape[-1])

    @property
    def matrix_numbers(self) -> int:
        """Numbers in one token's matrices, L·s²."""
        return self.table.shape[4] * self.size**2

    def matrices(self, dtype: torch.dtype | None = None) -> Tensor:  # [B, H, G, N, L, s, s]
        """The small matrices of every token."""
        table = self.table if self.rows is None else self.table.index_select(3, self.rows)
        table = table.to(dtype)
        if self.form == "quaternion":
            return matrix_from_quaternion(table)
        if self.form == "phasor":
            cosine, sine = table.unbind(-1)
            return torch.stack((cosine, -sine, sine, cosine), dim=-1).unflatten(-1, (2, 2))
        return table

    def apply(
        self,
        x: Tensor,  # [B, H, G, N, C]
        transpose: bool = False,
    ) -> Tensor:  # [B, H, G, N, C]
        """M x (or Mᵀ x) for every token, computed in float32 (float64 for float64 x), in the dtype of x."""
        matrices = self.matrices(torch.promote_types(x.dtype, torch.float32))
        matrices = matrices.mT if transpose else matrices
        if x.device.type == "cpu":
            matrices, x = _tokens_side_by_side(matrices, 3), _tokens_side_by_side(x, -2)
        tuples = self._tuples(x, matrices.shape[-3], matrices.shape[-1]).unsqueeze(-1).unbind(-2)
        columns = matrices.unsqueeze(-3).unbind(-1)  # s × [B, H, G, N, L, 1, s]
        out = columns[0] * tuples[0]
        for column, numbers in zip(columns[1:], tuples[1:], strict=True):
            out.addcmul_(column, numbers)
        return self._channels(out).to(x.dtype)

    def _tuples(self, x: Tensor, count: int, size: int) -> Tensor:  # [..., L, n, s]
        if self.split_halves:
            return x.unflatten(-1, (2, -1)).mT.unsqueeze(-2)
        return x.unflatten(-1, (count, -1, size))

    def _channels(self, tuples: Tensor) -> Tensor:  # [..., C]
        if self.split_halves:
            return tuples.squeeze(-2).mT.flatten(-2)
        return tuples.flatten(-3)

    def at(self, batch: slice, heads: slice, groups: slice) -> Self:
        """The operator of some samples, heads and query cameras."""
        table = self.table
        for dim, keep in enumerate((batch, heads, groups)):
            if table.shape[dim] > 1:
                table = table[(slice(None),) * dim + (keep,)]
        return replace(self, table=table)

    def of_keys(self, run: Run) -> Self:
        """The operator of the tokens that a run of query cameras sees."""
        if self.rows is not None:
            return replace(self, rows=run.seen(self.rows, 0))
        return replace(self, table=run.seen(self.table, 3))

    def of_tokens(self, tokens: slice | Tensor) -> Self:  # int64 [n]
        """The operator of some tokens."""
        if self.rows is not None:
            return replace(self, rows=self.rows[tokens])
        return replace(self, table=self.table[:, :, :, tokens])

    def for_heads(self, heads: int, chosen: slice = slice(None)) -> Self:
        """The operator of the chosen of `heads` heads: a table of A head groups serves head h with group h·A // heads.

        Tables are copied where the chosen heads take numbers of several groups, and some group serves several heads.
        """
        groups = self.table.shape[1]
        serving = [head * groups // heads for head in range(heads)[chosen]]
        if groups in (1, heads) or len(set(serving)) == 1:
            return self.at(slice(None), slice(serving[0], serving[-1] + 1), slice(None))
        return replace(self, table=self.table.index_select(1, torch.tensor(serving, device=self.table.device)))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same operator elsewhere or in another precision."""
        rows = None if self.rows is None else self.rows.to(device)
        return replace(self, table=self.table.to(device=device, dtype=dtype), rows=rows)


def _tokens_side_by_side(x: Tensor, dim: int) -> Tensor:
    """The same tensor, laid out so that a CPU works on rows of tokens instead of two or three channels at a time."""
    return x.movedim(dim, -1).contiguous().movedim(-1, dim)


def phasors(
    phase_rad: Tensor,  # [..., L]
) -> Tensor:  # [..., L, 2]
    """Table of plain rotary phases, for form "phasor"."""
    return torch.stack((phase_rad.cos(), phase_rad.sin()), dim=-1)
