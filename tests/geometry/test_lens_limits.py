"""Lens models at their limits: finite values and gradients, exact gradients, refusals."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from lens_zoo import FISHEYE, LENSES, RATIONAL, H, W, batched, each_lens, parameter_names, random_pixels, typical_lens
from torch import Tensor

from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera


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


@pytest.mark.parametrize("lens_name", BAD_OWN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_refuses_half_precision(lens_name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"^fx must be float32 or float64, got {dtype}; pass the original"):
        replace(LENSES[lens_name], fx=torch.tensor(910.3, dtype=dtype))
    with pytest.raises(ValueError, match=r"must be float32 or float64"):
        LENSES[lens_name].to(dtype)


def test_refuses_shapes_that_do_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"parameter shapes .*fx \[2\].*cy \[3\]"):
        replace(LENSES["pinhole"], fx=torch.full((2,), 500.0), cy=torch.zeros(3))


@pytest.mark.parametrize(("xi", "fov"), [(0.0, 180.0), (0.5, 250.0), (2.25, 235.0), (1.0, 360.0), (0.5, 0.0)])
def test_from_fov_refuses_what_the_lens_cannot_reach(xi: float, fov: float) -> None:
    with pytest.raises(ValueError, match=r"^x_fov_deg must be .*, got .*; "):
        UnifiedCamera.from_fov(fov, xi, W, H)
    with pytest.raises(ValueError, match=r"^xi must be .*, got .*; "):
        UnifiedCamera.from_fov(90.0, -0.5, W, H)


def test_refuses_intrinsics_that_are_fractions_of_the_image() -> None:
    with pytest.raises(ValueError, match=r"^fx, fy, cx, cy must be in pixels .*, got fx 0\.8, cx 0\.5, cy 0\.5; "):
        Pinhole(0.8, 1.4, 0.5, 0.5, 512, 288)
    with pytest.raises(ValueError, match=r"^fx, fy, cx, cy must be in pixels"):
        UnifiedCamera(torch.tensor([0.8, 0.9]), 1.4, 0.5, 0.5, 1.0, 512, 288)
    Pinhole(1.0, 1.0, 0.5, 0.5, 1, 1)


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
