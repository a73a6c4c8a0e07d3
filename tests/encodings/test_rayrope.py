"""RayRoPE against numbers of its public code and a dense formula; its depth interval, its gradients, its refusals."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from golden import Golden
from hypothesis import given
from hypothesis import strategies as st
from scenes import (
    FISHEYE,
    PINHOLE,
    assert_gradients_reach_the_content,
    random_content,
    random_poses,
    random_qkv,
)
from torch import Tensor

import merope
from merope import Cameras
from merope.encodings.depth_head import DepthHead
from merope.encodings.expected_phasors import expected_phasors
from merope.encodings.rayrope import RayRoPE
from merope.geometry.poses import rigid

GRID = (2, 3)
SMALL = RayRoPE(head_dim=28)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", ["d", "inv_d", "asinh_d", "d_qk_only"])
def test_equals_the_public_code(name: str, backend: str) -> None:
    golden = Golden(f"rayrope_{name}.npz")

    def ours(collapse_tol: float) -> Tensor:
        coding, both = str(golden.numbers["depth_coding"]), bool(golden.numbers["apply_vo"])
        encoding = RayRoPE(golden.head_dim, depth_coding=coding, collapse_tol=collapse_tol, transform_values=both)
        return golden.attended(encoding, golden.pinhole, backend, content=golden["raw_depth"])

    assert (ours(0.01) - golden["out"]).abs().max() < 1e-9
    if "out_no_collapse" in golden:
        exact = ours(0.0)
        assert (exact - golden["out_no_collapse"]).abs().max() < 1e-6
        assert (exact - golden["out"]).abs().max() > 1e-4


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


@given(seed=st.integers(0, 10**6), coding=st.sampled_from(["d", "inv_d", "asinh_d"]))
def test_sigma_zero_is_point_depth_and_preserves_norms(seed: int, coding: str) -> None:
    cameras, content = Cameras(random_poses(3, seed=seed), PINHOLE), random_content(1, 18, seed)
    point = RayRoPE(28, depth_coding=coding, point_depth=True).plan(cameras, GRID, content=content)
    certain = torch.stack((content[..., 0], torch.zeros_like(content[..., 0])), dim=-1)
    zero = RayRoPE(28, depth_coding=coding).plan(cameras, GRID, content=certain)
    u = point.operators(7)
    assert (u - zero.operators(7)).abs().max() < 1e-12
    assert (u.mT @ u - torch.eye(28, dtype=torch.float64)).abs().max() < 1e-12


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
    content = torch.randn(1, 5, 2, dtype=torch.float64).mul(0.3).add(torch.tensor([0.5, 0.4]))
    encoding = RayRoPE(24, depth_coding=coding)
    assert_gradients_reach_the_content(encoding, Cameras(random_poses(2), PINHOLE), content, backend)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth_coding": "log"}, "depth_coding"),
        ({"scene_scale": 0.0}, "scene_scale"),
        ({"collapse_tol": -1.0}, "collapse_tol"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayRoPE(**options)  # type: ignore[arg-type]
