"""PRoPE against numbers of its public code, its formula, and GTA."""

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
    straight_drive,
)
from torch import Tensor

import merope
from merope import GTA, Cameras, Pinhole
from merope.encodings.prope import PRoPE
from merope.geometry.poses import rigid

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "prope.npz"
ZOOM = Pinhole(torch.tensor([90.0, 110.0, 130.0]), 100.0, 128.0, torch.tensor([72.0, 70.0, 60.0]), 256, 144)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_equals_the_public_code(backend: str) -> None:
    golden = np.load(GOLDEN)
    q, k, v, out = (torch.from_numpy(golden[name]) for name in ("q", "k", "v", "out"))
    rows, columns = golden["grid"].tolist()
    lens = Pinhole(*torch.from_numpy(golden["intrinsics"]).unbind(-1), *golden["image_size"].tolist())
    cameras = Cameras(torch.from_numpy(golden["world_from_camera"]), lens)
    plan = PRoPE(head_dim=q.shape[-1]).plan(cameras, (rows, columns))
    assert (merope.attend(q, k, v, plan, backend=backend) - out).abs().max() < 1e-9


def projection(pose: Tensor, camera: int, scale: float) -> Tensor:  # [4, 4]
    """lift(K) · inverse of the scaled pose for one camera of ZOOM, by general matrix algebra."""
    scaled = pose.clone()
    scaled[:3, 3] *= scale
    k = torch.eye(4, dtype=torch.float64)
    k[0, 0], k[1, 1] = ZOOM.fx[camera].double() / 256, 100 / 144
    k[0, 2], k[1, 2] = 128 / 256 - 0.5, ZOOM.cy[camera].double() / 144 - 0.5
    return k @ torch.linalg.inv(scaled)


def axis_turn(query: int, key: int, channels: int) -> Tensor:  # [channels, channels]
    """Rot(ω_f · (query − key)) that pairs channel f with f + channels/2, ω_f = 100^(−2f / channels)."""
    half = channels // 2
    angle = (query - key) * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cosine, sine = torch.diag(angle.cos()), torch.diag(angle.sin())
    return torch.cat((torch.cat((cosine, -sine), dim=1), torch.cat((sine, cosine), dim=1)))


def test_operator_is_its_formula_for_every_pair() -> None:
    poses, (rows, columns) = random_poses(3), (2, 3)
    plan = PRoPE(head_dim=16, translation_scale=0.3).plan(Cameras(poses, ZOOM), (rows, columns))
    tokens = [(i, row, column) for i in range(3) for row in range(rows) for column in range(columns)]
    for a, (i, query_row, query_column) in enumerate(tokens):
        operators = plan.operators(a)
        for b, (j, key_row, key_column) in enumerate(tokens):
            pair = projection(poses[i], i, 0.3) @ torch.linalg.inv(projection(poses[j], j, 0.3))
            turns = axis_turn(query_column, key_column, 4), axis_turn(query_row, key_row, 4)
            assert (operators[b] - torch.block_diag(pair, pair, *turns)).abs().max() < 1e-11


@pytest.mark.parametrize("lens", [PINHOLE, FISHEYE])
def test_without_intrinsics_it_is_gta(lens: merope.Lens) -> None:
    cameras = Cameras(random_poses(2, 3), lens)
    q, k, v = random_qkv(2, 2, 18, 16)
    prope, gta = (
        merope.attend(q, k, v, encoding.plan(cameras, (2, 3)))
        for encoding in (PRoPE(16, intrinsics=False, translation_scale=0.5), GTA(16, translation_scale=0.5))
    )
    assert torch.equal(prope, gta)


def test_intrinsics_matter_and_per_camera_lenses_are_their_own() -> None:
    poses = random_poses(3)
    zoom, wide = (PRoPE(16).plan(Cameras(poses, lens), (1, 1)).operator(0, 1) for lens in (ZOOM, PINHOLE))
    assert (zoom - wide).abs().max() > 1e-2


def test_other_lenses_are_refused_on_either_side() -> None:
    pinhole, fisheye = Cameras(random_poses(2), PINHOLE), Cameras(random_poses(2), FISHEYE)
    for query, key in ((fisheye, pinhole), (pinhole, fisheye)):
        with pytest.raises(ValueError, match=r"lens must be a Pinhole.*got UnifiedCamera; undistort"):
            PRoPE().plan(query, (2, 3), key=key)


@pytest.mark.parametrize("batch", [1, 2])
def test_backends_agree(batch: int) -> None:
    query = mixed_cameras(batch == 2, ZOOM)
    key = Cameras(random_poses(batch, 2, seed=5), Pinhole(100 + torch.rand(batch, 2), 90.0, 128.0, 72.0, 256, 144))
    for plan in (
        PRoPE(16).plan(query, (2, 3), extra_tokens=2),
        PRoPE(16).plan(query, (2, 3), key=key, key_grid=(3, 2), key_times=[100.0, 101.5], key_extra_tokens=1),
    ):
        assert not plan.query_has_camera.all()
        assert_backends_agree(plan, batch=2)


@given(seed=st.integers(0, 10**6), exponent=st.floats(-2, 3))
def test_any_rigid_change_of_the_world_changes_nothing(seed: int, exponent: float) -> None:
    poses = random_poses(3, seed=seed)
    world = rigid(random_rotations(seed=seed + 1), 10**exponent * random_poses(seed=seed + 2)[:3, 3])
    q, k, v = random_qkv(1, 2, 18, 16)
    outputs = [merope.attend(q, k, v, PRoPE(16).plan(Cameras(p, ZOOM), (2, 3))) for p in (poses, world @ poses)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-9


def test_values_grow_with_the_baseline() -> None:
    value = torch.ones(128, dtype=torch.float64)
    norms = [
        (PRoPE().plan(Cameras(straight_drive(2, step_m), PINHOLE), (1, 1)).operator(0, 1) @ value).norm()
        for step_m in (1e3, 1e4)
    ]
    assert float(norms[1] / norms[0]) == pytest.approx(10, rel=1e-2)


@pytest.mark.parametrize("name", [name for name, c in degenerate_cameras().items() if isinstance(c.lens, Pinhole)])
def test_degenerate_geometry_is_finite(name: str) -> None:
    cameras = degenerate_cameras()[name]
    poses = cameras.world_from_camera.clone().requires_grad_()
    focal = torch.tensor(120.0, dtype=torch.float64, requires_grad=True)
    plan = PRoPE(16).plan(Cameras(poses, Pinhole(focal, focal, 75.0, 45.0, 150, 90)), (3, 3))
    out = merope.attend(*random_qkv(1, 1, plan.query_tokens, 16), plan)
    gradients = torch.autograd.grad(out.square().sum(), (poses, focal))
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 60}, "head_dim must be a multiple of 8, got 60; the nearest is 64"),
        ({"translation_scale": float("inf")}, "translation_scale must be finite.*got inf;"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PRoPE(**options)
