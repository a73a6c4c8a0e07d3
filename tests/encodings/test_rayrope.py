"""RayRoPE against numbers of its public code and a dense formula; its depth interval, its gradients, its refusals."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import (
    FISHEYE,
    PINHOLE,
    assert_backends_agree,
    degenerate_cameras,
    mixed_cameras,
    random_poses,
    random_qkv,
    random_rotations,
)
from torch import Tensor

import merope
from merope import Cameras, Pinhole
from merope.encodings.depth_head import DepthHead
from merope.encodings.expected_phasors import expected_phasors
from merope.encodings.rayrope import RayRoPE
from merope.geometry.poses import rigid

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
GRID = (2, 3)
SMALL = RayRoPE(head_dim=28)


def random_content(batch: int, tokens: int, seed: int = 0) -> Tensor:  # [batch, tokens, 2] float64
    """Log depths about 1, sigmas of both signs, some beyond every clamp."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randn(batch, tokens, 2, dtype=torch.float64, generator=generator) + torch.tensor([1.0, 0.5])
    content[:, 0], content[:, -1] = torch.tensor([4.0, 0.0]), torch.tensor([-6.0, 1.0])
    return content


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", ["d", "inv_d", "asinh_d", "d_qk_only"])
def test_equals_the_public_code(name: str, backend: str) -> None:
    golden = np.load(GOLDEN / f"rayrope_{name}.npz")
    q, k, v, out, content = (torch.from_numpy(golden[key]) for key in ("q", "k", "v", "out", "raw_depth"))
    fx, fy, cx, cy = torch.from_numpy(golden["intrinsics"]).unbind(-1)
    width, height = golden["image_size"].tolist()
    cameras = Cameras(torch.from_numpy(golden["world_from_camera"]), Pinhole(fx, fy, cx, cy, width, height))
    rows, columns = golden["grid"].tolist()

    def ours(collapse_tol: float) -> Tensor:
        coding, both = str(golden["depth_coding"]), bool(golden["apply_vo"])
        encoding = RayRoPE(q.shape[-1], depth_coding=coding, collapse_tol=collapse_tol, transform_values=both)
        return merope.attend(q, k, v, encoding.plan(cameras, (rows, columns), content=content), backend=backend)

    assert (ours(0.01) - out).abs().max() < 1e-9
    if "out_no_collapse" in golden:
        assert (ours(0.0) - torch.from_numpy(golden["out_no_collapse"])).abs().max() < 1e-6
        assert (ours(0.0) - out).abs().max() > 1e-4


def dense_phasors(camera_i: np.ndarray, camera_j: np.ndarray, patch: int, content: np.ndarray) -> np.ndarray:
    """M of a token of camera j in the frame of camera i, 24 channels (one frequency), by projective matrices."""
    lift = np.eye(4)
    lift[:2, :3] = [[120 / 256, 0, 128 / 256 - 0.5], [0, 125 / 144, 70 / 144 - 0.5]]
    projection_i, projection_j = lift @ np.linalg.inv(camera_i), lift @ np.linalg.inv(camera_j)
    phases = []
    for sign in (-1, 1):
        depth = np.clip(np.exp(min(content[0] + sign * content[1], 3)), 0.01, 100)
        seen = []
        for x, y in ((0, 0), (1, 0), (0, 1)):
            u, v = (patch % 3 + x) / 3 - 0.5, (patch // 3 + y) / 2 - 0.5
            seen.append(projection_i @ np.linalg.inv(projection_j) @ [u, v, 1, 1 / depth])
        centre = np.linalg.inv(camera_i) @ camera_j @ [0, 0, 0, 1]
        directions = np.concatenate([x[:2] / (np.linalg.norm(x[:3]) + 1e-6) for x in seen])
        disparities = [min(x[3] / max(math.sqrt(x[2] ** 2 + 1e-9), 1e-4), 20) for x in seen]
        phases.append(2 * np.pi * np.concatenate((centre[:3] / 4, directions / 8, np.array(disparities) / 80)))
    steps = np.linspace(phases[0], phases[1], 20001)
    cosine, sine = (np.trapezoid(f(steps), axis=0) / 20000 for f in (np.cos, np.sin))
    return np.block([[np.diag(cosine), -np.diag(sine)], [np.diag(sine), np.diag(cosine)]])


def test_equals_the_definition_pair_by_pair_and_leaves_the_other_channels_alone() -> None:
    poses, content = random_poses(2, seed=2), random_content(1, 12)
    plan = SMALL.plan(Cameras(poses, PINHOLE), GRID, content=content)
    for a in (1, 9):
        ours = plan.operators(a).numpy()
        query = dense_phasors(poses[a // 6].numpy(), poses[a // 6].numpy(), a % 6, content[0, a].numpy())
        for b in range(12):
            key = dense_phasors(poses[a // 6].numpy(), poses[b // 6].numpy(), b % 6, content[0, b].numpy())
            assert np.abs(ours[b, :24, :24] - query @ key.T).max() < 1e-6
            assert np.array_equal(ours[b, 24:, :], np.eye(28)[24:])
            assert np.array_equal(ours[b, :, 24:], np.eye(28)[:, 24:])


def test_head_of_128_covers_120_channels() -> None:
    plan = RayRoPE().plan(Cameras(random_poses(2), PINHOLE), GRID, content=random_content(1, 12))
    assert [(block.start, block.stop) for block in plan.blocks] == [(0, 120)]
    assert plan.groups == 2


@pytest.mark.parametrize("options", [{}, {"point_depth": True}, {"collapse_tol": 0.01}, {"transform_values": False}])
def test_cross_attention_with_other_cameras_and_grid(options: dict[str, object]) -> None:
    query = Cameras(random_poses(3), PINHOLE)
    key = Cameras(random_poses(2, seed=5), Pinhole(90.0, 90.0, 64.0, 32.0, 128, 64))
    contents = {"content": random_content(1, 18), "key_content": random_content(1, 12, seed=1)}
    encoding = RayRoPE(head_dim=28, **options)  # type: ignore[arg-type]
    assert_backends_agree(encoding.plan(query, GRID, key=key, key_grid=(3, 2), key_times=[3.0, 9.0], **contents))


@pytest.mark.parametrize("batches", [(1, 1, 2), (1, 2, 2), (2, 1, 1), (2, 2, 2)])
def test_batches_of_different_clips(batches: tuple[int, int, int]) -> None:
    """Poses of queries, poses of keys and contents may each be of one clip or of two."""
    lens = Pinhole(torch.tensor([90.0, 110.0, 130.0]), 100.0, 128.0, 72.0, 256, 144)
    query_poses, key_poses = random_poses(batches[0], 3), random_poses(batches[1], 2, seed=4)
    query = Cameras(query_poses if batches[0] > 1 else query_poses[0], lens)
    key = Cameras(key_poses if batches[1] > 1 else key_poses[0], PINHOLE)
    contents = {"content": random_content(batches[2], 18), "key_content": random_content(batches[2], 12)}
    plan = SMALL.plan(query, GRID, key=key, **contents)
    assert_backends_agree(plan, batch=2)
    first = SMALL.plan(
        Cameras(query_poses[0], lens),
        GRID,
        key=Cameras(key_poses[0], PINHOLE),
        **{name: content[:1] for name, content in contents.items()},
    )
    assert (first.operators(7) - plan.operators(7)).abs().max() < 1e-12


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("extra", [0, 2])
def test_tokens_without_a_camera(batch: bool, extra: int) -> None:
    cameras = mixed_cameras(batch, PINHOLE)
    plan = SMALL.plan(cameras, GRID, extra_tokens=extra, content=random_content(2, 18 + extra))
    assert_backends_agree(plan, batch=2)
    for operator in plan.blocks[0].operators:
        rows = operator.matrices()[0, :, :, ~plan.key_has_camera[0]]
        assert torch.equal(rows, torch.eye(2, dtype=torch.float64).expand_as(rows))


@given(seed=st.integers(0, 10**6), coding=st.sampled_from(["d", "inv_d", "asinh_d"]))
def test_sigma_zero_is_point_depth_and_preserves_norms(seed: int, coding: str) -> None:
    cameras, content = Cameras(random_poses(3, seed=seed), PINHOLE), random_content(1, 18, seed)
    point = RayRoPE(28, depth_coding=coding, point_depth=True).plan(cameras, GRID, content=content)
    certain = torch.stack((content[..., 0], torch.zeros_like(content[..., 0])), dim=-1)
    zero = RayRoPE(28, depth_coding=coding).plan(cameras, GRID, content=certain)
    u = point.operators(7)
    assert (u - zero.operators(7)).abs().max() < 1e-12
    assert (u.mT @ u - torch.eye(28, dtype=torch.float64)).abs().max() < 1e-12


@given(seed=st.integers(0, 10**6), exponent=st.floats(-12, 7))
def test_norms_never_grow(seed: int, exponent: float) -> None:
    cameras = Cameras(random_poses(3, seed=seed, spread_m=10**exponent), PINHOLE)
    u = SMALL.plan(cameras, GRID, content=random_content(1, 18, seed)).operators(7)
    largest = torch.linalg.matrix_norm(u, 2)
    assert largest.max() < 1 + 1e-12
    assert torch.linalg.svdvals(u).min() < 0.999  # and it is not orthogonal


@given(seed=st.integers(0, 10**6), coding=st.sampled_from(["d", "inv_d", "asinh_d"]))
def test_world_frame_does_not_matter(seed: int, coding: str) -> None:
    poses, content = random_poses(3, seed=seed), random_content(1, 18, seed)
    world = rigid(random_rotations(seed=seed + 1), 10 * random_poses(seed=seed + 2)[:3, 3])
    encoding = RayRoPE(28, depth_coding=coding)
    q, k, v = random_qkv(1, 2, 18, 28)
    plans = [encoding.plan(Cameras(p, PINHOLE), GRID, content=content) for p in (poses, world @ poses)]
    outputs = [merope.attend(q, k, v, plan) for plan in plans]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-9


def test_scene_scale_multiplies_translations() -> None:
    poses, content = random_poses(3), random_content(1, 18)
    scaled = Cameras(rigid(poses[:, :3, :3], 0.1 * poses[:, :3, 3]), PINHOLE)
    by_option = RayRoPE(28, scene_scale=0.1).plan(Cameras(poses, PINHOLE), GRID, content=content)
    by_hand = SMALL.plan(scaled, GRID, content=content)
    plain = SMALL.plan(Cameras(poses, PINHOLE), GRID, content=content)
    assert (by_option.operators(3) - by_hand.operators(3)).abs().max() < 1e-12
    assert (by_option.operators(3) - plain.operators(3)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("backend", "coding"), [("reference", "inv_d"), ("sdpa", "d"), ("sdpa", "inv_d"), ("sdpa", "asinh_d")]
)
def test_gradients_reach_the_content(backend: str, coding: str) -> None:
    cameras = Cameras(random_poses(2), PINHOLE)
    q, k, v = random_qkv(1, 1, 5, 24)
    content = torch.randn(1, 5, 2, dtype=torch.float64).mul(0.3).add(torch.tensor([0.5, 0.4])).requires_grad_()

    def attended(content: Tensor) -> Tensor:
        plan = RayRoPE(24, depth_coding=coding).plan(cameras, (1, 2), extra_tokens=1, content=content)
        return merope.attend(q, k, v, plan, backend=backend)

    assert torch.autograd.gradcheck(attended, (content,))
    (gradient,) = torch.autograd.grad(attended(content).square().sum(), content)
    assert (gradient[:, :4].abs() > 0).all()
    assert (gradient[:, 4] == 0).all()  # a token without a camera has no depth


@pytest.mark.parametrize("name", [name for name in degenerate_cameras() if "fisheye" not in name])
def test_gradients_are_finite_in_degenerate_geometry(name: str) -> None:
    cameras = degenerate_cameras()[name]
    tokens = 3 * cameras.count
    content = random_content(1, tokens)
    content[:, 1] = torch.tensor([0.5, 0.0])  # an interval of length zero
    content[:, 2] = torch.tensor([0.0, 3.0])  # its far end on the clamp, as at the start of training
    content[:, 3] = torch.tensor([300.0, -2000.0])
    content.requires_grad_()
    for coding in ("d", "inv_d", "asinh_d"):
        plan = RayRoPE(28, depth_coding=coding).plan(cameras, (1, 3), content=content)
        out = merope.attend(*random_qkv(1, 1, tokens, 28), plan)
        (gradient,) = torch.autograd.grad(out.square().sum(), content)
        assert out.isfinite().all()
        assert gradient.isfinite().all()


def test_depth_head_starts_at_its_bias_and_learns() -> None:
    head = DepthHead(16).double()
    hidden = torch.randn(1, 12, 16, dtype=torch.float64)
    content = head(hidden)
    assert torch.equal(content, torch.tensor([0.0, 3.0], dtype=torch.float64).expand(1, 12, 2))
    plan = SMALL.plan(Cameras(random_poses(2), PINHOLE), GRID, content=content)
    merope.attend(*random_qkv(1, 1, 12, 28), plan).square().sum().backward()
    assert head.linear.weight.grad is not None
    assert (head.linear.weight.grad.abs().sum(-1) > 0).all()
    assert DepthHead(4, initial=(1.0, 0.5))(torch.zeros(1, 1, 4)).tolist() == [[[1.0, 0.5]]]


@given(knots=st.lists(st.floats(-50, 50), min_size=2, max_size=5))
def test_expected_phasor_is_the_mean_over_the_path(knots: list[float]) -> None:
    path = torch.tensor(knots, dtype=torch.float64)
    segments = torch.stack([torch.linspace(a, b, 4001, dtype=torch.float64) for a, b in pairwise(knots)])
    means = [torch.trapezoid(f(segments), dx=1 / 4000, dim=-1).mean() for f in (torch.cos, torch.sin)]
    mean = expected_phasors(path[:, None])[0]
    assert (mean - torch.stack(means)).abs().max() < 1e-4
    assert mean.norm() < 1 + 1e-12


@pytest.mark.parametrize("length", [0.0, 1e-300, 1e-160, 1e-16, 1e-12, 1e-8, 1e-4])
def test_expected_phasor_of_a_short_path_has_the_gradient_of_its_midpoint(length: float) -> None:
    path = torch.tensor([[0.7], [0.7 + length]], dtype=torch.float64).requires_grad_()
    cosine, sine = expected_phasors(path)[0]
    assert abs(float(cosine.detach()) - math.cos(0.7)) < 1e-4
    (gradient,) = torch.autograd.grad(sine, path)
    assert gradient.squeeze(-1).tolist() == pytest.approx([math.cos(0.7) / 2] * 2, abs=1e-4)


def test_lenses_other_than_a_pinhole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lens must be a Pinhole for RayRoPE, got UnifiedCamera; undistort"):
        SMALL.plan(Cameras(random_poses(2), FISHEYE), GRID, content=random_content(1, 12))


def test_content_is_required() -> None:
    with pytest.raises(ValueError, match=r"content must be of 2 channels for RayRoPE, got 0; pass the output"):
        SMALL.plan(Cameras(random_poses(2), PINHOLE), GRID)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 20}, "head_dim must be at least 24, got 20; the nearest is 24"),
        ({"depth_coding": "log"}, "depth_coding"),
        ({"scene_scale": 0.0}, "scene_scale"),
        ({"collapse_tol": -1.0}, "collapse_tol"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayRoPE(**options)  # type: ignore[arg-type]
