"""What the fused backend makes of a plan: tables, once per plan; channel maps, once for all plans of a structure."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from threading import Lock
from typing import Self, TypeVar, cast

import torch
from torch import Tensor

from merope.attention.kernels.channel_maps import (
    ChannelMap,
    Gate,
    SideLayout,
    SideTables,
    Term,
    identity_terms,
    operator_terms,
    second_copies,
)
from merope.attention.kernels.support import carried_width, has_plain_values, learns_tables
from merope.attention.plan import AttentionPlan, Block
from merope.attention.visible_cameras import Run

T = TypeVar("T")
SixMaps = tuple[ChannelMap, ChannelMap, ChannelMap, ChannelMap, ChannelMap, ChannelMap]

STRUCTURES_KEPT = 64
_MADE: dict[tuple[Hashable, ...], object] = {}
_MADE_LOCK = Lock()


@dataclass(frozen=True, eq=False)
class PreparedPlan:
    """Attention under a plan as maps between the channels of a head (d) and the channels carried through softmax (W).

    Queries go through `turn` (Oᵀ), keys through `key` (K), values through `value` (K, or the identity), the result
    through `back` (O, or the identity); _t are transposes for gradients. W is d, plus a second copy of
    the camera channels where some keys have no camera (see `merope.attention.sdpa`), rounded up for the kernels.
    """

    groups: int  # query cameras for which keys differ
    tokens_per_group: int
    plain_values: bool  # `value` and `back` are the identity
    turn: ChannelMap
    turn_t: ChannelMap
    key: ChannelMap
    value: ChannelMap
    back: ChannelMap
    back_t: ChannelMap
    query_tables: SideTables
    key_tables: SideTables
    runs: tuple[Run, ...]  # of query cameras that see the same keys; none: every query sees every key

    @property
    def width(self) -> int:
        """Channels carried through softmax."""
        return self.turn.width

    @property
    def queries(self) -> int:
        """Query tokens that belong to a group; tokens after them have no camera."""
        return self.groups * self.tokens_per_group

    def pack(self) -> tuple[list[Tensor], list[int]]:
        """Tensors and numbers, for operators that torch.compile sees."""
        tensors, numbers = [], [self.groups, self.tokens_per_group, int(self.plain_values), len(self.runs)]
        for run in self.runs:
            intervals = (run.cameras, run.queries, *run.keys)
            numbers += [len(run.keys), *(bound for each in intervals for bound in _bounds(each))]
        for part in self._parts():
            for field in fields(part):
                value = getattr(part, field.name)
                tensors += [value] if isinstance(value, Tensor) else []
                numbers += [] if isinstance(value, Tensor) else [int(value)]
        return tensors, numbers

    @classmethod
    def unpack(cls, tensors: list[Tensor], numbers: list[int]) -> Self:
        """The reverse of `pack`."""
        tensor, number = iter(tensors), iter(numbers)
        groups, tokens_per_group, plain_values, run_count = (next(number) for _ in range(4))

        def interval() -> slice:
            return slice(next(number), next(number))

        def run() -> Run:
            count = next(number)
            return Run(interval(), interval(), tuple(interval() for _ in range(count)), slice(0, 0))

        runs = tuple(run() for _ in range(run_count))

        def channel_map() -> ChannelMap:
            width, gated, grouped, per_head = (next(number) for _ in range(4))
            index, weight, inverse, strides = (next(tensor) for _ in range(4))
            return ChannelMap(width, index, weight, inverse, strides, bool(gated), bool(grouped), bool(per_head))

        def side() -> SideTables:
            return SideTables(next(tensor), next(tensor), next(tensor), next(tensor))

        turn, turn_t, key, value, back, back_t = (channel_map() for _ in range(6))
        maps = (turn, turn_t, key, value, back, back_t)
        return cls(groups, tokens_per_group, bool(plain_values), *maps, side(), side(), runs)

    def _parts(self) -> tuple[ChannelMap | SideTables, ...]:
        maps = (self.turn, self.turn_t, self.key, self.value, self.back, self.back_t)
        return (*maps, self.query_tables, self.key_tables)


def _bounds(interval: slice) -> tuple[int, int]:
    return interval.start, interval.stop


def prepared(plan: AttentionPlan, dtype: torch.dtype) -> PreparedPlan:
    """The maps of a plan for inputs of a dtype, made at the first call; all layers and steps share them."""
    coefficients = grouped_dtype(plan, dtype)
    name = "maps, half" if coefficients == torch.float16 else "maps, single"
    return kept(plan, name, lambda: prepare(plan, coefficients))


def cameraless(plan: AttentionPlan) -> AttentionPlan:
    """The plan of `plan.cameraless_queries`. It is kept unless tables learn: what is kept has no gradients."""
    if learns_tables(plan):
        return cameraless_plan(plan)
    return kept(plan, "cameraless", lambda: cameraless_plan(plan))


def kept(plan: AttentionPlan, name: str, make: Callable[[], T]) -> T:
    """What was made of a plan, kept in the plan. A changed copy of the plan has other tables and makes its own.

    It is not in a dictionary of plans, so that torch.compile takes the tensors of any plan without compiling again.
    """
    if name not in plan.kept:
        _keep(plan, name, make)
    return cast(T, plan.kept[name])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _keep(plan: AttentionPlan, name: str, make: Callable[[], T]) -> None:
    """Make it outside of compiled graphs. If several threads make the same, all take what the first one kept."""
    plan.kept.setdefault(name, _made(make))


def _made(make: Callable[[], T]) -> T:
    """Make ordinary tensors without gradients: a plan that is first used in sampling may be used in training."""
    with torch.inference_mode(False), torch.no_grad():
        return make()


def cameraless_plan(plan: AttentionPlan) -> AttentionPlan:
    """The plan of `plan.cameraless_queries` alone: only blocks that are not about cameras act on them.

    Where `sees` says what a token sees, each is a camera of its own.
    """
    chosen, count = plan.cameraless_queries, plan.cameraless_queries.numel()
    seen = [
        tuple(map(_bounds, run.keys)) for run in plan.runs for _ in range(run.cameraless.start, run.cameraless.stop)
    ]
    visible = None if plan.visible_keys is None else (*seen, ())

    return AttentionPlan(
        head_dim=plan.head_dim,
        blocks=tuple(
            replace(block, query=None if block.query is None else block.query.of_tokens(chosen))
            for block in plan.blocks
            if not block.camera
        ),
        query_cameras=1 if visible is None else count,
        tokens_per_camera=count if visible is None else 1,
        query_has_camera=plan.query_has_camera[:, chosen],
        key_has_camera=plan.key_has_camera,
        transform_values=plan.transform_values,
        visible_keys=visible,
    )


def grouped_dtype(plan: AttentionPlan, dtype: torch.dtype) -> torch.dtype:
    """float16 holds rotations and phasors (at most 1) to 11 bits, more than bfloat16 inputs carry; else float32."""
    bounded = all(block.key.form != "matrix" for block in plan.blocks if block.key.groups > 1)
    return torch.float16 if dtype == torch.bfloat16 and bounded else torch.float32


def prepare(plan: AttentionPlan, coefficients: torch.dtype) -> PreparedPlan:
    """Lay out the tables of both sides and list the terms of every map."""
    query_layout, key_layout = side_layouts(plan)
    return PreparedPlan(
        plan.groups,
        plan.tokens_per_camera if plan.groups > 1 else plan.query_tokens,
        has_plain_values(plan),
        *made_once("channel maps", plan, lambda: _channel_maps(plan)),
        query_layout.tables(plan.query_has_camera, torch.float32),
        key_layout.tables(plan.key_has_camera, coefficients),
        () if plan.visible_keys is None else plan.runs,
    )


def made_once(what: str, plan: AttentionPlan, make: Callable[[], T]) -> T:
    """What depends on a plan's structure alone, for all plans of that structure.

    Encodings that learn a depth make a plan in every block, and listing its terms takes longer than attending under it.
    """
    key = (what, plan.head_dim, plan.transform_values, plan.has_cameraless_keys, plan.device, *map(_shape, plan.blocks))
    with _MADE_LOCK:
        if key not in _MADE:
            if len(_MADE) >= STRUCTURES_KEPT:
                del _MADE[next(iter(_MADE))]
            _MADE[key] = _made(make)
        return cast(T, _MADE[key])


def _shape(block: Block) -> tuple[Hashable, ...]:
    """All that the terms of a block depend on, and which of its tables require gradients."""
    operators = [(o.form, o.split_halves, o.table.shape, o.table.requires_grad) for o in block.operators]
    return block.start, block.stop, block.camera, *operators


def side_layouts(plan: AttentionPlan) -> tuple[SideLayout, SideLayout]:
    """Of the query side and of the key side."""
    queries = [block.query for block in plan.blocks if block.query is not None]
    return SideLayout(queries), SideLayout([block.key for block in plan.blocks])


@dataclass(frozen=True)
class MapTerms:
    """The terms of the four maps of a `PreparedPlan` that are not transposes."""

    turn: list[Term]
    key: list[Term]
    value: list[Term]
    back: list[Term]


def map_terms(plan: AttentionPlan) -> MapTerms:
    """The terms of a plan's maps; second copies of camera channels have a tap of their own."""
    output, keys = list(_query_terms(plan)), list(_key_terms(plan))
    second = list(second_copies(plan)) if plan.has_cameraless_keys else []
    extra = 1 + max((term.tap for term in output + keys), default=0)
    keys += [Term(carried, channel, gate=Gate.WITHOUT_CAMERA, tap=extra) for carried, channel in second]
    plain = list(identity_terms(plan, ()))
    copies = [Term(channel, carried, tap=extra) for carried, channel in second]
    return MapTerms(
        turn=[term.transposed() for term in output + copies],
        key=keys,
        value=keys if plan.transform_values else plain,
        back=output + copies if plan.transform_values else plain,
    )


