"""What lenses are called where a benchmark mixes them."""

import math

import torch

from merope.geometry.lenses import Lens

WIDE_DEG, FISHEYE_DEG, FISHEYE_XI = 90.0, 120.0, 0.5


def lens_kind(lens: Lens) -> str:
    """By its horizontal field of view and mirror parameter."""
    fov_deg = field_of_view_deg(lens)
    if fov_deg < WIDE_DEG:
        return "pinhole-like"
    return "fisheye" if fov_deg >= FISHEYE_DEG and getattr(lens, "xi", 0.0) >= FISHEYE_XI else "wide"


def field_of_view_deg(lens: Lens) -> float:
    """Between the left and the right edge of its image."""
    middle = lens.height / 2.0
    edges, _ = lens.unproject(torch.tensor([[0.0, middle], [lens.width, middle]], dtype=torch.float64))
    off_axis_rad = torch.atan2(edges[:, :2].norm(dim=-1), edges[:, 2])  # the angle between the edges ends at 180°
    return math.degrees(off_axis_rad.sum())
