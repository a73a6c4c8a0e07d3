"""Lens models: round trips, agreement with OpenCV and COLMAP, batches, gradients and refusals."""

import math
import re
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pycolmap
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lens_zoo import (
    FISHEYE,
    FOCAL,
    LENSES,
    RATIONAL,
    SIZE,
    UNIFIED_FOV,
    H,
    W,
    batched,
    each_lens,
    parameter_names,
    points_in_view,
    random_pixels,
    random_points,
    typical_lens,
)
from torch import Tensor

from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lens_batches import picked, repeated
from merope.geometry.lenses import DoubleSphere, Equirectangular, ExtendedUnified, Lens, UnifiedCamera


def assert_pixels_survive(lens: Lens, pixels: Tensor) -> Tensor:
    rays, valid = lens.unproject(pixels)
    back, seen = lens.project(rays * 3.7)
    torch.testing.assert_close(rays.norm(dim=-1), torch.ones_like(rays[..., 0]), rtol=0.0, atol=1e-12)
    assert seen[valid].all()
    torch.testing.assert_close(back[valid], pixels[valid], rtol=0.0, atol=5e-12)
    return valid


def assert_points_survive(lens: Lens, points: Tensor, atol: float) -> None:
    pixels, seen = lens.project(points)
    rays, valid = lens.unproject(pixels)
    assert seen.all()
    assert valid.all()
    torch.testing.assert_close(rays, torch.nn.functional.normalize(points, dim=-1), rtol=0.0, atol=atol)


@each_lens
def test_pixels_survive_the_round_trip(lens: Lens) -> None:
    valid = assert_pixels_survive(lens, random_pixels(4000))
    assert valid.double().mean() > 0.4


@each_lens
def test_directions_survive_the_round_trip(lens: Lens) -> None:
    points = random_points(4000)
    _, seen = lens.project(points)
    assert seen.sum() > 1000
    # Next to the rim a pixel moves with the square of the angle, which costs half the digits of the angle.
    assert_points_survive(lens, points[seen], atol=5e-12)


@settings(max_examples=40, deadline=None)
@given(xi=st.sampled_from(sorted(UNIFIED_FOV)) | st.floats(0.0, 2.5), fov=st.floats(20.0, 200.0))
def test_unified_round_trip_up_to_200_degrees(xi: float, fov: float) -> None:
    reach = 2.0 * math.degrees(math.acos(-min(xi, 1.0 / max(xi, 1e-9))))
    fov = min(fov, 0.95 * reach)
    lens = UnifiedCamera.from_fov(fov, xi, W, H)
    assert_pixels_survive(lens, random_pixels(200))
    assert_points_survive(lens, points_in_view(200, fov / 2.0), atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(alpha=st.floats(0.0, 1.0), beta=st.floats(0.3, 3.0), xi=st.floats(-0.8, 1.0))
def test_extended_and_double_sphere_round_trips(alpha: float, beta: float, xi: float) -> None:
    for lens in (
        ExtendedUnified(**FOCAL, alpha=alpha, beta=beta, **SIZE),
        DoubleSphere(**FOCAL, xi=xi, alpha=alpha, **SIZE),
    ):
        assert_pixels_survive(lens, random_pixels(200))
        points = points_in_view(200, 100.0)
        assert_points_survive(lens, points[lens.project(points)[1]], atol=1e-9)


small = st.floats(-0.05, 0.05)


@settings(max_examples=30, deadline=None)
@given(k=st.tuples(small, small, small, small), p1=st.floats(-2e-3, 2e-3), p2=st.floats(-2e-3, 2e-3))
@example(k=(0.0, 0.0458713, -0.0242337, -0.0390625), p1=0.0, p2=0.0)  # plain Newton's method goes to and fro
def test_polynomial_lenses_round_trips(k: tuple[float, ...], p1: float, p2: float) -> None:
    brown = BrownConrady(500.0, 510.0, 321.0, 238.0, W, H, 6.0 * k[0], 2.0 * k[1], p1, p2, k[2], k[3])
    fisheye = KannalaBrandt(**FOCAL, **SIZE, k1=k[0], k2=k[1], k3=k[2] / 10.0, k4=k[3] / 100.0)
    assert assert_pixels_survive(brown, random_pixels(200)).double().mean() > 0.8
    assert_pixels_survive(fisheye, random_pixels(200))
    assert_points_survive(brown, points_in_view(200, 30.0), atol=1e-12)
    assert_points_survive(fisheye, points_in_view(200, 0.9 * math.degrees(fisheye.max_angle)), atol=1e-12)


MATRIX = np.array([[FOCAL["fx"], 0.0, FOCAL["cx"]], [0.0, FOCAL["fy"], FOCAL["cy"]], [0.0, 0.0, 1.0]])
MANY_STEPS = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 500, 1e-15)


