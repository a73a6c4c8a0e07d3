"""Pixels of the procedural world by Triton kernels: the same images as `merope.world.render` defines, sooner.

Two kernels do the work: one finds first hits, one colours them. Each is launched for the pixels' centres, and again for
the finer rays of the pixels that need them.
"""

import torch
from torch import Tensor

from merope.world.cast_kernel import cast_by_kernel
from merope.world.edges import beside_another_colour
from merope.world.lens_grids import LensGrid
from merope.world.scene import World
from merope.world.shade_kernel import shaded_by_kernel, world_numbers
from merope.world.sight import View, rotated, view_of


def drawn_by_kernels(
    world: World,
    scene_from_camera: Tensor,  # [C, 4, 4] float64
    which: Tensor,  # int64 [C]
    lens: LensGrid,
) -> tuple[Tensor, Tensor]:  # [C, H, W, 3], [C, H, W] metres
    """Colours and distances of some rows of some cameras."""
    own, (height, width) = lens.of_camera, lens.seen.shape[1:]
    spread = None if lens.fine_rays is None else lens.spread[own].flatten(1)
    view, numbers = view_of(world, scene_from_camera, which, spread), world_numbers(world)
    direction = rotated(view.rotation, lens.rays[own].flatten(2)).unflatten(2, (height, width))
    cameras = torch.arange(len(own), device=own.device), height * width
    distance, solid, beside = cast_by_kernel(view, direction, cameras, spread)
    rays = direction.flatten(1), distance, solid
    colour = shaded_by_kernel(world, numbers, view, rays, cameras, (lens.angle_rad[own], 1))
    shape = (len(own), height, width)
    if beside is not None:
        more = beside_another_colour(colour.unflatten(1, shape)) | beside.reshape(shape)
        more &= lens.seen[own]
        place = more.mT.flatten().nonzero().squeeze(-1)  # down the columns: neighbours share their bearings
        ray = place // (height * width) * (height * width) + place % height * width + place // height % width
        colour[:, ray] = _with_fine_rays(world, numbers, view, lens, ray, colour[:, ray])
    return colour.T.unflatten(0, shape), distance.unflatten(0, shape)


def _with_fine_rays(
    world: World,
    numbers: Tensor,
    view: View,
    lens: LensGrid,  # with fine rays, of the same C cameras
    ray: Tensor,  # int64 [E], pixels c · H · W + p, c rising
    colour: Tensor,  # [3, E] of the central rays
) -> Tensor:  # [3, E]
    """What `merope.world.edges.with_fine_rays` defines."""
    camera, fine, seen, angle = lens.fine(ray)
    count = seen.shape[1]
    direction = rotated(view.rotation[camera], fine).flatten(1)
    distance, solid, _ = cast_by_kernel(view, direction, (camera, count))
    hits = direction, distance, solid
    colours = shaded_by_kernel(world, numbers, view, hits, (camera, count), (angle, count)).unflatten(1, (-1, count))
    return (colour + (colours * seen).sum(dim=-1)) / (1 + seen.sum(dim=1))
