"""A plan's tables as the Hopper kernels read them, and which plans fit."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from merope.attention.kernels.hopper_visible import TILE, visible_tables
from merope.attention.kernels.tokens_apart import why_not_apart, with_cameras
from merope.attention.operators import Form, Operator
from merope.attention.plan import AttentionPlan, Block

ANCHORS, DIRECTION_PAIRS, TRANSLATION_PAIRS, NATIVE_PAIRS = 6, 18, 12, 16
LARGEST_DEFECT = 1e-4
"""By how much tables may miss a rotation: the backward pass takes transposes for inverses, and half precision clips."""


@dataclass(frozen=True)
class Side:
    """One side of a block as the kernels read it."""

    form: Form
    entries: tuple[int, ...]  # of a table row: [matrices, …]
    grouped: bool = False  # query cameras may see different operators
    by_camera: bool = False  # tokens name a table row of their camera; else every token has its own


FRAME, ROTARY = Side("matrix", (1, 3, 3)), Side("phasor", (NATIVE_PAIRS, 2))
DISPARITY, ROTATION, TRANSLATION, NATIVE = (0, 36), (36, 72), (72, 96), (96, 128)
"""Channels of the one head that the kernels are written for, the paper's 128, by what MeRoPE has there."""
SLOTS: dict[tuple[int, int], tuple[Side | None, Side]] = {  # query side (None: the identity alone) and key side
    DISPARITY: (FRAME, Side("quaternion", (ANCHORS, 4), grouped=True)),
    ROTATION: (FRAME, FRAME),
    TRANSLATION: (None, Side("phasor", (TRANSLATION_PAIRS, 2), grouped=True, by_camera=True)),
    NATIVE: (ROTARY, ROTARY),
}
DIRECTIONS = tuple(Side("phasor", (DIRECTION_PAIRS, 2), grouped=grouped) for grouped in (False, True))
"""What may stand in the place of the rotation's two sides: phases of directions, as the query's camera sees them."""


@dataclass(frozen=True, eq=False)
class HopperTables:
    """A plan's tables as the kernels read them. T is 1, or the batch of the plan."""

    query_disparity: Tensor  # float32 [T, Nq, 9]
    query_rotation: Tensor  # float32 [T, Nq, 9], or [T, Nq, 36]: phasors of directions
    query_native: Tensor  # float32 [T, Nq, 16, 2]
    key_rotation: Tensor  # float32 [T, Nk, 9], or [T, 0, 9]: with directions, not read
    key_native: Tensor  # float32 [T, Nk, 16, 2]
    key_views: Tensor  # int32 [T, Vq, key tiles, 10 · 128 or 28 · 128]: words of keys in the order of `_key_views`,
    # four of every key of the tile, then the next four (of ten, the last two)
    phasors: Tensor  # float16 [T, Vq, rows, 6, 2, 2]: pairs of translation two by two, cosines then sines
    key_camera: Tensor  # int32 [padded keys], row of `phasors`
    # What is seen: three tables without rows where every query sees every key.
    seen_keys: Tensor  # int32 [Vq, 4], start and stop of two intervals of keys
    camera_order: Tensor  # int32 [Vq], query cameras that see most first
    walks: Tensor  # int32 [key tiles, 3 + Vq]: a tile, how many cameras see it, which; that most see first

    @property
    def phases(self) -> bool:
        """Whether directions have phases, in place of the rotation block."""
        return self.key_views.shape[3] > 10 * TILE

    @property
    def visible(self) -> bool:
        """Whether query cameras see a part of the keys."""
        return self.seen_keys.shape[0] > 0

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def why_not_plan(plan: AttentionPlan) -> str | None:
    """Why a plan does not fit the kernels, whatever the device; None when it does. To be asked once per plan.

    It goes by what the operators are, not by the names of their blocks.
    """
    if not plan.blocks:
        return "they turn keys and values, and this plan has nothing to turn"
    if plan.head_dim != 128 or any((block.start, block.stop) not in SLOTS for block in plan.blocks):
        return "they are written for heads of 128 and the paper's partition"
    if plan.visible_keys is not None and max(map(len, plan.visible_keys)) > 2:
        return "they hold two intervals of keys for each query camera"
    if not plan.transform_values:
        return "they turn values as well as keys"
    reason = why_not_apart(plan)
    if reason is not None:
        return reason
    plan = with_cameras(plan)
    for block in plan.blocks:
        query, key = DIRECTIONS if _has_directions(block) else SLOTS[block.start, block.stop]
        for name, operator, side in (("query", block.query, query), ("key", block.key, key)):
            reason = None if operator is None else _why_not_side(operator, side)
            if reason is not None:
                return f'on channels {block.start}:{block.stop} {reason} ({name} side of block "{block.name}")'
    return _why_not_numbers(plan)