def assert_matches(lens: Lens, points: Tensor, pixels: np.ndarray, plane: np.ndarray) -> None:
    """Projection to `pixels` [n, 2], and back to rays through `plane` [n, 2] at depth 1."""
    projected, seen = lens.project(points)
    rays, valid = lens.unproject(torch.from_numpy(pixels))
    assert seen.all()
    assert valid.all()
    np.testing.assert_allclose(projected.numpy(), pixels, rtol=0.0, atol=1e-9)
    np.testing.assert_allclose((rays[:, :2] / rays[:, 2:]).numpy(), plane, rtol=1e-9, atol=1e-9)


def test_brown_matches_opencv() -> None:
    points, coefficients = points_in_view(500, 60.0), np.array(list(RATIONAL.values()))
    pixels, _ = cv2.projectPoints(points.numpy(), np.zeros(3), np.zeros(3), MATRIX, coefficients)
    plane = cv2.undistortPoints(pixels, MATRIX, coefficients, None, None, None, MANY_STEPS)
    assert_matches(LENSES["rational"], points, pixels[:, 0], plane[:, 0])


def test_fisheye_matches_opencv() -> None:
    points, coefficients = points_in_view(500, 85.0), np.array(list(FISHEYE.values()))
    pixels, _ = cv2.fisheye.projectPoints(points.numpy()[:, None], np.zeros(3), np.zeros(3), MATRIX, coefficients)
    plane = cv2.fisheye.undistortPoints(pixels, MATRIX, coefficients, None, None, None, MANY_STEPS)
    assert_matches(LENSES["fisheye"], points, pixels[:, 0], plane[:, 0])


@pytest.mark.parametrize(
    ("model", "name"),
    [("PINHOLE", "pinhole"), ("OPENCV_FISHEYE", "fisheye"), ("EUCM", "extended-0.7"), ("FULL_OPENCV", "rational")],
)
def test_matches_colmap(model: str, name: str) -> None:
    lens, points = LENSES[name], points_in_view(500, 60.0)
    parameters = [float(getattr(lens, parameter)) for parameter in parameter_names(lens)]
    camera = pycolmap.Camera(model=model, params=parameters, **SIZE)
    pixels = camera.img_from_cam(points.numpy())
    assert_matches(lens, points, pixels, camera.cam_from_img(pixels))


def assert_same_lens(first: Lens, second: Lens, points: Tensor) -> None:
    for method, inputs in (("unproject", random_pixels(500)), ("project", points)):
        values, valid = getattr(first, method)(inputs)
        expected, expected_valid = getattr(second, method)(inputs)
        assert torch.equal(valid, expected_valid)
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12 * W if method == "project" else 1e-12)


@pytest.mark.parametrize(
    "same",
    [
        UnifiedCamera(**FOCAL, xi=0.0, **SIZE),
        ExtendedUnified(**FOCAL, alpha=0.0, beta=1.3, **SIZE),
        DoubleSphere(**FOCAL, xi=0.0, alpha=0.0, **SIZE),
        BrownConrady(**FOCAL, **SIZE),
    ],
    ids=lambda lens: type(lens).__name__,
)
def test_reduces_to_pinhole(same: Lens) -> None:
    points = points_in_view(500, 89.0)
    assert_same_lens(same, LENSES["pinhole"], torch.cat((points, -points)))


@pytest.mark.parametrize("xi", [0.0, 0.4, 0.9, 1.0, 1.7])
def test_unified_is_a_special_extended_and_double_sphere(xi: float) -> None:
    unified = UnifiedCamera(**FOCAL, xi=xi, **SIZE)
    blended = {**FOCAL, "fx": FOCAL["fx"] / (1.0 + xi), "fy": FOCAL["fy"] / (1.0 + xi), "alpha": xi / (1.0 + xi)}
    assert_same_lens(unified, ExtendedUnified(**blended, beta=1.0, **SIZE), random_points(500))
    assert_same_lens(unified, DoubleSphere(**blended, xi=0.0, **SIZE), random_points(500))


