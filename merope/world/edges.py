"""Anti-aliasing where it is needed: more rays for the pixels in which one ray is not enough.

Textures are averaged over the pixel (`merope.world.textures`), so one ray serves a pixel that shows one surface. More
rays go to pixels whose colour differs from a neighbour's, and to pixels that a solid reaches into without meeting the
ray through the centre. The cone about that ray finds these, so nothing thin is lost between pixels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from merope.world.lens_grids import LensGrid
from merope.world.raycast import Pairs
from merope.world.scene import World
from merope.world.shade import shaded
from merope.world.sight import Hits, View, cast_within, rotated

CONTRAST = 0.08  # of a colour channel, between neighbours


def needs_more_rays(
    colour: Tensor,  # [3, C, H, W] of the pixels' centres
    hits: Hits,  # of the same, C · H · W
    pairs: Sequence[Pairs],
) -> Tensor:  # bool [C, H, W]
    """Pixels beside one of another colour, and pixels that a solid may reach into beside the central ray."""
    more = torch.zeros_like(hits.solid, dtype=torch.bool)
    for those in pairs:
        in_front = (those.solid != hits.solid[those.ray]) & (those.near_m < hits.distance_m[those.ray])
        more[those.ray[in_front]] = True
    return more.reshape(colour.shape[1:]) | beside_another_colour(colour)


def beside_another_colour(colour: Tensor) -> Tensor:  # [3, C, H, W] -> bool [C, H, W]
    """Pixels whose colour differs from a neighbour's."""
    more = torch.zeros_like(colour[0], dtype=torch.bool)
    for axis in (1, 2):
        differs = (colour.diff(dim=axis + 1).abs() > CONTRAST).any(dim=0)
        count = differs.shape[axis]
        more.narrow(axis, 0, count).logical_or_(differs)
        more.narrow(axis, 1, count).logical_or_(differs)
    return more


def with_fine_rays(
    world: World,
    view: View,
    lens: LensGrid,  # with fine rays, of the same C cameras
    pairs: Sequence[Pairs],  # of the central rays' cones
    ray: Tensor,  # int64 [E], pixels c · H · W + p
    colour: Tensor,  # [3, E] of the central rays
) -> Tensor:  # [3, E]
    """Mean colour of each pixel's central ray and those of its fine rays that the lens has."""
    camera, fine, seen, angle = lens.fine(ray)
    count = seen.shape[1]
    number = torch.full((len(lens.of_camera) * lens.seen[0].numel(),), -1, device=ray.device)
    number[ray] = torch.arange(len(ray), device=ray.device)
    within = [those.of_rays(number, count) for those in pairs]
    hits = cast_within(view, within, rotated(view.rotation[camera], fine).flatten(1), camera.repeat_interleave(count))
    colours = shaded(world, view, hits, angle.repeat_interleave(count)).unflatten(1, (-1, count))
    return (colour + (colours * seen).sum(dim=-1)) / (1 + seen.sum(dim=1))
