"""Patch-centre rays: the calibrated viewing ray of every token of a camera."""

from numbers import Integral

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.lenses import Lens


def check_grid(grid: tuple[int, int], name: str = "grid") -> tuple[int, int]:
    """Validate a token grid (rows, columns)."""
    is_pair = isinstance(grid, (tuple, list)) and len(grid) == 2
    if not is_pair or any(not isinstance(n, Integral) or isinstance(n, bool) or n <= 0 for n in grid):
        raise invalid(name, "(rows, columns), two positive ints", repr(grid), "for 144 tokens at 16:9 pass (9, 16)")
    return int(grid[0]), int(grid[1])


def patch_pixels(
    lens: Lens,
    grid: tuple[int, int],  # rows, columns
    offset: tuple[float, float] = (0.5, 0.5),  # x, y inside the patch, as fractions; (0, 0) is its top-left corner
) -> Tensor:  # [rows · columns, 2] float64
    """Pixel coordinates (u, v) of the patch centres, row-major; the top-left pixel's centre is (0.5, 0.5)."""
    rows, columns = check_grid(grid)
    u = (torch.arange(columns, dtype=torch.float64) + offset[0]) * (lens.width / columns)
    v = (torch.arange(rows, dtype=torch.float64) + offset[1]) * (lens.height / rows)
    return torch.stack((u.expand(rows, columns), v[:, None].expand(rows, columns)), dim=-1).flatten(0, 1)


def patch_rays(
    lens: Lens,
    grid: tuple[int, int],  # rows, columns
    device: torch.device | None = None,
    offset: tuple[float, float] = (0.5, 0.5),
) -> tuple[Tensor, Tensor]:  # [*lens.batch_shape, rows · columns, 3] float64, bool [..., rows · columns]
    """Unit rays through the patch centres in the camera frame, and whether the lens sees anything there."""
    pixels = patch_pixels(lens, grid, offset).to(device)
    leading = (1,) * len(lens.batch_shape)
    return lens.unproject(pixels.reshape(*leading, *pixels.shape))
