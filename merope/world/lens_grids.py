"""Rays of the lenses of a render: through the centres of the pixels, and through finer cells of each."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from merope.geometry.cameras import Cameras
from merope.geometry.rays import patch_rays

CONE = 0.8  # half-angle of the cone about a pixel, in angles between neighbours: half a diagonal is 0.71
WIDEST_CONE_RAD = 1.2


@dataclass(frozen=True, eq=False)
class LensGrid:
    """Rays of L different lenses through an image of H × W pixels, and which lens each of C cameras has."""

    rays: Tensor  # [L, 3, H, W] float32, unit, camera frame
    angle_rad: Tensor  # [L, H, W] float32, between neighbouring rays
    seen: Tensor  # bool [L, H, W]
    fine_rays: Tensor | None  # [L, H, W, 3, S] float32 through S cells of each pixel
    fine_seen: Tensor | None  # bool [L, H, W, S]
    of_camera: Tensor  # int64 [C]

    def part(self, cameras: slice, rows: range) -> "LensGrid":
        """Some rows of some cameras."""
        some = slice(rows.start, rows.stop)
        return LensGrid(
            self.rays[:, :, some],
            self.angle_rad[:, some],
            self.seen[:, some],
            None if self.fine_rays is None else self.fine_rays[:, some],
            None if self.fine_seen is None else self.fine_seen[:, some],
            self.of_camera[cameras],
        )

    def fine(
        self,
        ray: Tensor,  # int64 [E], pixels c · H · W + p
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # int64 [E], [E, 3, S], bool [E, S], [E]
        """Of some pixels: the camera, the fine rays, which of these the lens has, and the angle between them."""
        assert self.fine_rays is not None
        assert self.fine_seen is not None
        pixels = self.seen[0].numel()
        camera, place = ray // pixels, (self.of_camera[ray // pixels], ray % pixels)
        fine, seen = self.fine_rays.flatten(1, 2)[place], self.fine_seen.flatten(1, 2)[place]
        return camera, fine, seen, self.angle_rad.flatten(1)[place] / (seen.shape[1] + 1) ** 0.5

    @property
    def spread(self) -> Tensor:  # [L, H, W], 0 where the lens sees nothing
        """Tangent of the half-angle of a cone about each pixel's ray that holds the pixel."""
        return torch.where(self.seen, (CONE * self.angle_rad).clamp_max(WIDEST_CONE_RAD).tan(), 0.0)


def lens_grid(cameras: Cameras, grid: tuple[int, int], samples: int) -> LensGrid:
    """Rays of the centres of height × width pixels, and of samples² places in each unless samples is 1."""
    shape, batch = cameras.world_from_camera.shape[:-2], cameras.lens.batch_shape
    of_camera = torch.arange(batch.numel(), device=cameras.device).reshape(batch).expand(shape).flatten()
    rays, seen = _rays(cameras, grid)
    angle = _angle_to_neighbours(rays).float()
    centres = LensGrid(rays.movedim(-1, 1).float().contiguous(), angle, seen, None, None, of_camera)
    if samples == 1:
        return centres
    fine = [_rays(cameras, grid, offset) for offset in places_around_centre(samples)]
    fine_rays = torch.stack([rays.float() for rays, _ in fine], dim=-1)
    return replace(centres, fine_rays=fine_rays, fine_seen=torch.stack([seen for _, seen in fine], dim=-1))


def places_around_centre(samples: int) -> list[tuple[float, float]]:
    """A place (x, y) in each of samples × samples cells of a pixel, but for the very centre.

    The places make a grid that is turned a little: all x differ and are evenly spaced, and so are all y. A street has
    many upright and level edges. They get samples² + 1 shades; a plain grid would give samples + 1.
    """
    step, numbers = 1.0 / samples**2, range(samples)
    places = [
        ((column * samples + samples - row - 0.5) * step, (row * samples + column + 0.5) * step)
        for row in numbers
        for column in numbers
    ]
    return [place for place in places if place != (0.5, 0.5)]


def _rays(
    cameras: Cameras,
    grid: tuple[int, int],
    offset: tuple[float, float] = (0.5, 0.5),
) -> tuple[Tensor, Tensor]:  # [L, H, W, 3] float64, bool [L, H, W]
    rays, seen = patch_rays(cameras.lens, grid, cameras.device, offset)
    return rays.reshape(-1, *grid, 3), seen.reshape(-1, *grid)


def _angle_to_neighbours(rays: Tensor) -> Tensor:  # [L, H, W, 3] -> [L, H, W]
    """Angle to the next ray, the larger of along rows and along columns.

    Of the two neighbours on an axis the nearer counts: at the rim of a lens the other is no ray at all.
    """
    angles = []
    for axis in (1, 2):
        if rays.shape[axis] > 1:
            chord = torch.linalg.vector_norm(rays.diff(dim=axis), dim=-1)
            first, last = chord.narrow(axis, 0, 1), chord.narrow(axis, -1, 1)
            angles.append(torch.minimum(torch.cat((first, chord), dim=axis), torch.cat((chord, last), dim=axis)))
    return torch.stack(angles).amax(dim=0) if angles else rays.new_ones(rays.shape[:-1])
