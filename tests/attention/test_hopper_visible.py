"""What the Hopper kernels read about visibility, on the CPU: the pairs that they visit are those that are seen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merope import AttentionPlan, Cameras, MeRoPE, Visibility
from merope.attention.kernels import hopper, hopper_tables
from merope.attention.kernels.hopper_tables import HopperTables, why_not_plan
from merope.attention.kernels.hopper_visible import TILE, visible_tables
from tests.attention.test_hopper_launches import launches, pointers  # noqa: F401  # a fixture
from tests.attention.test_hopper_tables import pair_operator
from tests.attention.test_visible_attention import visibilities
from tests.scenes import PINHOLE, curved_drive, random_poses

LAYOUTS = {
    "causal": Visibility.block_causal(7, 3),
    "window and sink": Visibility.block_causal(7, 2, last=3, sink=1),
    "clean and noisy": Visibility.teacher_forcing(4, 2),
    "keys that nobody sees": Visibility([[(0, 1)], [(5, 6)], [(0, 1), (5, 6)]]),
}


def plan_of(sees: Visibility, key_cameras: int, keys_per_camera: int = 50) -> AttentionPlan:
    """Positions alone, so that plans are small; what is seen does not depend on the blocks."""
    positions = MeRoPE(128, disparity=False, rotation=False, translation=False)
    queries = Cameras(curved_drive(len(sees.intervals)), PINHOLE)
    keys = Cameras(curved_drive(key_cameras), PINHOLE)
    return positions.plan(queries, (1, 2), key=keys, key_grid=(1, keys_per_camera), sees=sees)


def tiles_of(keys: list[int]) -> tuple[list[int], list[bool]]:
    """`SeenTiles` of the forward kernel: the tiles in its order, and which of them it masks."""
    first, split = keys[0] // TILE, -(-keys[1] // TILE) - keys[0] // TILE
    second = max(keys[2] // TILE, first + split)
    count = split + -(-keys[3] // TILE) - second
    tiles = [first + t if t < split else second + t - split for t in range(count)]
    return tiles, [t in (0, split - 1, split, count - 1) for t in range(count)]


def seen_in(keys: list[int], tile: int) -> Tensor:  # bool [128]
    """`mask_unseen`, and `unseen_rows` of the backward kernel."""
    key = TILE * tile + torch.arange(TILE)
    return ((key >= keys[0]) & (key < keys[1])) | ((key >= keys[2]) & (key < keys[3]))


def padded_mask(plan: AttentionPlan, camera: int) -> Tensor:  # bool [tiles, 128]
    seen = plan.seen_by(camera * plan.tokens_per_camera)
    return torch.nn.functional.pad(seen, (0, -plan.key_tokens % TILE)).view(-1, TILE)


def assert_kernels_visit_what_is_seen(plan: AttentionPlan) -> None:
    keys, order, walks = (x.tolist() for x in visible_tables(plan))
    assert sorted(order) == list(range(plan.query_cameras))
    masks = [padded_mask(plan, camera) for camera in range(plan.query_cameras)]
    work = []
    for camera in order:
        tiles, edges = tiles_of(keys[camera])
        work.append(len(tiles))
        assert tiles == masks[camera].any(1).nonzero().squeeze(-1).tolist()  # each once, and no other
        for tile, edge in zip(tiles, edges, strict=True):
            read = seen_in(keys[camera], tile) if edge else torch.ones(TILE, dtype=torch.bool)
            assert torch.equal(read, masks[camera][tile])
    assert work == sorted(work, reverse=True)
    assert sorted(row[0] for row in walks) == list(range(-(-plan.key_tokens // TILE)))
    counts = [row[1] for row in walks]
    assert counts == sorted(counts, reverse=True)
    for tile, count, *cameras in walks:
        assert sorted(cameras[:count]) == [camera for camera, mask in enumerate(masks) if mask[tile].any()]
        assert count == 0 or cameras[count] == cameras[0]  # what is prefetched after the last
        for camera in cameras[:count]:
            assert torch.equal(seen_in(keys[camera], tile), masks[camera][tile])


@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_that_are_visited(name: str) -> None:
    farthest = max(stop for row in LAYOUTS[name].intervals for _, stop in row)
    assert_kernels_visit_what_is_seen(plan_of(LAYOUTS[name], farthest + 1))


@given(data=st.data(), keys_per_camera=st.sampled_from([1, 31, 64, 128, 200]))
def test_pairs_that_are_visited_at_random(data: st.DataObject, keys_per_camera: int) -> None:
    plan = plan_of(data.draw(visibilities(3, 5)), 5, keys_per_camera)
    if plan.visible_keys is not None:
        assert_kernels_visit_what_is_seen(plan)


def test_neighbouring_tiles_start_with_different_cameras() -> None:
    walks = visible_tables(plan_of(Visibility.block_causal(6, 6, last=6, cached=6), 12, 128))[2]
    assert len(set(walks[:, 2].tolist())) == 6


@pytest.mark.parametrize("direction_scale", [None, 50.0])
def test_plans_with_visibility_take_the_kernel_and_keep_their_operators(direction_scale: float | None) -> None:
    encoding, cameras = MeRoPE(128, direction_scale=direction_scale), Cameras(random_poses(4), PINHOLE)
    plan = encoding.plan(cameras, (1, 3), sees=Visibility.block_causal(4, 2))
    assert why_not_plan(plan) is None
    tables = hopper_tables.make_tables(plan)
    assert tables.visible
    torch.testing.assert_close(pair_operator(plan, tables, 7, 2, 0), plan.operator(7, 2), rtol=0, atol=3e-3)
    assert not hopper_tables.make_tables(encoding.plan(cameras, (1, 3))).visible


def test_three_intervals_are_refused() -> None:
    positions = MeRoPE(128, disparity=False, rotation=False, translation=False)
    cameras, sees = Cameras(curved_drive(5), PINHOLE), Visibility([[(0, 1), (2, 3)]])
    plan = positions.plan(cameras.at(slice(0, 1)), (1, 2), key=cameras, key_extra_tokens=1, sees=sees)
    assert "two intervals" in (why_not_plan(plan) or "")


def launched(tables: HopperTables, cameras: int) -> None:
    q, k, v, grad = torch.randn(4, 1, 2, 6 * cameras, 128).bfloat16()
    out, lse = hopper._forward(q, k, v, tables.tensors(), cameras)
    hopper._backward(grad.transpose(1, 2).contiguous(), q, k, v, out, lse, tables.tensors(), cameras)


def test_kernels_are_given_what_is_seen(launches: dict) -> None:  # noqa: F811
    cameras = Cameras(random_poses(4), PINHOLE)
    tables = hopper_tables.make_tables(MeRoPE(128).plan(cameras, (2, 3), sees=Visibility.block_causal(4, 2)))
    launched(tables, 4)
    pointers(launches["attend_bf16"][3], seen=tables.seen_keys, camera_order=tables.camera_order)
    pointers(launches["gradients_bf16"][3], seen=tables.seen_keys, walks=tables.walks)
    assert tables.walks.shape == (1, 7)
