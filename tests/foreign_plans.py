"""Plans that no encoding of the library makes: operators of every structure, on channels and under names like ours."""

import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from merope.attention.operators import Form, Operator, phasors
from merope.attention.plan import AttentionPlan, Block

SLOTS = {"disparity": (0, 36), "rotation": (36, 72), "translation": (72, 96), "native": (96, 128)}
"""MeRoPE's blocks in a head of 128."""
QUERY_CAMERAS, TOKENS_PER_CAMERA, KEY_CAMERAS, KEYS_PER_CAMERA = 2, 3, 2, 2
QUERIES, KEYS = QUERY_CAMERAS * TOKENS_PER_CAMERA, KEY_CAMERAS * KEYS_PER_CAMERA


def operator(
    form: Form,
    matrices: int,
    tokens: int,
    size: int = 3,  # of matrices
    batch: int = 1,
    heads: int = 1,
    groups: int = 1,
    cameras: int = 0,  # tokens share a row for each of so many; 0: a row for each token
    minrot: bool = False,  # quaternions without a turn about the optical axis
    split_halves: bool = False,
) -> Operator:
    """A random one: rotations, unit phasors, or (matrices of sizes other than 3) anything."""
    shape = (batch, heads, groups, cameras or tokens, matrices)
    rows = torch.arange(tokens) * cameras // tokens if cameras else None
    if form == "phasor":
        return Operator(phasors(7 * torch.randn(shape, dtype=torch.float64)), form, rows, split_halves)
    if form == "quaternion":
        mask = torch.tensor([1.0, 1.0, 1.0, 0.0 if minrot else 1.0], dtype=torch.float64)
        return Operator(normalize(torch.randn(*shape, 4, dtype=torch.float64) * mask, dim=-1), form, rows)
    table = torch.randn(*shape, size, size, dtype=torch.float64)
    return Operator(torch.linalg.qr(table)[0] if size == 3 else table, form, rows)


def plan_of(blocks: list[Block], head_dim: int = 128, batch: int = 1) -> AttentionPlan:
    """Two query cameras of three tokens, two key cameras of two."""
    flags: list[Tensor] = [torch.ones(batch, tokens, dtype=torch.bool) for tokens in (QUERIES, KEYS)]
    return AttentionPlan(head_dim, tuple(blocks), QUERY_CAMERAS, TOKENS_PER_CAMERA, *flags)


def like_ours(batch: int = 1) -> dict[str, Block]:
    """A block of each of MeRoPE's structures, in its place, with random numbers."""
    both = {"batch": batch}
    anchors = operator("quaternion", 6, KEYS, groups=QUERY_CAMERAS, minrot=True, **both)
    steps = operator("phasor", 12, KEYS, groups=QUERY_CAMERAS, cameras=KEY_CAMERAS, **both)
    sides: dict[str, tuple[Operator | None, Operator]] = {
        "disparity": (operator("matrix", 1, QUERIES, **both), anchors),
        "rotation": (operator("matrix", 1, QUERIES, **both), operator("matrix", 1, KEYS, **both)),
        "translation": (None, steps),
        "native": (operator("phasor", 16, QUERIES, **both), operator("phasor", 16, KEYS, **both)),
    }
    return {
        name: Block(name, *SLOTS[name], query, key, camera=name != "native") for name, (query, key) in sides.items()
    }


def directions(batch: int = 1) -> Block:
    """A block of phases in the rotation's place, as MeRoPE's of directions."""
    key = operator("phasor", 18, KEYS, batch=batch, groups=QUERY_CAMERAS)
    return Block("directions", *SLOTS["rotation"], operator("phasor", 18, QUERIES, batch=batch), key, camera=True)


def changed(name: str, query: Operator | None, key: Operator) -> AttentionPlan:
    """Blocks like MeRoPE's, one of which has other operators under the same name."""
    blocks = like_ours()
    blocks[name] = Block(name, *SLOTS[name], query, key, camera=True)
    return plan_of(list(blocks.values()))


def _longer(operator: Operator, factor: float) -> Operator:
    return Operator(factor * operator.table, operator.form, operator.rows)