def _channel_maps(plan: AttentionPlan) -> SixMaps:
    """In the order of `PreparedPlan`: turn, its transpose, key, value, back, its transpose."""
    d, width, device = plan.head_dim, carried_width(plan), plan.device
    query_layout, key_layout = side_layouts(plan)
    terms = map_terms(plan)

    def both(terms: list[Term], source: int, target: int) -> tuple[ChannelMap, ChannelMap]:
        transposed = [term.transposed() for term in terms]
        return (
            query_layout.channel_map(terms, source, target, device),
            query_layout.channel_map(transposed, target, source, device),
        )

    return (
        *both(terms.turn, d, width),
        key_layout.channel_map(terms.key, d, width, device),
        key_layout.channel_map(terms.value, d, width, device),
        *both(terms.back, width, d),
    )


def _query_terms(plan: AttentionPlan) -> list[Term]:
    """O on the channels of a head."""
    blocks = [block for block in plan.blocks if block.query is not None]
    terms = list(identity_terms(plan, blocks))
    for number, block in enumerate(blocks):
        assert block.query is not None
        terms += operator_terms(block, block.query, number, Gate.ALL)
    return terms


def _key_terms(plan: AttentionPlan) -> list[Term]:
    """K on the channels of a head; camera channels of a key without a camera are empty."""
    terms = list(identity_terms(plan, plan.blocks))
    for number, block in enumerate(plan.blocks):
        gate = Gate.WITH_CAMERA if block.camera and plan.has_cameraless_keys else Gate.ALL
        terms += operator_terms(block, block.key, number, gate)
    return terms


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def capability(device_index: int) -> int:
    """Compute capability of a GPU, 90 for 9.0: a number, because graphs of torch.compile compare no constant tuples."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor
