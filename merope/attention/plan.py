"""AttentionPlan: what an encoding decides about a clip, as plain tensors.

Every encoding is U_ab = O_a · K_{g(a), b}: an operator of the query token, and an operator of the key token that may
depend on the query's camera g(a) (its group). A plan is built once per clip and shared by all layers, all denoising
steps and all guidance passes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Self

import torch
from torch import Tensor

from merope.attention.operators import Operator
from merope.attention.visible_cameras import KeyRanges, Run, runs
from merope.errors import invalid


@dataclass(frozen=True, eq=False)
class Block:
    """Channels start … stop − 1 of a head and the operators O (query side) and K (key side) that act on them.

    `query` None is the identity: the relation is held by the key side alone.
    """

    name: str
    start: int
    stop: int
    query: Operator | None
    key: Operator
    camera: bool  # False: the block relates positions, not cameras, and also acts on tokens without a camera

    def map(self, change: Callable[[Operator], Operator]) -> Self:
        """The block with both operators changed."""
        return replace(self, query=None if self.query is None else change(self.query), key=change(self.key))

    def of_query(self, x: Tensor, transpose: bool = False) -> Tensor:  # [B, H, G, N, C]
        """O x (or Oᵀ x) on the channels of the block."""
        return x if self.query is None else self.query.apply(x, transpose)

    @property
    def operators(self) -> tuple[Operator, ...]:
        return (self.key,) if self.query is None else (self.query, self.key)

    @property
    def channels(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The operators of one clip (or batch of clips) for attention between `query_tokens` and `key_tokens`.

    Query tokens are camera-major: `query_cameras` × `tokens_per_camera`, then tokens without a camera. Blocks are in
    channel order; channels that no block covers are untouched. Where either token of a pair has no camera, the camera
    blocks are the identity.
    """

    head_dim: int
    blocks: tuple[Block, ...]
    query_cameras: int
    tokens_per_camera: int
    query_has_camera: Tensor  # bool [B or 1, query tokens]
    key_has_camera: Tensor  # bool [B or 1, key tokens]
    transform_values: bool = True  # False: U acts on the logits only
    clamps_lengths: bool = False  # True: `attend` keeps Oᵀq, K k and K v as short as q, k and v
    visible_keys: KeyRanges | None = None  # None: every query sees every key
    cameraless_queries: Tensor = field(init=False)  # int64 [M], those without a camera in at least one sample
    has_cameraless_keys: bool = field(init=False)
    runs: tuple[Run, ...] = field(init=False, repr=False)  # of query cameras that see the same keys
    kept: dict[str, object] = field(init=False, default_factory=dict, repr=False)  # what kernels made of the tables

    def __post_init__(self) -> None:
        stops = [0, *(block.stop for block in self.blocks)]
        assert all(block.start >= stop for block, stop in zip(self.blocks, stops, strict=False)), "blocks out of order"
        assert all(block.camera or block.key.groups == 1 for block in self.blocks), "only camera blocks may be grouped"
        _check_blocks(self)
        assert not self.clamps_lengths or self.groups == 1, "grouped keys have a length for every query camera"
        # Decided once, here: reading them off a GPU in every layer would stall it.
        # Without a camera block, tokens without a camera are like all others.
        lonely = ~self.query_has_camera if self.camera_blocks else torch.zeros_like(self.query_has_camera)
        object.__setattr__(self, "cameraless_queries", lonely.any(0).nonzero().squeeze(-1))
        object.__setattr__(
            self, "has_cameraless_keys", bool(self.camera_blocks) and not bool(self.key_has_camera.all())
        )
        visible, tokens = self._visible(), (self.tokens_per_camera, self.query_tokens)
        object.__setattr__(self, "runs", tuple(runs(visible, *tokens, self.cameraless_queries)))

    @property
    def query_tokens(self) -> int:
        return self.query_has_camera.shape[-1]

    @property
    def key_tokens(self) -> int:
        return self.key_has_camera.shape[-1]

    @property
    def batch(self) -> int:
        """Number of clips, 1 when the plan serves any batch."""
        return max(tensor.shape[0] for name, tensor in self.tensors().items() if not name.endswith(".rows"))

    @property
    def groups(self) -> int:
        """Number of query cameras for which keys differ: 1 for per-token encodings."""
        return max([1, *(block.key.groups for block in self.blocks)])

    @property
    def head_groups(self) -> int:
        """Number of groups of neighbouring heads with operators of their own."""
        return max([1, *(operator.table.shape[1] for block in self.blocks for operator in block.operators)])

    @property
    def device(self) -> torch.device:
        return self.query_has_camera.device

    @property
    def camera_blocks(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.camera)

    def operator(
        self, query_token: int, key_token: int, batch: int = 0, head: int = 0
    ) -> Tensor:  # [head_dim, head_dim]
        """Dense U_ab of query token a and key token b (paper, Eq. 1 and 11)."""
        if not 0 <= key_token < self.key_tokens:
            raise invalid("key_token", f"in 0 … {self.key_tokens - 1}", key_token, "tokens are camera-major")
        return self.operators(query_token, batch, head)[key_token]

    def operators(self, query_token: int, batch: int = 0, head: int = 0) -> Tensor:  # [key tokens, head_dim, head_dim]
        """Dense U_ab of one query token with every key token, without the factors of `clamps_lengths`.

        `head` counts the tables' groups of heads, where an encoding treats heads differently (URoPE): head h of H is
        `plan.for_heads(H).operators(..., head=h)`.
        """
        if not 0 <= query_token < self.query_tokens:
            raise invalid("query_token", f"in 0 … {self.query_tokens - 1}", query_token, "tokens are camera-major")
        if not 0 <= batch < self.batch and self.batch > 1:
            raise invalid("batch", f"in 0 … {self.batch - 1}", batch, "the plan has so many clips")
        if not 0 <= head < self.head_groups and self.head_groups > 1:
            fix = "lay the plan out with plan.for_heads(heads) first"
            raise invalid("head", f"in 0 … {self.head_groups - 1}, the tables' groups of heads", head, fix)
        tables = [block.key.table for block in self.blocks]
        dtype = tables[0].dtype if tables else torch.float64
        u = torch.eye(self.head_dim, dtype=dtype, device=self.device).repeat(self.key_tokens, 1, 1)
        related = self._has_camera("query", batch)[query_token] & self._has_camera("key", batch)
        group = min(query_token // self.tokens_per_camera, self.query_cameras - 1)
        for block in self.blocks:
            unit = torch.eye(block.stop - block.start, dtype=dtype, device=self.device)
            pair = _dense(block.key, unit, batch, head, group)
            if block.query is not None:
                with torch.autocast(self.device.type, enabled=False):
                    pair = _dense(block.query, unit, batch, head, 0, slice(query_token, query_token + 1)) @ pair
            if block.camera:
                pair = torch.where(related[:, None, None], pair, unit)
            u[:, block.channels, block.channels] = pair
        return u

    def seen_by(self, query_token: int) -> Tensor:  # bool [key tokens]
        """Which keys a query token attends to."""
        camera = min(query_token // self.tokens_per_camera, self.query_cameras)
        key = torch.arange(self.key_tokens, device=self.device)
        seen = [(key >= start) & (key < stop) for start, stop in self._visible()[camera]]
        return torch.stack(seen).any(0)

    def _visible(self) -> KeyRanges:
        """The keys of every query camera, and of the tokens after the cameras."""
        if self.visible_keys is not None:
            return self.visible_keys
        return (((0, self.key_tokens),),) * (self.query_cameras + 1)

    def _has_camera(self, side: Literal["query", "key"], batch: int) -> Tensor:  # bool [tokens]
        flags = self.query_has_camera if side == "query" else self.key_has_camera
        return flags[batch if flags.shape[0] > 1 else 0]

    def at(self, batch: slice, heads: slice) -> Self:
        """The plan of some samples and heads."""

        def keep(flags: Tensor) -> Tensor:
            return flags if flags.shape[0] == 1 else flags[batch]

        return self._changed(
            lambda operator: operator.at(batch, heads, slice(None)),
            query_has_camera=keep(self.query_has_camera),
            key_has_camera=keep(self.key_has_camera),
        )

    def for_heads(self, heads: int, chosen: slice = slice(None)) -> Self:
        """The plan of the chosen of `heads` heads, with tables for each of them where an encoding tells heads apart."""
        every = chosen == slice(None)
        if every and all(o.table.shape[1] in (1, heads) for block in self.blocks for o in block.operators):
            return self
        return self._changed(lambda operator: operator.for_heads(heads, chosen))

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same plan on another device, or with tables in another precision (float32 or float64).

        As of tensors, the dtype may stand alone: `plan.to(torch.float64)`.
        """
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise invalid("device", "a device", device, "pass plan.to(device, dtype)")
            device, dtype = None, device
        if dtype not in (None, torch.float32, torch.float64):
            raise invalid("dtype", "torch.float32 or torch.float64", dtype, "transforms never run in half precision")
        names = ("query_has_camera", "key_has_camera", "cameraless_queries")
        return self._changed(lambda o: o.to(device, dtype), **{name: getattr(self, name).to(device) for name in names})

    def _changed(self, change: Callable[[Operator], Operator], **tensors: Tensor) -> Self:
        """A copy with changed operators; what was decided at construction still holds and is not decided again.

        What kernels keep is left behind: it was made of the old tables. A plan that nothing changes stays itself.
        """
        changed = object.__new__(type(self))
        for each in fields(self):
            object.__setattr__(changed, each.name, getattr(self, each.name))
        object.__setattr__(changed, "blocks", tuple(block.map(change) for block in self.blocks))
        object.__setattr__(changed, "kept", {})
        for name, tensor in tensors.items():
            object.__setattr__(changed, name, tensor)
        before, after = self.tensors(), changed.tensors()
        return self if all(after[name] is tensor for name, tensor in before.items()) else changed

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the plan by name, for printing, comparing and saving."""
        tables = {"query_has_camera": self.query_has_camera, "key_has_camera": self.key_has_camera}
        for block in self.blocks:
            for side, operator in (("query", block.query), ("key", block.key)):
                if operator is not None:
                    tables[f"{block.name}.{side}"] = operator.table
                if operator is not None and operator.rows is not None:
                    tables[f"{block.name}.{side}.rows"] = operator.rows
        return tables

    def __str__(self) -> str:
        lines = [
            f"AttentionPlan: head {self.head_dim}, {self.query_tokens} query × {self.key_tokens} key tokens, "
            f"{self.query_cameras} query cameras, keys in {self.groups} group{'s' * (self.groups > 1)}"
        ]
        for block in self.blocks:
            query = "identity" if block.query is None else list(block.query.table.shape)
            tables = f"query {query}, key {list(block.key.table.shape)}"
            lines.append(f"  {block.start:>4}:{block.stop:<4} {block.name:<12} {block.key.form:<10} {tables}")
        if self.clamps_lengths:
            lines.append("  queries, keys and values are clamped to the length that they had before")
        if self.visible_keys is not None:
            counts = [sum(stop - start for start, stop in ranges) for ranges in self.visible_keys[:-1]]
            lines.append(f"  a query camera sees {min(counts)} to {max(counts)} key tokens")
        return "\n".join(lines)


def _check_blocks(plan: AttentionPlan) -> None:
    """Refuse operators that do not fit the plan: backends would disagree about them, or read beyond their tables."""
    names = [block.name for block in plan.blocks]
    if len(set(names)) < len(names):
        raise invalid("blocks", "of different names", names, "a plan's tensors are listed by the names of its blocks")
    if plan.blocks and plan.blocks[-1].stop > plan.head_dim:
        fix = "make the encoding for wider heads"
        raise invalid("blocks", f"within the {plan.head_dim} channels of a head", plan.blocks[-1].stop, fix)
    for block in plan.blocks:
        for side, operator in (("query", block.query), ("key", block.key)):
            if operator is not None:
                tokens, groups = (plan.query_tokens, 1) if side == "query" else (plan.key_tokens, plan.query_cameras)
                for fits, expected in _fits(operator, block.stop - block.start, plan.batch, groups, tokens):
                    if not fits:
                        name, got = f'the {side} table of block "{block.name}"', list(operator.table.shape)
                        raise invalid(name, expected, got, "its shape is [batch, heads, groups, rows, matrices, …]")


def _fits(operator: Operator, width: int, batch: int, groups: int, tokens: int) -> Iterator[tuple[bool, str]]:
    """What an operator on `width` channels must be, and whether it is."""
    own_batch, _, own_groups, own_rows, matrices = operator.table.shape[:5]
    rows = [own_rows] if operator.rows is None else list(operator.rows.shape)
    channels = matrices * operator.size
    yield own_batch in (1, batch), f"of 1 or {batch} clips"
    yield own_groups in (1, groups), f"of 1 or {groups} query cameras" if groups > 1 else "of one group"
    yield rows == [tokens], f"of one row for each of {tokens} tokens, or with `rows` that name one for each"
    yield width % channels == 0, f"of matrices that fill {width} channels"
    halves = operator.size == 2 and matrices in (1, width // 2)
    yield halves or not operator.split_halves, f"of 1 or {width // 2} matrices of size 2, with split halves"


def _dense(
    operator: Operator, unit: Tensor, batch: int, head: int, group: int, tokens: slice = slice(None)
) -> Tensor:  # [tokens, C, C]
    """Dense matrices of some tokens of an operator: its action on the unit vectors."""
    one = operator.at(slice(batch, batch + 1), slice(head, head + 1), slice(group, group + 1))
    rows = torch.arange(one.table.shape[3], device=unit.device) if one.rows is None else one.rows
    one = replace(one, rows=rows[tokens])
    basis = unit[None, None, :, None, :].expand(1, 1, -1, len(rows[tokens]), -1)  # one unit vector per group
    return one.apply(basis)[0, 0].permute(1, 2, 0).contiguous()
