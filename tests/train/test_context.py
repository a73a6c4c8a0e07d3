"""Attention with the query cameras split over ranks: values and gradients of the whole, also for uneven shares."""

from pathlib import Path

import torch
import torch.distributed as dist

from merope.attention.dispatch import attend
from merope.encodings import encoding
from merope.geometry.cameras import Cameras
from merope.train.context import FrameShards
from tests.scenes import PINHOLE, curved_drive
from tests.train.ranks import run_ranks

FRAMES, GRID, HEADS = 5, (2, 3), 2
TOKENS = FRAMES * GRID[0] * GRID[1]
CAMERAS = Cameras(curved_drive(FRAMES), PINHOLE)


def tensors() -> list[torch.Tensor]:  # q, k, v and the output's gradient
    dice = torch.Generator().manual_seed(3)
    return [torch.randn(1, HEADS, TOKENS, 128, generator=dice, dtype=torch.float64) for _ in range(4)]


def whole(name: str) -> list[torch.Tensor]:
    q, k, v, wanted = tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, encoding(name, head_dim=128).plan(CAMERAS, GRID))
    return [out.detach(), *torch.autograd.grad(out, leaves, wanted)]


def split(names: tuple[str, ...], folder: Path) -> None:
    dist.init_process_group("gloo")
    shards = FrameShards(dist.group.WORLD, FRAMES)
    own, times = shards.own_tokens(TOKENS), torch.arange(FRAMES)
    for name in names:
        leaves = [x[:, :, own].clone().requires_grad_() for x in tensors()[:3]]
        plan = encoding(name, head_dim=128).plan(
            CAMERAS.at(shards.own), GRID, key=CAMERAS, key_grid=GRID, times=times[shards.own], key_times=times
        )
        out = attend(leaves[0], shards.gather(leaves[1], 2), shards.gather(leaves[2], 2), plan)
        grads = torch.autograd.grad(out, leaves, tensors()[3][:, :, own])
        torch.save([out.detach(), *grads], folder / f"{name}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


def test_three_ranks_attend_like_one(tmp_path: Path) -> None:
    names = ("merope", "ucpe", "none")
    run_ranks(3, split, names, tmp_path)
    for name in names:
        parts = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(3)]
        assert [part[0].shape[2] // 6 for part in parts] == [2, 2, 1]
        for joined, expected in zip(zip(*parts, strict=True), whole(name), strict=True):
            torch.testing.assert_close(torch.cat(joined, dim=2), expected, rtol=0, atol=1e-11)