FOREIGN: dict[str, Callable[[], AttentionPlan]] = {
    "translation by token": lambda: changed(
        "translation", operator("phasor", 12, QUERIES), operator("phasor", 12, KEYS)
    ),
    "translation by token, keys alone": lambda: changed(
        "translation", None, operator("phasor", 12, KEYS, groups=QUERY_CAMERAS)
    ),
    "translation with a query operator": lambda: changed(
        "translation", operator("phasor", 12, QUERIES), like_ours()["translation"].key
    ),
    "translation in six pairs": lambda: changed("translation", None, operator("phasor", 6, KEYS, cameras=KEY_CAMERAS)),
    "translation with split halves": lambda: changed(
        "translation", None, operator("phasor", 12, KEYS, cameras=KEY_CAMERAS, split_halves=True)
    ),
    "translation of shortened phasors": lambda: changed(
        "translation", None, _longer(like_ours()["translation"].key, 0.5)
    ),
    "translation by head": lambda: changed(
        "translation", None, operator("phasor", 12, KEYS, heads=3, groups=QUERY_CAMERAS, cameras=KEY_CAMERAS)
    ),
    "native with split halves": lambda: changed(
        "native",
        *(operator("phasor", 16, tokens, split_halves=True) for tokens in (QUERIES, KEYS)),
    ),
    "native with one phase, split halves": lambda: changed(
        "native",
        *(operator("phasor", 1, tokens, split_halves=True) for tokens in (QUERIES, KEYS)),
    ),
    "native by query camera": lambda: changed("native", None, operator("phasor", 16, KEYS, groups=QUERY_CAMERAS)),
    "native of 4×4 matrices": lambda: changed(
        "native", *(operator("matrix", 1, tokens, size=4) for tokens in (QUERIES, KEYS))
    ),
    "native by camera": lambda: changed("native", None, operator("phasor", 16, KEYS, cameras=KEY_CAMERAS)),
    "rotation by query camera": lambda: changed("rotation", None, operator("matrix", 1, KEYS, groups=QUERY_CAMERAS)),
    "rotation of quaternions": lambda: changed(
        "rotation", *(operator("quaternion", 1, tokens) for tokens in (QUERIES, KEYS))
    ),
    "rotation of 4×4 matrices": lambda: changed(
        "rotation", *(operator("matrix", 1, tokens, size=4) for tokens in (QUERIES, KEYS))
    ),
    "rotation of twelve matrices": lambda: changed(
        "rotation", *(operator("matrix", 12, tokens) for tokens in (QUERIES, KEYS))
    ),
    "rotation of large matrices": lambda: changed("rotation", None, _longer(operator("matrix", 1, KEYS), 8.0)),
    "rotation by camera": lambda: changed("rotation", None, operator("matrix", 1, KEYS, cameras=KEY_CAMERAS)),
    "directions by camera": lambda: changed("rotation", None, operator("phasor", 18, KEYS, cameras=KEY_CAMERAS)),
    "directions with a query operator of matrices": lambda: changed(
        "rotation", operator("matrix", 1, QUERIES), operator("phasor", 18, KEYS, groups=QUERY_CAMERAS)
    ),
    "directions with one phase": lambda: changed("rotation", None, operator("phasor", 1, KEYS, groups=QUERY_CAMERAS)),
    "directions with split halves": lambda: changed(
        "rotation", None, operator("phasor", 18, KEYS, groups=QUERY_CAMERAS, split_halves=True)
    ),
    "directions by head": lambda: changed(
        "rotation", None, operator("phasor", 18, KEYS, heads=3, groups=QUERY_CAMERAS)
    ),
    "directions of shortened phasors": lambda: changed(
        "rotation", None, _longer(operator("phasor", 18, KEYS, groups=QUERY_CAMERAS), 0.5)
    ),
    "rotation with a query operator of phasors": lambda: changed(
        "rotation", operator("phasor", 18, QUERIES), operator("matrix", 1, KEYS)
    ),
    "disparity that spins": lambda: changed("disparity", None, operator("quaternion", 6, KEYS, groups=QUERY_CAMERAS)),
    "disparity of three anchors": lambda: changed("disparity", None, operator("quaternion", 3, KEYS, minrot=True)),
    "disparity of matrices": lambda: changed("disparity", None, operator("matrix", 6, KEYS, groups=QUERY_CAMERAS)),
    "disparity of 2×2 matrices": lambda: changed("disparity", None, operator("matrix", 18, KEYS, size=2)),
    "disparity with a query operator of six": lambda: changed(
        "disparity", operator("matrix", 6, QUERIES), like_ours()["disparity"].key
    ),
    "one block over two places": lambda: plan_of(
        [Block("rotation", 36, 96, operator("phasor", 30, QUERIES), operator("phasor", 30, KEYS), camera=True)]
    ),
    "a head of 64": lambda: plan_of([Block("native", 32, 64, None, operator("phasor", 16, KEYS), camera=False)], 64),
    "matrices of five": lambda: plan_of(
        [Block("any", 3, 43, operator("matrix", 2, QUERIES, size=5), operator("matrix", 4, KEYS, size=5), camera=True)]
    ),
}
"""Structures that the Hopper kernels are not written for."""

