"""Lens models: round trips, agreement with OpenCV and COLMAP, batches, gradients and refusals."""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import cv2
import numpy as np
import pycolmap
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lenses import DoubleSphere, Equirectangular, ExtendedUnified, Lens, Pinhole, UnifiedCamera

W, H = 640, 480
FOCAL = {"fx": 250.0, "fy": 260.0, "cx": 321.0, "cy": 238.0}
SIZE = {"width": W, "height": H}
BROWN = {"k1": -0.28, "k2": 0.09, "p1": 1e-3, "p2": -8e-4, "k3": -0.01}
RATIONAL = {"k1": 0.5, "k2": -0.2, "p1": 1e-3, "p2": -8e-4, "k3": 0.05, "k4": 0.8, "k5": -0.1, "k6": 0.02}
# Tangential distortion that, far out, sends directions to the opposite side of the image.
FOLDING = {"k1": -0.16, "k2": 0.17, "p1": -0.0021, "p2": -0.0035, "k3": 0.17, "k4": -0.05, "k5": 0.23, "k6": 0.31}
FISHEYE = {"k1": 0.02, "k2": -0.01, "k3": 0.003, "k4": -0.0005}
UNIFIED_FOV = {0.0: 120.0, 0.5: 180.0, 0.8: 200.0, 1.0: 200.0, 1.66: 200.0, 2.25: 200.0, 2.3: 200.0}

LENSES: dict[str, Lens] = {
    "pinhole": Pinhole(**FOCAL, **SIZE),
    **{f"unified-{xi}": UnifiedCamera.from_fov(fov, xi, W, H) for xi, fov in UNIFIED_FOV.items()},
    "extended-pinhole": ExtendedUnified(**FOCAL, alpha=0.0, beta=1.0, **SIZE),
    "extended-0.4": ExtendedUnified(**FOCAL, alpha=0.4, beta=0.9, **SIZE),
    "extended-0.7": ExtendedUnified(**FOCAL, alpha=0.7, beta=1.1, **SIZE),
    "extended-parallel": ExtendedUnified(**FOCAL, alpha=1.0, beta=1.0, **SIZE),
    "sphere-negative": DoubleSphere(**FOCAL, xi=-0.2, alpha=0.59, **SIZE),
    "sphere-positive": DoubleSphere(**FOCAL, xi=0.5, alpha=0.4, **SIZE),
    "sphere-limit": DoubleSphere(**FOCAL, xi=1.0, alpha=0.8, **SIZE),
    "brown-none": BrownConrady(**FOCAL, **SIZE),
    "brown": BrownConrady(**FOCAL, **SIZE, **BROWN),
    "rational": BrownConrady(**FOCAL, **SIZE, **RATIONAL),
    "brown-pincushion": BrownConrady(**FOCAL, **SIZE, k1=0.3, k2=0.1, k3=0.05),
    "brown-folding": BrownConrady(**FOCAL, **SIZE, **FOLDING),
    "fisheye-none": KannalaBrandt(**FOCAL, **SIZE),
    "fisheye": KannalaBrandt(**FOCAL, **SIZE, **FISHEYE),
    "fisheye-turning": KannalaBrandt(**FOCAL, **SIZE, k1=-0.1, k2=-0.02),
    "panorama": Equirectangular(W, H),
}
# One lens of each kind, away from every limit of its parameters.
TYPICAL = ("pinhole", "unified-1.66", "extended-0.7", "sphere-negative", "rational", "fisheye", "panorama")

each_lens = pytest.mark.parametrize("lens", LENSES.values(), ids=LENSES.keys())
typical_lens = pytest.mark.parametrize("lens", [LENSES[name] for name in TYPICAL], ids=TYPICAL)