@pytest.mark.parametrize(("xi", "fov"), UNIFIED_FOV.items())
def test_from_fov_borders_are_half_the_fov_off_axis(xi: float, fov: float) -> None:
    lens = UnifiedCamera.from_fov(fov, xi, W, H)
    rays, valid = lens.unproject(torch.tensor([[0.0, H / 2.0], [W, H / 2.0]], dtype=torch.float64))
    x, z = math.sin(math.radians(fov / 2.0)), math.cos(math.radians(fov / 2.0))
    assert valid.all()
    torch.testing.assert_close(rays, rays.new_tensor([[-x, 0.0, z], [x, 0.0, z]]), rtol=0.0, atol=1e-12)
    assert (float(lens.cx), float(lens.cy)) == (W / 2.0, H / 2.0)


def test_panorama_axes() -> None:
    pixels = torch.tensor([[320, 240], [480, 240], [160, 240], [320, 0], [320, 480]], dtype=torch.float64)
    axes = torch.tensor([[0, 0, 1], [1, 0, 0], [-1, 0, 0], [0, -1, 0], [0, 1, 0]], dtype=torch.float64)
    lens = LENSES["panorama"]
    torch.testing.assert_close(lens.unproject(pixels)[0], axes, rtol=0.0, atol=1e-15)
    torch.testing.assert_close(lens.project(axes)[0], pixels, rtol=0.0, atol=1e-12)
    behind, seen = lens.project(-axes[:1])
    assert seen.all()
    assert behind[0, 0] in (0.0, W)
    assert not lens.unproject(torch.tensor([[-0.1, 5.0], [W + 0.1, 5.0], [5.0, -0.1], [5.0, H + 0.1]]))[1].any()


REACH_DEG = {
    "pinhole": 90.0,
    "unified-0.5": 120.0,
    "unified-2.25": math.degrees(math.acos(-1.0 / 2.25)),
    "extended-parallel": 90.0,
    "brown-none": 90.0,
    "fisheye-turning": math.degrees(math.sqrt(2.0)),  # 1 - 0.3 t^2 - 0.1 t^4 = 0
}


@pytest.mark.parametrize(("name", "reach_deg"), REACH_DEG.items())
def test_lens_sees_up_to_its_reach(name: str, reach_deg: float) -> None:
    lens, angles = LENSES[name], torch.deg2rad(torch.tensor([reach_deg - 0.1, reach_deg + 0.1], dtype=torch.float64))
    pixels, seen = lens.project(torch.stack((angles.sin(), torch.zeros(2), angles.cos()), dim=-1))
    assert seen.tolist() == [True, False]
    assert pixels[1].tolist() == [lens.cx, lens.cy]


@pytest.mark.parametrize(
    ("name", "radius"),
    [
        ("unified-2.25", (2.25**2 - 1.0) ** -0.5),
        ("extended-0.7", (0.4 * 1.1) ** -0.5),
        ("sphere-negative", 0.18**-0.5),
        ("fisheye-turning", 2.0**0.5 * (1.0 - 0.1 * 2.0 - 0.02 * 4.0)),
    ],
)
def test_pixels_past_the_rim_are_invalid(name: str, radius: float) -> None:
    lens = LENSES[name]
    u = lens.cx + lens.fx * torch.tensor([radius - 1e-6, radius + 1e-6], dtype=torch.float64)
    rays, valid = lens.unproject(torch.stack((u, lens.cy.expand(2)), dim=-1))
    assert valid.tolist() == [True, False]
    assert rays[1].tolist() == [0.0, 0.0, 1.0]


def test_limits_are_found_per_camera() -> None:
    k1 = torch.tensor([[0.0, -0.1], [-0.3, 0.05]], dtype=torch.float64)
    lens = KannalaBrandt(**FOCAL, **SIZE, k1=k1)
    expected = torch.where(k1 < 0.0, (-1.0 / (3.0 * k1)).abs().sqrt(), math.pi)  # 1 + 3 k1 t^2 = 0
    torch.testing.assert_close(lens.max_angle, expected.clamp_max(math.pi), rtol=0.0, atol=2e-4)
    brown = BrownConrady(**FOCAL, **SIZE, k1=-0.3, k4=torch.tensor([0.0, -0.25]))  # the second has a pole at r = 2
    torch.testing.assert_close(brown.max_tangent[0], torch.tensor((1.0 / 0.9) ** 0.5).double(), rtol=0.0, atol=2e-4)
    assert brown.max_tangent[1] < 2.0


