"""attend: backends against the definition, in every shape, dtype and mixture of tokens."""

import pytest
import torch
from scenes import (
    FISHEYE,
    PINHOLE,
    assert_backends_agree,
    curved_drive,
    degenerate_cameras,
    mixed_cameras,
    random_poses,
    random_qkv,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import merope
from merope import GTA, Cameras, MeRoPE
from tests.foreign_plans import ACCEPTED, FOREIGN

GRID = (2, 3)
ENCODINGS = {
    "merope": MeRoPE(),
    "transport": MeRoPE(anchor_frame="transport"),
    "no disparity": MeRoPE(disparity=False),
    "rotation only": MeRoPE(disparity=False, translation=False),
    "192": MeRoPE(head_dim=192),
    "gta": GTA(),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_self_attention(name: str) -> None:
    assert_backends_agree(ENCODINGS[name].plan(Cameras(random_poses(4), PINHOLE), GRID))


@pytest.mark.parametrize("name", ENCODINGS)
def test_cross_attention_with_other_cameras_grid_and_times(name: str) -> None:
    query, key = Cameras(random_poses(3), PINHOLE), Cameras(random_poses(2, seed=5), FISHEYE)
    plan = ENCODINGS[name].plan(
        query, GRID, key=key, key_grid=(3, 2), times=[0.0, 0.5, 7.0], key_times=torch.tensor([100.0, 101.25])
    )
    assert_backends_agree(plan)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("query_batch", [1, 2])
@pytest.mark.parametrize("key_batch", [1, 2])
def test_batches_of_different_clips(name: str, query_batch: int, key_batch: int) -> None:
    lens = merope.Pinhole(torch.tensor([90.0, 110.0, 130.0]), 100.0, 128.0, 72.0, 256, 144)
    query = Cameras(random_poses(query_batch, 3) if query_batch > 1 else random_poses(3), lens)
    key = Cameras(random_poses(key_batch, 2, seed=4) if key_batch > 1 else random_poses(2, seed=4), FISHEYE)
    assert_backends_agree(ENCODINGS[name].plan(query, (1, 2), key=key), batch=2)


@pytest.mark.parametrize("with_times", [False, True])
def test_a_batch_is_its_clips_one_by_one(with_times: bool) -> None:
    poses, times = random_poses(2, 3), 10 * torch.rand(2, 3, dtype=torch.float64)
    lens = merope.UnifiedCamera(torch.rand(2, 3) + 80, 90.0, 128.0, 72.0, torch.rand(2, 3), 256, 144)
    q, k, v = random_qkv(2, 2, 18, 128)
    together = MeRoPE().plan(Cameras(poses, lens), GRID, times=times if with_times else None)
    out = merope.attend(q, k, v, together)
    for b in range(2):
        one = merope.UnifiedCamera(lens.fx[b], 90.0, 128.0, 72.0, lens.xi[b], 256, 144)
        plan = MeRoPE().plan(Cameras(poses[b], one), GRID, times=times[b] if with_times else None)
        alone = merope.attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], plan)
        assert (alone - out[b : b + 1]).abs().max() < 1e-12