def has_phases(plan: AttentionPlan) -> bool:
    """Whether a plan that `why_not_plan` accepts has phases of directions."""
    return any(_has_directions(block) for block in plan.blocks)


def _has_directions(block: Block) -> bool:
    return (block.start, block.stop) == ROTATION and block.key.form == "phasor"


def _why_not_side(operator: Operator, side: Side | None) -> str | None:
    """What the kernels read in place of this operator; None when it is this."""
    if side is None:
        return "they turn keys alone"
    entries = tuple(operator.table.shape[4:])
    if operator.form != side.form or entries != side.entries:
        return f"they read a {side.form} table of {list(side.entries)} per row, not a {operator.form} {list(entries)}"
    if operator.split_halves:
        return "they turn neighbouring channels together, not those of two halves"
    if operator.table.shape[1] > 1:
        return "they share tables between heads"
    if operator.groups > 1 and not side.grouped:
        return "they share tables between query cameras"
    if (operator.rows is not None) != side.by_camera:
        return f"they read one table row for every {'camera' if side.by_camera else 'token'}"
    return None


def _why_not_numbers(plan: AttentionPlan) -> str | None:
    """The kernels hold rotations in half precision, and those by quaternions without a turn about the optical axis."""
    operators = [operator for block in plan.blocks for operator in block.operators]
    defects = [_defect(operator) for operator in operators]
    spins = [operator.table[..., 3].abs().amax().double() for operator in operators if operator.form == "quaternion"]
    numbers = torch.stack((*defects, *spins)).tolist()  # read off the device once
    if any(numbers[len(defects) :]):
        return 'they hold anchors as MinRot (anchor_frame="minrot")'
    if not all(number <= LARGEST_DEFECT for number in numbers):
        return "they hold rotations in half precision, and some operators of this plan are none"
    return None


def _defect(operator: Operator) -> Tensor:  # float64 []
    """Largest difference from a rotation. Sums are written out: products of matrices may round to ten bits on a GPU."""
    table = operator.table.detach()
    if operator.form != "matrix":
        return (torch.linalg.vector_norm(table, dim=-1) - 1).abs().amax().double()
    products = (table[..., :, None, :] * table[..., None, :, :]).sum(-1)
    return (products - torch.eye(3, dtype=table.dtype, device=table.device)).abs().amax().double()


def make_tables(plan: AttentionPlan) -> HopperTables:
    """Lay out a plan's operators for the kernels; blocks that are off become the identity.

    Of tokens without a camera, none but queries among the cameras' tokens are in the tables.
    """
    plan = with_cameras(plan)
    samples = plan.batch
    padding = -plan.key_tokens % TILE
    blocks = {(block.start, block.stop): block for block in plan.blocks}
    disparity, rotation, translation, native = (blocks.get(s) for s in (DISPARITY, ROTATION, TRANSLATION, NATIVE))

    def per_token(operator: Operator | None, identity: Tensor, tokens: int) -> Tensor:  # [T, tokens, *identity]
        if operator is None:
            return identity.to(plan.device).expand(samples, tokens, *identity.shape).contiguous()
        table = operator.table.float().reshape(-1, tokens, *identity.shape)
        return table.expand(samples, *table.shape[1:]).contiguous()

    frame = torch.eye(3, dtype=torch.float32).flatten()  # named: the kernels read float32, whatever PyTorch's default
    unturned = torch.tensor([1.0, 0.0], dtype=torch.float32).expand(NATIVE_PAIRS, 2)
    directions = rotation if rotation and _has_directions(rotation) else None
    key_frame = rotation.key if rotation and not directions else None
    own = torch.tensor([1.0, 0.0], dtype=torch.float32).repeat(DIRECTION_PAIRS) if directions else frame
    seen_keys, camera_order, walks = visible_tables(plan)
    key_camera = _key_camera(plan, translation, padding)
    return HopperTables(
        query_disparity=per_token(disparity.query if disparity else None, frame, plan.query_tokens),
        query_rotation=per_token(rotation.query if rotation else None, own, plan.query_tokens),
        query_native=per_token(native.query if native else None, unturned, plan.query_tokens),
        key_rotation=per_token(key_frame, frame, 0 if directions else plan.key_tokens),
        key_native=per_token(native.key if native else None, unturned, plan.key_tokens),
        key_views=_key_views(plan, disparity, directions, key_camera),
        phasors=_phasors(plan, translation, samples),
        key_camera=key_camera,
        seen_keys=seen_keys,
        camera_order=camera_order,
        walks=walks,
    )