@typical_lens
def test_batch_equals_loop_over_cameras(lens: Lens) -> None:
    if isinstance(lens, Equirectangular):
        assert lens.batch_shape == ()
        return
    batch = batched(lens, (2, 3))
    assert batch.batch_shape == (2, 3)
    pixels, points = random_pixels(2, 3, 4, 5), random_points(2, 3, 4, 5)
    rays, valid = batch.unproject(pixels)
    projected, seen = batch.project(points)
    shared_rays, shared_valid = batch.unproject(pixels[:1, :1])
    shared_projected, shared_seen = batch.project(points[:1, :1])
    for i, j in np.ndindex(2, 3):
        single = replace(batch, **{name: getattr(batch, name)[i, j] for name in parameter_names(batch)})
        assert_equal(single.unproject(pixels[i, j]), (rays[i, j], valid[i, j]))
        assert_equal(single.project(points[i, j]), (projected[i, j], seen[i, j]))
        assert_equal(single.unproject(pixels[0, 0]), (shared_rays[i, j], shared_valid[i, j]))
        assert_equal(single.project(points[0, 0]), (shared_projected[i, j], shared_seen[i, j]))


def assert_equal(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12)


def test_parameters_of_different_shapes_broadcast() -> None:
    lens = UnifiedCamera(torch.full((3, 1), 250.0), 260.0, torch.full((2,), 321.0), 238.0, 0.8, W, H)
    assert lens.batch_shape == (3, 2)
    assert lens.unproject(random_pixels(1, 1, 7))[0].shape == (3, 2, 7, 3)
    assert lens.project(random_points(3, 1, 7))[1].shape == (3, 2, 7)


@each_lens
def test_precision_follows_the_input(lens: Lens) -> None:
    pixels, points = random_pixels(100, margin=0.3).float(), random_points(100).float()
    rays, valid = lens.unproject(pixels)
    projected, seen = lens.project(points)
    assert (rays.dtype, valid.dtype, projected.dtype, seen.dtype) == (torch.float32, torch.bool) * 2
    precise, precise_valid = lens.unproject(pixels.double())
    assert torch.equal(valid, precise_valid)
    torch.testing.assert_close(rays.double(), precise, rtol=0.0, atol=2e-6)


@typical_lens
def test_to_moves_the_parameters(lens: Lens) -> None:
    lens_32 = lens.to(torch.float32).to("cpu")
    assert type(lens_32) is type(lens)
    assert all(getattr(lens_32, name).dtype == torch.float32 for name in parameter_names(lens))
    assert all(getattr(lens, name).dtype == torch.float64 for name in parameter_names(lens))


def test_the_documentation_crops_scales_stacks_and_mounts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conventions.md").read_text()
    of_lenses, of_rigs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(of_rigs, names := {})
    assert (names["cameras"].count, names["cameras"].views) == (26, 2)
    assert float(names["cameras"].world_from_camera[13, 0, 3]) == 0.5
    exec(of_lenses, names := {})
    points = torch.tensor([[0.3, -0.2, 2.0], [0.1, 0.4, 3.0]], dtype=torch.float64)
    expected = (names["lens"].project(points)[0] - points.new_tensor([82, 150])) * points.new_tensor([0.512, 288 / 562])
    assert (names["scaled"].project(points)[0] - expected).abs().max() < 1e-9
    assert names["three"].batch_shape == (3,)
    assert names["batch"].batch_shape == (2, 1)


def test_a_lens_that_all_cameras_or_clips_share_is_shared_by_those_picked_or_repeated() -> None:
    per_clip = UnifiedCamera(torch.tensor([[90.0], [130.0]]), 100.0, 64.0, 36.0, 0.5, 128, 72)
    assert torch.as_tensor(picked(per_clip, torch.tensor([0, 2, 4])).fx).tolist() == [[90.0] * 3, [130.0] * 3]
    per_camera = replace(per_clip, fx=torch.tensor([[90.0, 110.0, 130.0]]))
    assert torch.as_tensor(picked(per_camera, torch.tensor([2, 0])).fx).tolist() == [[130.0, 90.0]]
    assert repeated(per_camera, 4) is per_camera
    assert torch.as_tensor(repeated(per_clip, 2).fx).tolist() == [[90.0], [90.0], [130.0], [130.0]]


@pytest.mark.parametrize("name", LENSES)
def test_what_is_no_tensor_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"points must be a torch.Tensor \[\.\.\., 3\], got int;"):
        LENSES[name].project(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pixels must be a torch.Tensor \[\.\.\., 2\], got list;"):
        LENSES[name].unproject([1.0, 2.0])  # type: ignore[arg-type]
