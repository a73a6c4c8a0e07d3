"""Lenses of every kind, at and away from the limits of their parameters, and inputs for them."""

import math
from dataclasses import fields, replace

import pytest
import torch
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


def batched(lens: Lens, shape: tuple[int, ...]) -> Lens:
    """The lens with parameters that differ a little from camera to camera."""
    factors = 1.0 - 0.02 * torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    return replace(lens, **{name: getattr(lens, name) * factors for name in parameter_names(lens)})
