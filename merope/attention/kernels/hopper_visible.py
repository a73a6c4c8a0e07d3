"""What each query camera sees, as the Hopper kernels read it: in keys, and in tiles of keys, the most work first."""

import torch
from torch import Tensor

from merope.attention.plan import AttentionPlan

TILE = 128
"""Keys of one tile; keys are padded to a multiple."""


def visible_tables(plan: AttentionPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Intervals of keys [Vq, 4], query cameras in the order of their work [Vq], and the walks of `_walks`; int32.

    Without rows where every query sees every key.
    """
    if plan.visible_keys is None:
        empty = torch.empty((0, 4), dtype=torch.int32, device=plan.device)
        return empty, empty[:, 0].contiguous(), empty
    keys = torch.tensor([(*row[0], *(row[1:] or [(row[0][1],) * 2])[0]) for row in plan.visible_keys[:-1]])
    tiles = -(-plan.key_tokens // TILE)
    starts, stops = keys.unflatten(1, (2, 2)).unbind(-1)  # [Vq, 2]
    first = TILE * torch.arange(tiles)[:, None, None]
    seen = ((starts < stops) & (starts < first + TILE) & (stops > first)).any(-1)  # [tiles, Vq]
    order = seen.sum(0).argsort(descending=True, stable=True)
    return tuple(x.to(plan.device, torch.int32).contiguous() for x in (keys, order, _walks(seen)))  # type: ignore[return-value]


def _walks(
    seen: Tensor,  # bool [tiles, Vq]
) -> Tensor:  # [tiles, 3 + Vq]
    """For each tile of keys: its number, how many cameras see keys of it, these cameras, and the first of them again.

    Neighbouring tiles start with different cameras, so that they add to different gradients of queries.
    """
    rows = torch.zeros((seen.shape[0], 3 + seen.shape[1]), dtype=torch.int64)
    for row, tile in enumerate(seen.sum(1).argsort(descending=True, stable=True).tolist()):
        cameras = seen[tile].nonzero().squeeze(-1)
        count = len(cameras)
        rows[row, 0], rows[row, 1] = tile, count
        if count:
            turned = cameras.roll(-(tile % count))
            rows[row, 2 : 3 + count] = torch.cat((turned, turned[:1]))
    return rows
