"""Intrinsics as PRoPE and RayRoPE take them: a matrix in units of the image, which only a pinhole has."""

import torch
from torch import Tensor

from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.lenses import Lens, Pinhole, aligned


def pinhole(lens: Lens, method: str) -> Pinhole:
    """The lens if it is a pinhole; refuse others for a method that cannot take them."""
    if not isinstance(lens, Pinhole):
        fix = "undistort the images, or use MeRoPE or UCPE, which take any lens"
        raise invalid("lens", f"a Pinhole for {method}", type(lens).__name__, fix)
    return lens


def normalised_intrinsics(
    tokens: Tokens,
    method: str,
) -> tuple[Tensor, Tensor]:  # [B or 1, V or 1, 2] twice, x and y
    """(fx / W, fy / H) and (cx / W − ½, cy / H − ½): the principal point is counted from the image centre."""
    lens = pinhole(tokens.lens, method)
    like = tokens.origin_from_camera.new_empty(lens.batch_shape)
    fx, fy, cx, cy = (
        parameter.reshape((1,) * (2 - parameter.ndim) + parameter.shape)
        for parameter in aligned(lens, like, "fx", "fy", "cx", "cy")
    )
    focal = torch.stack((fx / lens.width, fy / lens.height), dim=-1)
    return focal, torch.stack((cx / lens.width - 0.5, cy / lens.height - 0.5), dim=-1)
