# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-untyped-call, misc"
"""Colours of many rays in one Triton kernel: what `merope.world.shade.shaded` defines.

A program takes neighbouring rays and leaves out the kinds of surface that none of them meets.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merope.world import street
from merope.world.outdoor_kernels import ground_seen, sky_seen
from merope.world.pattern_kernels import chosen, clamp, loaded, mixed, turned_into
from merope.world.scene import World
from merope.world.sight import View
from merope.world.solid_kernels import facade_seen, fitting_seen
from merope.world.textures import noise_table

RAYS_PER_PROGRAM = 128
COUNTS = ("rays", "rays_each", "angles_each", "solids", "every")
"""Kernel arguments that are not compiled in: there would be a kernel for every size of image."""
FACADE = tl.constexpr(street.FACADE)


def world_numbers(world: World) -> Tensor:  # [B, 16 + 6 · streets] float32
    """What rays need to know of their worlds besides the solids: 16 numbers of the air, 6 of every street."""
    air, roads = world.air, world.streets
    single = (air.haze_m[:, None], air.clouds[:, None], air.grain)
    curve = (roads.origin_x_m, roads.origin_z_m, roads.heading_rad, roads.curvature_per_m)
    streets = torch.stack((*curve, roads.lanes, roads.half_width_m), dim=-1).float().flatten(1)
    return torch.cat((air.zenith, air.horizon, air.grass, air.sun, *single, streets), dim=1)


def shaded_by_kernel(
    world: World,
    numbers: Tensor,  # of `world_numbers`
    view: View,
    rays: tuple[Tensor, Tensor, Tensor],  # directions [3, R], distances [R] and solids int32 [R] of their first hits
    cameras: tuple[Tensor, int],  # int64 [R / each], rising, and each: of so many consecutive rays
    angles_rad: tuple[Tensor, int],  # [R / each] between neighbouring rays, and each
) -> Tensor:  # [3, R] in [0, 1]
    """Colours of all rays."""
    direction, seen, solids = rays[0], view.solids, world.solids
    colour, count = torch.empty_like(direction), direction.shape[1]
    with torch.cuda.device_of(direction):  # Triton launches on the current device, wherever the tensors are
        _shade[(triton.cdiv(count, RAYS_PER_PROGRAM),)](
            *(*rays, cameras[0], angles_rad[0], colour, view.which, view.centre_m.contiguous(), numbers),
            *(seen.origin, seen.half, seen.yaw_cos_sin, solids.colour.contiguous(), solids.grain, solids.material),
            noise_table(direction.device),
            *(count, cameras[1], angles_rad[1], len(solids.material), seen.far_m.numel()),
            NUMBERS=numbers.shape[1],
            STREETS=world.streets.lanes.shape[1],
            RAYS=RAYS_PER_PROGRAM,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return colour


@triton.jit
def _surface(hit, own, air, there, ray, origin, half, yaw_cos_sin, colours, grains, every):
    """Hits in the axes of the solids that were hit: what `merope.world.textures.Surface` holds."""
    direction, distance, angle = ray
    cosine = tl.load(yaw_cos_sin + hit, mask=there, other=1.0)
    sine = tl.load(yaw_cos_sin + every + hit, mask=there, other=0.0)
    direction = turned_into(cosine, sine, direction)
    start = loaded(origin + hit, every, there)
    point = (
        start[0] + distance * direction[0],
        start[1] + distance * direction[1],
        start[2] + distance * direction[2],
    )
    sun = turned_into(cosine, sine, loaded(air + 9, 1, there))
    sunlight = 1.0 - 0.6 * tl.load(air + 13, mask=there, other=0.0)
    grain = tl.load(grains + own, mask=there, other=0.0)
    half_m, colour = loaded(half + hit, every, there), loaded(colours + own * 3, 1, there)
    return point, direction, half_m, distance * angle, colour, grain, sun, sunlight


@triton.jit(do_not_specialize=COUNTS)
def _shade(
    directions, distance_m, hit_solid, cameras, angle_rad, out, which, centre_m, numbers,
    origin, half, yaw_cos_sin, colours, grains, materials, table,
    rays, rays_each, angles_each, solids, every,
    NUMBERS: tl.constexpr, STREETS: tl.constexpr, RAYS: tl.constexpr,
):  # fmt: skip
    """The rays of one program: sky, ground, houses, and what else stands there; then the haze before them."""
    ray = tl.program_id(0).to(tl.int64) * RAYS + tl.arange(0, RAYS)
    there = ray < rays
    camera = tl.load(cameras + ray // rays_each, mask=there, other=0)
    world = tl.load(which + camera, mask=there, other=0).to(tl.int32)
    air = numbers + world * NUMBERS
    direction = loaded(directions + ray, rays.to(tl.int64), there)
    distance = tl.load(distance_m + ray, mask=there, other=1.0)
    angle = tl.load(angle_rad + ray // angles_each, mask=there, other=1.0)
    hit = tl.load(hit_solid + ray, mask=there, other=-1)
    finite, on_solid = distance < float("inf"), hit >= 0
    hit = tl.maximum(hit, 0)
    material = tl.load(materials + hit % solids, mask=there, other=FACADE)
    is_facade, is_fitting = on_solid & (material == FACADE), on_solid & (material != FACADE)
    is_sky, is_ground = finite == 0, finite & (on_solid == 0)
    distance = tl.where(finite, distance, 1.0)  # the sky's colour does not need it
    red, green, blue = tl.zeros_like(angle), tl.zeros_like(angle), tl.zeros_like(angle)
    if tl.max((there & is_sky).to(tl.int32), 0) > 0:
        red, green, blue = sky_seen(table, air, there, direction, angle)
    if tl.max((there & is_ground).to(tl.int32), 0) > 0:
        centre = loaded(centre_m + camera * 3, 1, there)
        seen = ground_seen(table, air, there, centre, direction, distance, angle, STREETS)
        red, green, blue = chosen(is_ground, seen, (red, green, blue))
    if tl.max(on_solid.to(tl.int32), 0) > 0:
        surface = _surface(
            hit, world * solids + hit % solids, air, there, (direction, distance, angle),
            origin, half, yaw_cos_sin, colours, grains, every,
        )  # fmt: skip
        if tl.max(is_facade.to(tl.int32), 0) > 0:
            red, green, blue = chosen(is_facade, facade_seen(table, surface), (red, green, blue))
        if tl.max(is_fitting.to(tl.int32), 0) > 0:
            red, green, blue = chosen(is_fitting, fitting_seen(table, surface, material), (red, green, blue))
    left = tl.exp(-distance / tl.load(air + 12, mask=there, other=1.0))
    colour = mixed(loaded(air + 3, 1, there), (red, green, blue), tl.where(finite, left, 1.0))
    place = out + ray
    tl.store(place, clamp(colour[0], 0.0, 1.0), mask=there)
    tl.store(place + rays.to(tl.int64), clamp(colour[1], 0.0, 1.0), mask=there)
    tl.store(place + 2 * rays.to(tl.int64), clamp(colour[2], 0.0, 1.0), mask=there)
