"""Intrinsics as PRoPE and RayRoPE take them: a matrix in units of the image.

Only a pinhole has one; of other lenses it is that of the pinhole which sees as they do around their axis.
"""

import torch
from torch import Tensor

from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.lenses import Lens, Pinhole, aligned

AXIS_STEP = 1e-4
"""Tangent of the angle to the axis at which a projection's slope is taken; its curvature adds about the square."""


def pinhole(lens: Lens, method: str) -> Pinhole:
    """The lens if it is a pinhole; refuse others for a method that cannot take them."""
    if not isinstance(lens, Pinhole):
        fix = "undistort the images, or use MeRoPE or UCPE, which take any lens"
        raise invalid("lens", f"a Pinhole for {method}", type(lens).__name__, fix)
    return lens


def paraxial(lens: Lens, device: torch.device) -> Pinhole:
    """The pinhole that sees as a lens does around its optical axis: the slope of its projection there, and its centre.

    A unified camera's focal length is fx / (1 + ξ), a fisheye's its own. Distortion is left out, so that also a lens
    that sees more than half of the sphere has one.
    """
    if isinstance(lens, Pinhole):
        return lens
    right, down, axis = torch.eye(3, dtype=torch.float64, device=device)
    steps = AXIS_STEP * torch.stack((right, down, -right, -down))
    points = (axis + steps).expand(*lens.batch_shape, 4, 3)
    ahead, behind = lens.project(points)[0].chunk(2, dim=-2)  # [*batch, 2, 2], by axis
    fx, fy = ((ahead - behind) / (2.0 * AXIS_STEP)).diagonal(dim1=-2, dim2=-1).unbind(-1)
    cx, cy = (ahead + behind).mean(dim=-2).div(2.0).unbind(-1)
    return Pinhole(fx, fy, cx, cy, width=lens.width, height=lens.height)


def normalised_intrinsics(tokens: Tokens, lens: Pinhole) -> tuple[Tensor, Tensor]:  # [B or 1, V or 1, 2] twice, x and y
    """(fx / W, fy / H) and (cx / W − ½, cy / H − ½): the principal point is counted from the image centre."""
    like = tokens.origin_from_camera.new_empty(lens.batch_shape)
    fx, fy, cx, cy = (
        parameter.reshape((1,) * (2 - parameter.ndim) + parameter.shape)
        for parameter in aligned(lens, like, "fx", "fy", "cx", "cy")
    )
    focal = torch.stack((fx / lens.width, fy / lens.height), dim=-1)
    return focal, torch.stack((cx / lens.width - 0.5, cy / lens.height - 0.5), dim=-1)
