"""Colours of what rays meet in the procedural world: each kind of surface on its own, then the haze before it."""

import torch
from torch import Tensor

from merope.world.raycast import turned_into
from merope.world.scene import World
from merope.world.sight import Hits, View
from merope.world.street import FACADE
from merope.world.textures import Surface, facade_colour, fitting_colour, ground_colour, mixed, sky_colour


def shaded(
    world: World,
    view: View,
    hits: Hits,
    angle_rad: Tensor,  # [R] between neighbouring rays, over which textures are averaged
) -> Tensor:  # [3, R] in [0, 1]
    """Colours of all rays."""
    on_solid, finite = hits.solid >= 0, hits.distance_m.isfinite()
    is_facade = world.solids.material.index_select(0, hits.solid % len(world.solids.material)) == FACADE
    colour = torch.empty_like(hits.direction)
    for shader, where in (
        (_sky, ~finite),
        (_ground, finite & ~on_solid),
        (_facade, on_solid & is_facade),
        (_fitting, on_solid & ~is_facade),
    ):
        ray = where.nonzero().squeeze(-1)
        colour.index_copy_(1, ray, shader(world, view, hits.at(ray), angle_rad.index_select(0, ray)))
    which = view.which[hits.camera]
    left = torch.exp(-hits.distance_m / world.air.haze_m[which])
    return mixed(world.air.horizon.T[:, which], colour, torch.where(finite, left, 1.0)).clamp(0.0, 1.0)


def _sky(world: World, view: View, hits: Hits, angle_rad: Tensor) -> Tensor:  # [3, n]
    air, which = world.air, view.which[hits.camera]
    zenith, horizon, sun = (t.T[:, which] for t in (air.zenith, air.horizon, air.sun))
    return sky_colour(hits.direction, angle_rad, zenith, horizon, sun, air.clouds[which], air.grain.T[:, which])


def _ground(world: World, view: View, hits: Hits, angle_rad: Tensor) -> Tensor:  # [3, n]
    air, which = world.air, view.which[hits.camera]
    x, _, z = view.centre_m.T[:, hits.camera] + hits.distance_m * hits.direction
    streets = world.streets.each(lambda t: t.T.float().index_select(1, which))
    spread = hits.distance_m * angle_rad
    return ground_colour(streets, x, z, hits.direction, spread, air.grass.T[:, which], air.grain.T[:, which])


def _facade(world: World, view: View, hits: Hits, angle_rad: Tensor) -> Tensor:  # [3, n]
    return facade_colour(_surface(world, view, hits, angle_rad))


def _fitting(world: World, view: View, hits: Hits, angle_rad: Tensor) -> Tensor:  # [3, n]
    material = world.solids.material[hits.solid % len(world.solids.material)]
    return fitting_colour(_surface(world, view, hits, angle_rad), material)


def _surface(world: World, view: View, hits: Hits, angle_rad: Tensor) -> Surface:
    """The hits in the axes of the solids that were hit."""
    air, which, seen = world.air, view.which[hits.camera], view.solids
    number = hits.solid % len(world.solids.material)
    origin, half, yaw = (t.index_select(1, hits.solid) for t in (seen.origin, seen.half, seen.yaw_cos_sin))
    direction = turned_into(yaw, hits.direction)
    return Surface(
        point_m=origin + hits.distance_m * direction,
        direction=direction,
        half_m=half,
        spread_m=hits.distance_m * angle_rad,
        colour=world.solids.colour[which, number].T.contiguous(),
        grain=world.solids.grain[which, number],
        sun=turned_into(yaw, air.sun.T[:, which]),
        sunlight=1.0 - 0.6 * air.clouds[which],
    )
