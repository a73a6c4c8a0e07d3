"""How well the views of a rig agree: what one view shows, looked up in the others through the world's true depth."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.world.render import Render, correspondences, render
from merope.world.scene import World


@dataclass(frozen=True)
class Overlap:
    """Squared differences of colours, summed over all pixels that two views see at the same moment."""

    squared_error: float  # of colours in [0, 1], mean over the three channels
    pixels: int

    @property
    def psnr_db(self) -> float:
        """Of the pixels together; NaN where no views overlap."""
        if not self.pixels:
            return math.nan
        return math.inf if self.squared_error == 0 else -10.0 * math.log10(self.squared_error / self.pixels)

    def __add__(self, other: "Overlap") -> "Overlap":
        return Overlap(self.squared_error + other.squared_error, self.pixels + other.pixels)


@torch.no_grad()
def view_overlap(
    frames: Tensor,  # uint8 [views, T, H, W, 3]
    cameras: Cameras,  # a rig [views · T], of frames of any size
    world: World,  # one, as it was rendered for the clip
    first: int = 0,  # frame from which on they are compared: those before were given
) -> Overlap:
    """Every pixel of every view against the same surface point in each other view of its moment.

    The sky has no depth and is left out. Points are looked up between pixels, so that even true frames differ a little,
    most at edges: compare with the overlap of what was rendered.
    """
    views, count, height, width = frames.shape[:4]
    if (views, count) != (cameras.views, cameras.moments):
        expected = f"[{cameras.views}, {cameras.moments}, H, W, 3] like the cameras"
        raise invalid("frames", expected, list(frames.shape), "pass all views of one clip")
    later = cameras.at(slice(first, None))
    drawn = render(world, later, height, width, samples=1)
    colour = frames[:, first:].to(later.device).float() / 255.0
    by_view = [_view(later, drawn, view) for view in range(views)]
    total = Overlap(0.0, 0)
    for view, (seen, own) in enumerate(by_view):
        for other in (number for number in range(views) if number != view):
            pixels, visible = correspondences(seen, own, by_view[other][1])
            there = _looked_up(colour[other], pixels, later)
            error = (there - colour[view]).square().mean(dim=-1)[visible]
            total += Overlap(float(error.double().sum()), int(visible.sum()))
    return total


def _view(cameras: Cameras, drawn: Render, view: int) -> tuple[Render, Cameras]:
    """What one view of a rig sees, and its cameras [T]."""
    rows = slice(view * cameras.moments, (view + 1) * cameras.moments)
    seen = Render(drawn.image[rows], drawn.depth_m[rows], drawn.valid[rows], drawn.world)
    alone = Cameras(cameras.world_from_camera, cameras.lens)  # of no rig: rows are picked one by one
    return seen, alone.at(rows)


def _looked_up(
    colour: Tensor,  # [T, H, W, 3]
    pixels: Tensor,  # [T, H', W', 2] of the lens
    cameras: Cameras,
) -> Tensor:  # [T, H', W', 3]
    size = pixels.new_tensor([cameras.lens.width, cameras.lens.height])
    place = (2.0 * pixels / size - 1.0).float()
    images = colour.movedim(-1, 1)
    found = torch.nn.functional.grid_sample(images, place, padding_mode="border", align_corners=False)
    return found.movedim(1, -1)