@pytest.mark.parametrize("name", [*FOREIGN, *ACCEPTED])
def test_foreign_plans(name: str) -> None:
    plan = (FOREIGN | ACCEPTED)[name]()
    q, k, v = random_qkv(plan.batch, 3, plan.query_tokens, plan.head_dim, plan.key_tokens)
    exact = merope.attend(q, k, v, plan, backend="reference")
    torch.testing.assert_close(merope.attend(q, k, v, plan, backend="sdpa"), exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", degenerate_cameras())
def test_degenerate_geometry(name: str) -> None:
    assert_backends_agree(MeRoPE().plan(degenerate_cameras()[name], (1, 3)))


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("extra", [0, 3])
def test_tokens_without_a_camera(name: str, batch: bool, extra: int) -> None:
    plan = ENCODINGS[name].plan(mixed_cameras(batch), (1, 2), extra_tokens=extra)
    assert 0 < int((~plan.key_has_camera).sum()) < plan.key_has_camera.numel()
    assert_backends_agree(plan, batch=2)


def test_pairs_with_a_token_without_a_camera_are_identity_on_camera_blocks() -> None:
    plan = MeRoPE().plan(Cameras(random_poses(2), PINHOLE), GRID, extra_tokens=2)
    for a, b in ((0, 12), (13, 3), (12, 13)):
        u = plan.operator(a, b)
        assert torch.equal(u[:96, :96], torch.eye(96, dtype=torch.float64))
    assert not torch.allclose(plan.operator(0, 7)[:96, :96], torch.eye(96, dtype=torch.float64), atol=0.1)
    # The native band still relates positions: tokens 4 (row 1, column 1) and 12 (position 0) differ there.
    assert not torch.allclose(plan.operator(4, 12)[96:, 96:], torch.eye(32, dtype=torch.float64), atol=0.1)


def test_cross_attention_to_keys_that_are_all_without_a_camera() -> None:
    query, key = Cameras(random_poses(2), PINHOLE), Cameras(random_poses(2), PINHOLE, torch.tensor([False, False]))
    plan = MeRoPE(partition=(36, 36, 56 - 2, 2), native_split=(0, 0, 2)).plan(query, (1, 1), key=key)
    q, k, v = random_qkv(1, 2, 2, 128)
    assert (merope.attend(q, k, v, plan) - scaled_dot_product_attention(q, k, v)).abs().max() < 1e-12


def test_tokens_without_a_camera_where_no_block_is_about_cameras() -> None:
    cameras = Cameras(random_poses(2), PINHOLE)
    off = MeRoPE(disparity=False, rotation=False, translation=False)
    for encoding in (merope.encoding("none"), off):
        assert_backends_agree(encoding.plan(cameras, GRID, extra_tokens=2))


def test_no_encoding_and_one_camera_are_plain_attention() -> None:
    q, k, v = random_qkv(2, 2, 6, 128)
    plain = scaled_dot_product_attention(q, k, v)
    none = merope.encoding("none").plan(Cameras(random_poses(2, 1), PINHOLE), GRID)
    assert (merope.attend(q, k, v, none) - plain).abs().max() < 1e-12
    assert (merope.attend(q, k, v, none, backend="reference") - plain).abs().max() < 1e-12
    translation_only = MeRoPE(disparity=False, rotation=False, partition=(36, 36, 54, 2), native_split=(2, 0, 0))
    one = translation_only.plan(Cameras(random_poses(1), PINHOLE), GRID)
    assert (merope.attend(q, k, v, one) - plain).abs().max() < 1e-12


def plain_error(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> float:
    """Error of plain PyTorch attention in this dtype against float64."""
    exact = scaled_dot_product_attention(q, k, v)
    rounded = scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype))
    return float((rounded.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["merope", "transport", "192"])
def test_error_is_within_twice_that_of_plain_attention(name: str, dtype: torch.dtype) -> None:
    plan = ENCODINGS[name].plan(Cameras(curved_drive(6), PINHOLE), (3, 5))
    q, k, v = (x.to(dtype).double() for x in random_qkv(1, 2, plan.query_tokens, plan.head_dim))
    exact = merope.attend(q, k, v, plan)
    ours = merope.attend(q.to(dtype), k.to(dtype), v.to(dtype), plan)
    assert ours.dtype == dtype
    assert float((ours.double() - exact).norm() / exact.norm()) < 2 * plain_error(q, k, v, dtype)


def test_float32_poses_make_float32_plans_and_keep_their_precision() -> None:
    poses = curved_drive(4)
    single = MeRoPE().plan(Cameras(poses.float(), PINHOLE), GRID)
    double = MeRoPE().plan(Cameras(poses, PINHOLE), GRID)
    assert {t.dtype for name, t in single.tensors().items() if "_has_" not in name and ".rows" not in name} == {
        torch.float32
    }
    assert {t.dtype for name, t in double.to(torch.float32).tensors().items() if name.endswith("key")} == {
        torch.float32
    }
    q, k, v = random_qkv(1, 2, 24, 128)
    exact = merope.attend(q, k, v, double)
    error = (merope.attend(q.float(), k.float(), v.float(), single).double() - exact).norm() / exact.norm()
    assert error < 1e-5


def test_plan_prints_and_lists_its_tensors() -> None:
    plan = MeRoPE().plan(Cameras(random_poses(2), PINHOLE), GRID)
    assert "disparity" in str(plan)
    assert "12 query × 12 key tokens" in str(plan)
    same, other = (MeRoPE().plan(Cameras(random_poses(2, seed=s), PINHOLE), GRID).tensors() for s in (0, 1))
    mine = plan.tensors()
    assert all(torch.equal(mine[name], same[name]) for name in mine)
    assert not all(torch.equal(mine[name], other[name]) for name in mine)
