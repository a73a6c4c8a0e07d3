"""RayNova against numbers of its public code and its formula, and the world frame that it depends on."""

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
from merope.encodings.raynova import RayNova
from merope.geometry.poses import rigid

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
POSITIONS = ["plucker", "centre"]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(("position", "file"), [("plucker", "raynova_plucker.npz"), ("centre", "raynova_center.npz")])
def test_equals_the_public_code(position: str, file: str, backend: str) -> None:
    golden = np.load(GOLDEN / file)
    q, k, v, out = (torch.from_numpy(golden[name]) for name in ("q", "k", "v", "out"))
    rows, columns = golden["grid"].tolist()
    lens = Pinhole(*torch.from_numpy(golden["intrinsics"]).unbind(-1), *golden["image_size"].tolist())
    cameras = Cameras(torch.from_numpy(golden["world_from_camera"]), lens)
    encoding = RayNova(head_dim=q.shape[-1], position=position, seconds_per_frame=1.0)
    plan = encoding.plan(cameras, (rows, columns), times=torch.from_numpy(golden["timestamps"]))
    assert (merope.attend(q, k, v, plan, backend=backend) - out).abs().max() < 1e-9


def pairs(angle: Tensor) -> Tensor:  # [L] -> [2 L, 2 L]
    return torch.block_diag(
        *[torch.stack((torch.stack((a.cos(), -a.sin())), torch.stack((a.sin(), a.cos())))) for a in angle]
    )


@pytest.mark.parametrize("position", POSITIONS)
def test_operator_is_its_formula_for_every_pair(position: str) -> None:
    """Head of 32: 4 pairs of time, then 2 pairs for each of the six coordinates."""
    cameras, grid, times = Cameras(random_poses(2), FISHEYE), (1, 2), [0.5, 3.0]
    plan = RayNova(head_dim=32, position=position).plan(cameras, grid, times=times)
    rays, _ = cameras.rays(grid)

    def phases(token: int) -> Tensor:  # [16]
        pose, ray = cameras.world_from_camera[token // 2], rays[token // 2, token % 2]
        direction, centre = pose[:3, :3] @ ray, pose[:3, 3]
        where = centre if position == "centre" else torch.linalg.cross(centre, direction)
        time = 30 * times[token // 2] / 3 * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        ladder = torch.tensor([1.0, 0.1], dtype=torch.float64)
        return torch.cat((time, *(50 * x * ladder for x in direction), *(2 * x * ladder for x in where)))

    for a in range(4):
        for b in range(4):
            assert (plan.operator(a, b) - pairs(phases(b) - phases(a))).abs().max() < 1e-12


@pytest.mark.parametrize("position", POSITIONS)
def test_the_world_frame_matters(position: str) -> None:
    """Property (A) of the paper's Table 1 fails: turning or moving the world changes the output."""
    poses = random_poses(3)
    centre = torch.zeros(3, dtype=torch.float64)
    turned = rigid(random_rotations(seed=1), centre) @ poses
    moved = rigid(torch.eye(3, dtype=torch.float64), centre + torch.tensor([1.0, 2.0, 3.0])) @ poses
    q, k, v = random_qkv(1, 2, 18, 32)
    encoding = RayNova(head_dim=32, position=position)
    here, there, aside = (
        merope.attend(q, k, v, encoding.plan(Cameras(p, PINHOLE), (2, 3))) for p in (poses, turned, moved)
    )
    assert (here - there).abs().max() > 0.1
    # A shift adds the same phase to every centre, and a different one to every moment.
    if position == "plucker":
        assert (here - aside).abs().max() > 0.1
    else:
        assert (here - aside).abs().max() < 1e-9


@given(seed=st.integers(0, 10**6), exponent=st.floats(-3, 6), position=st.sampled_from(POSITIONS))
def test_orthogonal_for_any_cameras(seed: int, exponent: float, position: str) -> None:
    cameras = Cameras(random_poses(2, seed=seed, spread_m=10**exponent), FISHEYE)
    u = RayNova(head_dim=32, position=position).plan(cameras, (2, 2)).operators(0)
    assert (u.mT @ u - torch.eye(32, dtype=torch.float64)).abs().max() < 1e-12


def test_time_reaches_tokens_without_a_camera_and_rays_do_not() -> None:
    plan = RayNova(head_dim=32).plan(Cameras(random_poses(2), PINHOLE), (1, 1), times=[0.0, 1.0], extra_tokens=1)
    u = plan.operator(1, 2)
    assert torch.equal(u[8:, 8:], torch.eye(24, dtype=torch.float64))
    assert (u[:2, :2] - pairs(torch.tensor([-10.0], dtype=torch.float64))).abs().max() < 1e-12


@pytest.mark.parametrize("transform_values", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_backends_agree(batch: int, transform_values: bool) -> None:
    query = mixed_cameras(batch == 2)
    key = Cameras(random_poses(batch, 2, seed=5), FISHEYE)
    encoding = RayNova(head_dim=16, transform_values=transform_values)
    for plan in (
        encoding.plan(query, (3, 4), extra_tokens=2),
        encoding.plan(query, (3, 4), key=key, key_grid=(2, 3), key_times=[100.0, 101.5], key_extra_tokens=1),
    ):
        assert not plan.query_has_camera.all()
        assert_backends_agree(plan, batch=2)


@pytest.mark.parametrize("name", degenerate_cameras())
def test_degenerate_geometry_is_finite(name: str) -> None:
    cameras = degenerate_cameras()[name]
    poses = cameras.world_from_camera.clone().requires_grad_()
    plan = RayNova(head_dim=16).plan(Cameras(poses, cameras.lens), (3, 3))
    out = merope.attend(*random_qkv(1, 1, plan.query_tokens, 16), plan)
    (gradient,) = torch.autograd.grad(out.square().sum(), poses)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 100}, "head_dim must be a multiple of 16, got 100; the nearest is 96"),
        ({"position": "center"}, "position must be .*got 'center';"),
        ({"seconds_per_frame": 0.0}, "seconds_per_frame must be positive"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayNova(**options)
