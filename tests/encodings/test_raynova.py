"""RayNova against numbers of its public code and its formula, and the world frame that it depends on."""

import pytest
import torch
from golden import Golden
from scenes import FISHEYE, PINHOLE, random_poses, random_qkv, random_rotations
from torch import Tensor

import merope
from merope import Cameras
from merope.encodings.raynova import RayNova
from merope.geometry.poses import rigid

POSITIONS = ["plucker", "centre"]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(("position", "file"), [("plucker", "raynova_plucker.npz"), ("centre", "raynova_center.npz")])
def test_equals_the_public_code(position: str, file: str, backend: str) -> None:
    golden = Golden(file)
    encoding = RayNova(golden.head_dim, position=position, seconds_per_frame=1.0)
    ours = golden.attended(encoding, golden.pinhole, backend, times=golden["timestamps"])
    assert (ours - golden["out"]).abs().max() < 1e-9


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


def test_time_reaches_tokens_without_a_camera_and_rays_do_not() -> None:
    plan = RayNova(head_dim=32).plan(Cameras(random_poses(2), PINHOLE), (1, 1), times=[0.0, 1.0], extra_tokens=1)
    u = plan.operator(1, 2)
    assert torch.equal(u[8:, 8:], torch.eye(24, dtype=torch.float64))
    assert (u[:2, :2] - pairs(torch.tensor([-10.0], dtype=torch.float64))).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": "center"}, "position must be .*got 'center';"),
        ({"seconds_per_frame": 0.0}, "seconds_per_frame must be positive"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayNova(**options)