ACCEPTED: dict[str, Callable[[], AttentionPlan]] = {
    "like ours": lambda: plan_of(list(like_ours().values())),
    "two clips": lambda: plan_of(list(like_ours(batch=2).values()), batch=2),
    "under other names": lambda: plan_of(
        [
            Block(f"foreign {name}", block.start, block.stop, block.query, block.key, block.camera)
            for name, block in like_ours().items()
        ]
    ),
    "without query operators": lambda: plan_of(
        [Block(name, *SLOTS[name], None, block.key, block.camera) for name, block in like_ours().items()]
    ),
    "one place only": lambda: plan_of([like_ours()["translation"]]),
    "directions": lambda: changed("rotation", directions().query, directions().key),
    "directions without query operators": lambda: changed("rotation", None, directions().key),
    "directions, two clips": lambda: plan_of(
        list((like_ours(batch=2) | {"rotation": directions(batch=2)}).values()), batch=2
    ),
    "directions alone, the same for all query cameras": lambda: plan_of(
        [Block("turn", 36, 72, operator("phasor", 18, QUERIES), operator("phasor", 18, KEYS), camera=False)]
    ),
    "the same for all query cameras": lambda: plan_of(
        [
            Block("a", 0, 36, None, operator("quaternion", 6, KEYS, minrot=True), camera=True),
            Block("b", 72, 96, None, operator("phasor", 12, KEYS, cameras=KEY_CAMERAS), camera=False),
        ]
    ),
}
"""Structures that they are written for, whatever the blocks are called."""


def random_plan(seed: int) -> AttentionPlan:
    """One to four blocks of random structures on the channels of MeRoPE's or others, under its names or others."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    batch = draw.choice([1, 2])
    ours, blocks, start = like_ours(batch), [], 0
    names = draw.sample([*SLOTS, "a", "b", "c", "d"], 4)
    for place, (first, stop) in SLOTS.items():
        if draw.random() < 0.25:
            continue
        name, block = names.pop(), ours[place]
        if place == "rotation" and draw.random() < 0.4:
            block = directions(batch)
        if draw.random() < 0.5:
            start = max(start, first)
            blocks.append(Block(name, start, stop, block.query if draw.random() < 0.7 else None, block.key, True))
            start = stop
            continue
        query, key = (_random_operator(draw, stop - first, tokens, batch) for tokens in (QUERIES, KEYS))
        if draw.random() < 0.3 and query.groups == 1:
            blocks.append(Block(name, first, stop, query, key, True))
        else:
            blocks.append(Block(name, first, stop, None, key, True))
        start = stop
    return plan_of(blocks, batch=batch)


def _random_operator(draw: random.Random, width: int, tokens: int, batch: int) -> Operator:
    """Of any form that fills so many channels; keys may differ between query cameras."""
    sizes: list[tuple[Form, int]] = [("phasor", 2), ("quaternion", 3), ("matrix", 2), ("matrix", 3), ("matrix", 4)]
    form, size = draw.choice([(form, size) for form, size in sizes if width % size == 0])
    matrices = draw.choice([count for count in range(1, width // size + 1) if width // size % count == 0])
    halves = size == 2 and matrices in (1, width // 2) and draw.random() < 0.3
    return operator(
        form,
        matrices,
        tokens,
        size,
        batch=draw.choice([1, batch]),
        heads=draw.choice([1, 1, 3]),
        groups=draw.choice([1, QUERY_CAMERAS]) if tokens == KEYS else 1,
        cameras=draw.choice([0, KEY_CAMERAS]),
        minrot=draw.random() < 0.5,
        split_halves=halves and form == "phasor",
    )