def _key_views(plan: AttentionPlan, disparity: Block | None, directions: Block | None, key_camera: Tensor) -> Tensor:
    """Words of two float16: m of six anchors (9); the key's row of `phasors` (1, an integer); phasors of directions,
    pairs two by two, cosines then sines (the last 2 of 18, then 16)."""
    samples, cameras = plan.batch, plan.query_cameras
    padding = (0, 0, 0, len(key_camera) - plan.key_tokens)
    words = [_words(pad(_half_vectors(plan, disparity, samples), padding))]  # [T, Vq, padded keys, words]
    words.append(key_camera[:, None].expand(samples, cameras, -1, 1))
    if directions is not None:
        phasors = _two_by_two(directions.key.table[:, 0].detach()).flatten(-3)
        turns = _words(pad(phasors.expand(samples, cameras, *phasors.shape[2:]), padding))
        words += [turns[..., 16:], turns[..., :16]]
    groups = torch.cat(words, dim=-1).unflatten(2, (-1, TILE)).split(4, dim=-1)
    return torch.cat([group.flatten(-2) for group in groups], dim=-1)


def _words(numbers: Tensor) -> Tensor:  # float16 [..., 2 n] to int32 [..., n]
    return numbers.contiguous().view(torch.int32)


def _half_vectors(plan: AttentionPlan, block: Block | None, samples: int) -> Tensor:  # float16 [T, Vq, Nk, 18]
    """MinRot(u) = (2mmᵀ − I)·diag(−1, −1, 1): its quaternion (w, x, y, 0) holds m = (y, −x, w)."""
    cameras, keys = plan.query_cameras, plan.key_tokens
    if block is None:
        m = torch.tensor([0.0, 0.0, 1.0], device=plan.device).expand(samples, cameras, keys, ANCHORS, 3)
    else:
        w, x, y, _ = block.key.table[:, 0].detach().float().unbind(-1)
        m = torch.stack((y, -x, w), dim=-1).expand(samples, cameras, -1, -1, -1)
    return m.half().flatten(-2)


def _phasors(plan: AttentionPlan, block: Block | None, samples: int) -> Tensor:
    if block is None:
        table = torch.tensor([1.0, 0.0], device=plan.device).expand(1, plan.query_cameras, 1, TRANSLATION_PAIRS, 2)
    else:
        table = block.key.table[:, 0].detach()
    two_by_two = _two_by_two(table)
    return two_by_two.expand(samples, plan.query_cameras, *two_by_two.shape[2:]).contiguous()


def _two_by_two(
    phasors: Tensor,  # [..., pairs, 2]
) -> Tensor:  # float16 [..., pairs / 2, 2, 2]
    """Cosines of two neighbouring pairs, then their sines."""
    return phasors.unflatten(-2, (-1, 2)).transpose(-1, -2).half()


def _key_camera(plan: AttentionPlan, block: Block | None, padding: int) -> Tensor:  # int32 [padded keys]
    if block is None:
        return torch.zeros(plan.key_tokens + padding, dtype=torch.int32, device=plan.device)
    assert block.key.rows is not None
    return pad(block.key.rows, (0, padding)).int()
