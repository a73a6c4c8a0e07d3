"""CRePE against the mean over finely sampled paths, its endpoint form, and what a lens does not see."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import (
    FISHEYE,
    assert_gradients_reach_the_content,
    random_content,
    random_poses,
    random_qkv,
    straight_drive,
)
from torch import Tensor

import merope
from merope import Cameras, Pinhole, UnifiedCamera
from merope.encodings.crepe import CRePE
from merope.encodings.expected_phasors import expected_phasors
from merope.geometry.poses import rigid

GRID = (2, 3)
SMALL = CRePE(head_dim=20)
WIDE = UnifiedCamera(40.0, 45.0, 128.0, 70.0, 1.0, 256, 144)  # sees everything but what is exactly behind


def coordinates(poses: Tensor, i: int, j: int, patch: int, log_range: Tensor) -> Tensor:  # [n] -> [n, 3]
    """Column / width, row / height and log range at which camera i sees the points of a ray of camera j (WIDE)."""
    u, v = (patch % 3 + 0.5) * 256 / 3, (patch // 3 + 0.5) * 144 / 2
    x, y = (u - 128) / 40, (v - 70) / 45
    ray = torch.tensor([2 * x, 2 * y, 1 - x * x - y * y], dtype=torch.float64) / (1 + x * x + y * y)  # xi = 1
    points = torch.cat((ray * log_range.exp()[:, None], torch.ones(len(log_range), 1)), dim=-1)
    seen = (torch.linalg.inv(poses[i]) @ poses[j] @ points.mT).mT[:, :3]
    distance = seen.norm(dim=-1)
    plane = seen[:, :2] / (seen[:, 2] + distance)[:, None]
    column, row = (plane[:, 0] * 40 + 128) / 256, (plane[:, 1] * 45 + 70) / 144
    return torch.stack((column.clamp(-1, 2), row.clamp(-1, 2), distance.log()), dim=-1)


def phases(coordinate: Tensor) -> Tensor:  # [n, 3] -> [n, 9] three frequencies per coordinate
    periods = torch.tensor([[1 / 16, 0.5, 4.0], [1 / 16, 0.5, 4.0], [0.25, 2.0, 16.0]], dtype=torch.float64)
    return (2 * math.pi * coordinate[:, :, None] / periods).flatten(1)


def phasor_matrix(phasor: Tensor) -> Tensor:  # [L, 2] -> [2 L, 2 L]
    return torch.block_diag(*[torch.tensor([[c, -s], [s, c]], dtype=torch.float64) for c, s in phasor.tolist()])


def segment_means(path: Tensor) -> Tensor:  # [knots, L] -> [L, 2]
    """Mean over segments of the mean phasor of each, by the quotient form that needs t₁ ≠ t₂."""
    start, end = path[:-1], path[1:]
    cosine, sine = (end.sin() - start.sin()) / (end - start), (start.cos() - end.cos()) / (end - start)
    return torch.stack((cosine.mean(0), sine.mean(0)), dim=-1)


def moderate_content(tokens: int) -> Tensor:  # [1, tokens, 2]
    return torch.stack((torch.rand(tokens) + 0.5, 0.5 * torch.randn(tokens)), dim=-1).double()[None]


@pytest.mark.parametrize("knots", [2, 8])
def test_equals_the_definition_pair_by_pair(knots: int) -> None:
    """Segments in phase between knots uniform in log range."""
    poses, content = random_poses(2, seed=3, spread_m=0.5), moderate_content(12)
    plan = CRePE(20, knots=knots).plan(Cameras(poses, WIDE), GRID, content=content)
    for a in (1, 9):
        ours = plan.operators(a)
        mu, s = content[0, a].tolist()
        own = phases(coordinates(poses, a // 6, a // 6, a % 6, torch.tensor([mu - s, mu + s], dtype=torch.float64)))
        own[:, :6] += torch.tensor([[-1e-7], [1e-7]])  # a camera sees its own patches at one pixel: t₁ = t₂
        for b in range(6 - a // 6 * 6, 12 - a // 6 * 6):  # keys of the other camera
            mu, s = content[0, b].tolist()
            knot_ranges = torch.linspace(mu - s, mu + s, knots, dtype=torch.float64)
            path = phases(coordinates(poses, a // 6, b // 6, b % 6, knot_ranges))
            expected = phasor_matrix(segment_means(own)) @ phasor_matrix(segment_means(path)).mT
            assert (ours[b, :18, :18] - expected).abs().max() < 1e-7
            assert torch.equal(ours[b, 18:], torch.eye(20, dtype=torch.float64)[18:])


def test_two_knots_are_the_endpoint_form() -> None:
    poses, content = random_poses(2, seed=3, spread_m=0.5), moderate_content(12)
    plan = CRePE(20, knots=2).plan(Cameras(poses, WIDE), GRID, content=content)
    for b in range(12):
        mu, s = content[0, b]
        ends = phases(coordinates(poses, 0, b // 6, b % 6, torch.stack((mu - s, mu + s))))
        ours = plan.blocks[0].key.table[0, 0, 0, b] * torch.tensor([1.0, -1.0])
        assert (ours - expected_phasors(ends)).abs().max() < 1e-11
        first, second = ends.unbind(-2)
        apart = (second - first).abs() > 1e-3  # RayRoPE's own form, as its code has it: differences over differences
        cosine = (second.sin() - first.sin()) / (second - first)
        sine = (first.cos() - second.cos()) / (second - first)
        assert (ours[apart] - torch.stack((cosine, sine), dim=-1)[apart]).abs().max() < 1e-11


def test_many_knots_are_the_mean_over_the_curve() -> None:
    """The phasor converges to the mean of e^{iφ} over log range, which two endpoints miss on a curved path."""
    poses, content = random_poses(2, seed=3, spread_m=0.5), moderate_content(12)
    content[..., 1] = 1.0
    log_range = content[0, 7, 0] + torch.linspace(-1, 1, 20001, dtype=torch.float64)
    path = phases(coordinates(poses, 0, 1, 1, log_range))
    exact = torch.stack((path.cos().mean(0), path.sin().mean(0)), dim=-1)
    errors = {}
    for knots in (2, 8, 64):
        plan = CRePE(20, knots=knots).plan(Cameras(poses, WIDE), GRID, content=content)
        ours = plan.blocks[0].key.table[0, 0, 0, 7] * torch.tensor([1.0, -1.0])
        errors[knots] = float((ours - exact).abs().max())
    assert errors[64] < 2e-3
    assert errors[64] < errors[8] < errors[2]


@given(scale=st.floats(0.2, 5.0).filter(lambda s: abs(s - 1) > 0.05))
def test_image_phases_see_the_world_only_relative_to_the_ranges(scale: float) -> None:
    """Scaling translations and ranges together moves no pixel and shifts every log range by the same amount."""
    poses, content = random_poses(2, seed=3, spread_m=0.5), moderate_content(12)
    scaled = Cameras(rigid(poses[:, :3, :3], scale * poses[:, :3, 3]), WIDE)
    shift = torch.tensor([math.log(scale), 0.0], dtype=torch.float64)
    plain = SMALL.plan(Cameras(poses, WIDE), GRID, content=content).operators(2)
    both = SMALL.plan(scaled, GRID, content=content + shift).operators(2)
    translations = SMALL.plan(scaled, GRID, content=content).operators(2)
    assert (plain - both).abs().max() < 1e-9
    assert (plain - translations).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_gradients_reach_the_content(backend: str) -> None:
    cameras = Cameras(random_poses(2, spread_m=0.5), WIDE)
    assert_gradients_reach_the_content(CRePE(12, knots=4), cameras, moderate_content(5), backend)


def test_finite_for_a_point_exactly_at_the_centre_of_the_query_camera() -> None:
    cameras = Cameras(straight_drive(2, step_m=1.0), Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90))
    content = torch.zeros(1, 18, 2, dtype=torch.float64, requires_grad=True)  # every token is exactly 1 m away
    plan = SMALL.plan(cameras, (3, 3), content=content)
    range_phasor = plan.blocks[0].key.table[0, 0, 1, 4, 6]  # shortest period of the log range
    angle = -2 * math.pi * math.log(0.01) / 0.25
    assert range_phasor.tolist() == pytest.approx([math.cos(angle), math.sin(angle)])
    merope.attend(*random_qkv(1, 1, 18, 20), plan).square().sum().backward()
    assert content.grad is not None
    assert content.grad.isfinite().all()


def test_head_of_128_covers_126_channels_and_keeps_the_dtype_of_the_poses() -> None:
    plan = CRePE().plan(Cameras(random_poses(2).float(), FISHEYE), GRID, content=random_content(1, 12).bfloat16())
    assert [(block.start, block.stop) for block in plan.blocks] == [(0, 126)]
    assert {operator.table.dtype for operator in plan.blocks[0].operators} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"knots": 1}, "knots"),
        ({"image_periods": (4.0, 1.0)}, "image_periods"),
        ({"range_periods": (0.0, 1.0)}, "range_periods"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CRePE(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("depth_m", "taken_at_m"), [(0.1, 0.1), (0.01, 0.05), (-3.0, 0.05)])
def test_a_perspective_query_takes_points_nearer_than_5_cm_at_5_cm(depth_m: float, taken_at_m: float) -> None:
    """A point 2 mm beside the axis at one depth lands where one in its direction from `taken_at_m` does."""
    lens, certain = Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90), torch.tensor([[[0.0, 0.0]]])
    image = slice(0, 4 * (128 // 6))  # channels of column and row

    def seen(x_m: float, z_m: float) -> Tensor:
        behind = torch.eye(4, dtype=torch.float64)[None].clone()
        behind[0, :3, 3] = torch.tensor([x_m, 0.0, z_m - 1.0])  # its middle ray, 1 m long, ends at (x, 0, z)
        query, key = Cameras(torch.eye(4, dtype=torch.float64)[None], lens), Cameras(behind, lens)
        plan = CRePE().plan(query, (1, 1), key=key, content=certain, key_content=certain)
        return plan.operator(0, 0)[image, image]

    assert torch.allclose(seen(0.002, depth_m), seen(0.002 / taken_at_m, 1.0), atol=1e-9)
