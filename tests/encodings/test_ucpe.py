"""UCPE against numbers of its public code, its formula, GTA, and its singularity."""

import math

import pytest
import torch
from golden import Golden
from hypothesis import given
from hypothesis import strategies as st
from scenes import FISHEYE, PINHOLE, random_poses, random_qkv
from torch import Tensor

import merope
from merope import GTA, Cameras, Equirectangular, Pinhole, UnifiedCamera
from merope.encodings.ucpe import UCPE, VERTICAL_ZONE, level_frames
from merope.geometry.poses import rigid

PANORAMA = Equirectangular(80, 40)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("file", ["ucpe_relray.npz", "ucpe_relray_center.npz"])
def test_equals_the_public_code(file: str, backend: str) -> None:
    golden = Golden(file)
    lens = UnifiedCamera(*golden["intrinsics"].unbind(-1), golden["xi"], *golden["image_size"].tolist())
    encoding = UCPE(golden.head_dim, ray_offset=tuple(golden["ray_offset"].tolist()))
    assert (golden.attended(encoding, lens, backend) - golden["out"]).abs().max() < 1e-9


def world_to_ray(pose: Tensor, ray: Tensor) -> Tensor:  # [4, 4]
    """D in world axes, as the method writes it: z = R d, x = unit(R e_y × z), y = z × x."""
    z = pose[:3, :3] @ ray
    x = torch.linalg.cross(pose[:3, 1], z)
    x = x / x.norm()
    return torch.linalg.inv(rigid(torch.stack((x, torch.linalg.cross(z, x), z), dim=-1), pose[:3, 3]))


@pytest.mark.parametrize("lens", [PINHOLE, FISHEYE, PANORAMA])
def test_operator_is_its_formula_for_every_pair(lens: merope.Lens) -> None:
    cameras, grid = Cameras(random_poses(2), lens), (2, 3)
    plan, image_plane = UCPE(16).plan(cameras, grid), GTA(16).plan(cameras, grid)
    rays, valid = cameras.rays(grid)
    assert valid.all()
    frames = [world_to_ray(cameras.world_from_camera[i], rays[i, p]) for i in range(2) for p in range(6)]
    for a, query in enumerate(frames):
        expected = torch.stack([torch.block_diag(*[query @ torch.linalg.inv(key)] * 2) for key in frames])
        assert (plan.operators(a)[:, :8, :8] - expected).abs().max() < 1e-11
        assert (plan.operators(a) - image_plane.operators(a))[:, 8:, 8:].abs().max() < 1e-14


def test_on_the_optical_axis_it_is_gta() -> None:
    cameras = Cameras(random_poses(3), Pinhole(120.0, 120.0, 75.0, 45.0, 150, 90))
    ours, gta = (method(translation_scale=0.4).plan(cameras, (1, 1)) for method in (UCPE, GTA))
    for token in range(3):
        assert (ours.operators(token) - gta.operators(token)).abs().max() < 1e-12


def unit(latitude: float, longitude: float) -> Tensor:  # [3]
    level = math.cos(latitude)
    ray = [level * math.sin(longitude), math.sin(latitude), level * math.cos(longitude)]
    return torch.tensor(ray, dtype=torch.float64)


def assert_rotations(frames: Tensor) -> None:
    assert (frames.mT @ frames - torch.eye(3, dtype=torch.float64)).abs().max() < 1e-12
    assert (torch.linalg.det(frames) - 1).abs().max() < 1e-12


@given(
    exponent=st.floats(-9, 0),
    sign=st.sampled_from([-1, 1]),
    longitude=st.floats(-math.pi, math.pi),
)
def test_frames_are_rotations_for_any_ray(exponent: float, sign: int, longitude: float) -> None:
    ray = unit(sign * (math.pi / 2 - 10**exponent), longitude).requires_grad_()
    frame = level_frames(ray)
    assert_rotations(frame.detach())
    assert (frame[:, 2] - ray).abs().max() < 2 * VERTICAL_ZONE
    assert frame[1, 0] == 0  # x is level in the camera
    (gradient,) = torch.autograd.grad((frame * torch.randn(3, 3)).sum(), ray)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_vertical_rays_have_a_fixed_frame(sign: float) -> None:
    exact = level_frames(torch.tensor([0.0, sign, 0.0], dtype=torch.float64))
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, sign], [0.0, -sign, 0.0]], dtype=torch.float64)
    assert torch.equal(exact, expected)
    near = unit(sign * (math.pi / 2 - 1e-7), 2.0)
    assert torch.equal(level_frames(near), exact)
    outside = level_frames(unit(sign * (math.pi / 2 - 1e-5), 2.0))
    assert (outside - exact).abs().max() > 0.5  # the singularity is the method's own


def test_a_panorama_seen_at_its_poles_is_finite_and_rigid() -> None:
    """Rows of rays that start exactly at −y: values, gradients and rigidity."""
    poses = random_poses(3).requires_grad_()
    cameras = Cameras(poses, PANORAMA)
    plan = UCPE(16, ray_offset=(0.5, 0.0)).plan(cameras, (3, 4))
    out = merope.attend(*random_qkv(1, 1, plan.query_tokens, 16), plan)
    (gradient,) = torch.autograd.grad(out.square().sum(), poses)
    assert out.isfinite().all()
    assert gradient.isfinite().all()
    assert_rotations(plan.operators(0).detach()[:, :3, :3])


def test_a_ray_beyond_the_lens_takes_the_frame_of_its_camera() -> None:
    """The corner of the first patch is outside the image circle, its centre is not."""
    lens = UnifiedCamera(110.0, 110.0, 75.0, 45.0, 1.8, 150, 90)
    cameras, corner = Cameras(random_poses(2), lens), torch.zeros(1, 2, dtype=torch.float64)
    assert not lens.unproject(corner)[1].any()
    assert cameras.rays((3, 3))[1][:, 0].all()
    ours, gta = (e.plan(cameras, (3, 3)).operator(0, 9)[:8, :8] for e in (UCPE(16, ray_offset=(0.0, 0.0)), GTA(16)))
    assert (ours - gta).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray_offset": (0.5, 1.5)}, r"ray_offset must be two fractions.*got \(0.5, 1.5\);"),
        ({"translation_scale": -0.1}, "translation_scale must be finite"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UCPE(**options)
