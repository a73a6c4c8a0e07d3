"""CRePE against the mean over finely sampled paths, its endpoint form, and what a lens does not see."""

import math

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
    straight_drive,
)
from torch import Tensor

import merope
from merope import Cameras, Equirectangular, KannalaBrandt, Lens, Pinhole, UnifiedCamera
from merope.encodings.crepe import CRePE
from merope.encodings.expected_phasors import expected_phasors
from merope.geometry.poses import rigid

GRID = (2, 3)
SMALL = CRePE(head_dim=20)
WIDE = UnifiedCamera(40.0, 45.0, 128.0, 70.0, 1.0, 256, 144)  # sees everything but what is exactly behind
LENSES: dict[str, Lens] = {
    "pinhole": PINHOLE,
    "fisheye": FISHEYE,
    "kannala": KannalaBrandt(80.0, 80.0, 128.0, 72.0, 256, 144, k1=0.01),
    "panorama": Equirectangular(256, 128),
}


def random_content(batch: int, tokens: int, seed: int = 0) -> Tensor:  # [batch, tokens, 2] float64
    """Log ranges about 1, half-widths of both signs, some beyond every clamp."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randn(batch, tokens, 2, dtype=torch.float64, generator=generator) + torch.tensor([1.0, 0.5])
    content[:, 0], content[:, -1] = torch.tensor([8.0, 0.0]), torch.tensor([-6.0, 1.0])
    return content


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


@pytest.mark.parametrize("name", LENSES)
@pytest.mark.parametrize("transform_values", [True, False])
def test_cross_attention_with_other_cameras_and_grid(name: str, transform_values: bool) -> None:
    query, key = Cameras(random_poses(3), LENSES[name]), Cameras(random_poses(2, seed=5), FISHEYE)
    contents = {"content": random_content(1, 18), "key_content": random_content(1, 12, seed=1)}
    encoding = CRePE(head_dim=20, transform_values=transform_values)
    assert_backends_agree(encoding.plan(query, GRID, key=key, key_grid=(3, 2), key_times=[3.0, 9.0], **contents))


@pytest.mark.parametrize("lens_shape", [(), (3,), (2, 3)])
def test_a_batch_is_its_clips_one_by_one(lens_shape: tuple[int, ...]) -> None:
    poses, content = random_poses(2, 3), random_content(2, 18)
    focal = 80 + 40 * torch.rand(lens_shape)
    together = SMALL.plan(Cameras(poses, UnifiedCamera(focal, 90.0, 128.0, 72.0, 0.4, 256, 144)), GRID, content=content)
    assert_backends_agree(together, batch=2)
    for b in range(2):
        one = UnifiedCamera(focal[b] if len(lens_shape) == 2 else focal, 90.0, 128.0, 72.0, 0.4, 256, 144)
        alone = SMALL.plan(Cameras(poses[b], one), GRID, content=content[b : b + 1])
        assert (alone.operators(7) - together.operators(7, batch=b)).abs().max() < 1e-12


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("extra", [0, 2])
def test_tokens_without_a_camera(batch: bool, extra: int) -> None:
    cameras = mixed_cameras(batch)
    plan = SMALL.plan(cameras, GRID, extra_tokens=extra, content=random_content(2, 18 + extra))
    assert_backends_agree(plan, batch=2)
    for operator in plan.blocks[0].operators:
        rows = operator.matrices()[0, :, :, ~plan.key_has_camera[0]]
        assert torch.equal(rows, torch.eye(2, dtype=torch.float64).expand_as(rows))


@given(seed=st.integers(0, 10**6), exponent=st.floats(-12, 7), lens=st.sampled_from(sorted(LENSES)))
def test_norms_never_grow(seed: int, exponent: float, lens: str) -> None:
    cameras = Cameras(random_poses(3, seed=seed, spread_m=10**exponent), LENSES[lens])
    u = SMALL.plan(cameras, GRID, content=random_content(1, 18, seed)).operators(7)
    assert torch.linalg.matrix_norm(u, 2).max() < 1 + 1e-12
    assert torch.linalg.svdvals(u).min() < 0.999  # and it is not orthogonal


@given(seed=st.integers(0, 10**6), lens=st.sampled_from(sorted(LENSES)))
def test_world_frame_does_not_matter(seed: int, lens: str) -> None:
    poses, content = random_poses(3, seed=seed), random_content(1, 18, seed)
    world = rigid(random_rotations(seed=seed + 1), 10 * random_poses(seed=seed + 2)[:3, 3])
    q, k, v = random_qkv(1, 2, 18, 20)
    plans = [SMALL.plan(Cameras(p, LENSES[lens]), GRID, content=content) for p in (poses, world @ poses)]
    outputs = [merope.attend(q, k, v, plan) for plan in plans]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-9


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
    q, k, v = random_qkv(1, 1, 5, 12)
    content = moderate_content(5).requires_grad_()

    def attended(content: Tensor) -> Tensor:
        plan = CRePE(12, knots=4).plan(cameras, (1, 2), extra_tokens=1, content=content)
        return merope.attend(q, k, v, plan, backend=backend)

    assert torch.autograd.gradcheck(attended, (content,))
    (gradient,) = torch.autograd.grad(attended(content).square().sum(), content)
    assert (gradient[:, :4].abs() > 0).all()
    assert (gradient[:, 4] == 0).all()  # a token without a camera has no range


@pytest.mark.parametrize("name", degenerate_cameras())
def test_finite_in_degenerate_geometry(name: str) -> None:
    cameras = degenerate_cameras()[name]
    tokens = 9 * cameras.count
    content = random_content(1, tokens)
    content[:, 1] = torch.tensor([0.5, 0.0])  # an interval of length zero
    content[:, 3] = torch.tensor([300.0, -2000.0])
    content.requires_grad_()
    plan = SMALL.plan(cameras, (3, 3), content=content)
    out = merope.attend(*random_qkv(1, 1, tokens, 20), plan)
    (gradient,) = torch.autograd.grad(out.square().sum(), content)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


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
        ({"head_dim": 4}, "head_dim must be at least 6, got 4; the nearest is 6"),
        ({"knots": 1}, "knots"),
        ({"image_periods": (4.0, 1.0)}, "image_periods"),
        ({"range_periods": (0.0, 1.0)}, "range_periods"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CRePE(**options)  # type: ignore[arg-type]


def test_content_is_required() -> None:
    with pytest.raises(ValueError, match=r"content must be of 2 channels for CRePE, got 0"):
        SMALL.plan(Cameras(random_poses(2), FISHEYE), GRID)
