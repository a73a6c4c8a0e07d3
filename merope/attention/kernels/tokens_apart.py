"""Plans in which some tokens have no camera, as the Hopper kernels take them: in parts that are attended to apart.

Between two tokens of which one has no camera, camera blocks are the identity. So the kernels, which turn keys with a
camera for queries with one, get these keys alone. The cameras' queries attend to all other keys apart, under the blocks
that are not about cameras, and queries without a camera to every key (`merope.attention.kernels.prepared.cameraless`).

The kernels want as many queries of each camera. Those without a camera among them go along, and are written over.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from merope.attention.plan import AttentionPlan


@dataclass(frozen=True, eq=False)
class KeysApart:
    """Which keys the kernels turn, and the plan of the cameras' queries and all other keys."""

    order: Tensor  # int64 [Nk], keys with a camera, then those without; [0] where they lie so
    with_camera: int
    rest: AttentionPlan | None  # None: every key has a camera


def has_tokens_apart(plan: AttentionPlan) -> bool:
    """Whether camera blocks leave out some tokens."""
    return plan.has_cameraless_keys or plan.cameraless_queries.numel() > 0


def why_not_apart(plan: AttentionPlan) -> str | None:
    """Why tokens without a camera cannot be attended to apart; None when they can, or when there are none."""
    after = plan.query_tokens - _camera_queries(plan)
    if not has_tokens_apart(plan):
        # Without a camera block all tokens are alike. The kernels want as many for each camera, and none after them.
        return "they need a camera for every token, where no block is about cameras" if after else None
    if plan.visible_keys is not None:
        return "they need a camera for every token, where `sees` says what is seen"
    queries, keys = plan.query_has_camera, plan.key_has_camera
    alike = (queries == queries[:1]).all() & (keys == keys[:1]).all()
    some, late = queries.any() & keys.any(), queries[:, _camera_queries(plan) :].any()
    same, useful, misplaced = torch.stack((alike, some, late)).tolist()  # read off the device once
    if not same:
        return "they need the same tokens with a camera in every sample"
    if misplaced:
        return "they need queries with a camera among the cameras' tokens"
    return None if useful else "they need a query and a key with a camera"


def with_cameras(plan: AttentionPlan) -> AttentionPlan:
    """The plan of the cameras' queries and of keys with a camera, all as if they had one."""
    if not has_tokens_apart(plan):
        return plan
    return _part(plan, plan.key_has_camera[0].nonzero().squeeze(-1), every_block=True)


def keys_apart(plan: AttentionPlan) -> KeysApart:
    """What is to be kept of a plan that `why_not_apart` accepts."""
    flags = plan.key_has_camera[0]
    order, count = (~flags).to(torch.uint8).argsort(stable=True), int(flags.sum())
    rest = _part(plan, order[count:], every_block=False) if plan.has_cameraless_keys else None
    return KeysApart(order[:0] if bool(flags[:count].all()) else order, count, rest)


def _camera_queries(plan: AttentionPlan) -> int:
    return plan.query_cameras * plan.tokens_per_camera


def _part(
    plan: AttentionPlan,
    keys: Tensor,  # int64 [n]
    every_block: bool,  # False: those that are not about cameras
) -> AttentionPlan:
    """The plan of the cameras' queries and some keys."""
    queries = slice(0, _camera_queries(plan))

    return AttentionPlan(
        head_dim=plan.head_dim,
        blocks=tuple(
            replace(
                block,
                query=None if block.query is None else block.query.of_tokens(queries),
                key=block.key.of_tokens(keys),
            )
            for block in plan.blocks
            if every_block or not block.camera
        ),
        query_cameras=plan.query_cameras,
        tokens_per_camera=plan.tokens_per_camera,
        query_has_camera=torch.ones_like(plan.query_has_camera[:, queries]),
        key_has_camera=torch.ones_like(plan.key_has_camera[:, keys]),
        transform_values=plan.transform_values,
    )