def random_pixels(*shape: int, seed: int = 0, margin: float = 0.0) -> Tensor:  # [*shape, 2]
    uniform = torch.rand(*shape, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (margin + (1.0 - 2.0 * margin) * uniform) * torch.tensor([W, H])


def random_points(*shape: int, seed: int = 0) -> Tensor:  # [*shape, 3]
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(*shape, 3, dtype=torch.float64, generator=generator)
    return directions * 10.0 ** (4.0 * torch.rand(*shape, 1, dtype=torch.float64, generator=generator) - 2.0)


def points_in_view(count: int, half_angle_deg: float, seed: int = 0) -> Tensor:  # [count, 3]
    generator = torch.Generator().manual_seed(seed)
    angle, azimuth, distance = torch.rand(3, count, dtype=torch.float64, generator=generator)
    angle, azimuth = angle * math.radians(half_angle_deg), azimuth * 2.0 * math.pi
    directions = (angle.sin() * azimuth.cos(), angle.sin() * azimuth.sin(), angle.cos())
    return torch.stack(directions, dim=-1) * (0.1 + distance[:, None])


def parameter_names(lens: Lens) -> list[str]:
    return [f.name for f in fields(lens) if f.init and f.name not in SIZE]


def assert_pixels_survive(lens: Lens, pixels: Tensor) -> Tensor:
    rays, valid = lens.unproject(pixels)
    back, seen = lens.project(rays * 3.7)
    torch.testing.assert_close(rays.norm(dim=-1), torch.ones_like(rays[..., 0]), rtol=0.0, atol=1e-12)
    assert seen[valid].all()
    torch.testing.assert_close(back[valid], pixels[valid], rtol=0.0, atol=1e-12 * W)
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
    assert_points_survive(lens, points[seen], atol=1e-11)


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


def batched(lens: Lens, shape: tuple[int, ...]) -> Lens:
    """The lens with parameters that differ a little from camera to camera."""
    factors = 1.0 - 0.02 * torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    return replace(lens, **{name: getattr(lens, name) * factors for name in parameter_names(lens)})


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


def last_and_first_off(holds: Callable[[Tensor], Tensor], inside: Tensor, outside: Tensor) -> list[Tensor]:
    """The adjacent pair of inputs between which a condition changes, if it does."""
    for _ in range(60):
        middle = (inside + outside) / 2.0
        inside, outside = (middle, outside) if bool(holds(middle)) else (inside, middle)
    return [inside, outside]


def nasty_pixels(lens: Lens, dtype: torch.dtype) -> Tensor:  # [n, 2]
    centre = lens.project(torch.tensor([0.0, 0.0, 1.0], dtype=dtype))[0].detach()
    far = centre + torch.tensor([3e3, 1e3], dtype=dtype)
    rim = last_and_first_off(lambda pixel: lens.unproject(pixel)[1], centre, far)
    values = [[0.0, 0.0], [W, H], [1e30, -1e30], [math.inf, 0.0], [math.nan, 5.0], [1e8, 240.0]]
    return torch.stack([centre, far, *rim, *torch.tensor(values, dtype=dtype)])


def nasty_points(lens: Lens, dtype: torch.dtype) -> Tensor:  # [n, 3]
    def direction(angle: Tensor) -> Tensor:
        return torch.stack((0.6 * angle.sin(), 0.8 * angle.sin(), angle.cos()))

    angles = torch.tensor([0.0, math.pi], dtype=dtype)
    rim = last_and_first_off(lambda angle: lens.project(direction(angle))[1], *angles)
    axes = torch.eye(3, dtype=dtype)
    extremes = [scale * axes for scale in (0.0, 1.0, -1.0, 1e-38, -1e-18, 1e30, -1e38)]
    near_axis = [[1e-9, 0.0, 1.0], [1e-9, 0.0, -1.0], [1e-22, 1.0, 0.0], [1e-160, -1.0, 0.0], [1.0, 1.0, 1e-12]]
    unreal = [[math.inf, 0.0, 1.0], [0.0, math.nan, 1.0]]
    others = torch.tensor([*near_axis, *unreal], dtype=dtype)
    return torch.cat([*extremes, others, torch.stack([direction(angle) for angle in rim])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_lens
def test_values_and_gradients_are_always_finite(lens: Lens, dtype: torch.dtype) -> None:
    for method, nasty, neutral in (("unproject", nasty_pixels, [0.0, 0.0, 1.0]), ("project", nasty_points, None)):
        inputs = nasty(lens, dtype).requires_grad_()
        parameters = {name: getattr(lens, name).to(dtype, copy=True).requires_grad_() for name in parameter_names(lens)}
        values, valid = getattr(replace(lens, **parameters), method)(inputs)
        neutral = lens.project(torch.tensor([0.0, 0.0, 1.0], dtype=dtype))[0].tolist() if neutral is None else neutral
        assert values.isfinite().all()
        assert not valid[~inputs.isfinite().all(dim=-1)].any()
        assert all(value == neutral for value in values[~valid].tolist())
        weights = torch.randn(values.shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
        leaves = [inputs, *parameters.values()]
        for gradient in torch.autograd.grad((values * weights).sum(), leaves, allow_unused=True):
            assert gradient is None or gradient.isfinite().all()


@each_lens
def test_gradients_are_exact(lens: Lens) -> None:
    pixels = random_pixels(3, seed=1, margin=0.3)
    rays, valid = lens.unproject(pixels)
    assert valid.all()
    names = parameter_names(lens)
    # At xi = 0, alpha = 0 or 1 and the like, a finite difference would leave the range of the parameter.
    free = [name for name in names if name not in ("xi", "alpha") or 0.0 < abs(float(getattr(lens, name))) < 1.0]
    values = [getattr(lens, name).clone().requires_grad_() for name in free]

    for method, inputs in (("unproject", pixels), ("project", 2.0 * rays)):

        def transform(coordinates: Tensor, *parameters: Tensor, method: str = method) -> Tensor:
            return getattr(replace(lens, **dict(zip(free, parameters, strict=True))), method)(coordinates)[0]

        assert torch.autograd.gradcheck(transform, (inputs.clone().requires_grad_(), *values), rtol=1e-5, atol=1e-5)


BAD_COMMON = {
    "width": (0, 640.0, True),
    "height": (-3, None),
    "fx": (0.0, math.nan, torch.tensor([500]), "500"),
    "fy": (-1.0, math.inf, torch.tensor([500.0, 0.0])),
    "cx": (math.inf, None),
    "cy": (torch.tensor([1.0, math.nan]),),
}
BAD_OWN = {
    "pinhole": {},
    "unified-1.0": {"xi": (-0.1, math.inf)},
    "extended-0.7": {"alpha": (-0.1, torch.tensor([0.5, 1.1])), "beta": (0.0, -1.0)},
    "sphere-negative": {"xi": (-1.0, 1.01), "alpha": (-0.1, 1.5)},
    "brown": dict.fromkeys(RATIONAL, (math.nan,)),
    "fisheye": dict.fromkeys(FISHEYE, (math.inf,)),
}


@pytest.mark.parametrize("lens_name", BAD_OWN)
def test_refuses_bad_parameters(lens_name: str) -> None:
    for name, values in {**BAD_COMMON, **BAD_OWN[lens_name]}.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name} must be .*, got .*; "):
                replace(LENSES[lens_name], **{name: value})


def test_refuses_shapes_that_do_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"parameter shapes .*fx \[2\].*cy \[3\]"):
        replace(LENSES["pinhole"], fx=torch.full((2,), 500.0), cy=torch.zeros(3))


@pytest.mark.parametrize(("xi", "fov"), [(0.0, 180.0), (0.5, 250.0), (2.25, 235.0), (1.0, 360.0), (0.5, 0.0)])
def test_from_fov_refuses_what_the_lens_cannot_reach(xi: float, fov: float) -> None:
    with pytest.raises(ValueError, match=r"^x_fov_deg must be .*, got .*; "):
        UnifiedCamera.from_fov(fov, xi, W, H)
    with pytest.raises(ValueError, match=r"^xi must be .*, got .*; "):
        UnifiedCamera.from_fov(90.0, -0.5, W, H)


@typical_lens
@pytest.mark.parametrize(("method", "name", "size"), [("unproject", "pixels", 2), ("project", "points", 3)])
def test_refuses_bad_coordinates(lens: Lens, method: str, name: str, size: int) -> None:
    for bad in (torch.ones(4, size, dtype=torch.long), torch.ones(4, size, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=rf"^{name} must be floating point"):
            getattr(lens, method)(bad)
    for bad in (torch.ones(4, size + 1), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=rf"^{name} must be \[\.\.\., {size}\]"):
            getattr(lens, method)(bad)


@pytest.mark.parametrize(("method", "name", "size"), [("unproject", "pixels", 2), ("project", "points", 3)])
def test_refuses_coordinates_of_another_batch(method: str, name: str, size: int) -> None:
    lens = batched(LENSES["pinhole"], (2, 3))
    for shape in ((3, 2, 5, size), (2, size), (size,)):
        with pytest.raises(ValueError, match=rf"^{name} must be \[\*\[2, 3\].*got \[{', '.join(map(str, shape))}\]"):
            getattr(lens, method)(torch.ones(shape))
