# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, no-untyped-call, misc"
"""First hits of many rays in one Triton kernel, which tries every solid of a ray's camera.

What `merope.world.sight.cast` and `merope.world.edges.needs_more_rays` define, with the same operations in the same
order. A program takes neighbouring rays. It leaves out the solids in whose wedge of bearings none of them lies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merope.world.raycast import TINY
from merope.world.sight import View

TILE = (16, 4)  # pixels of a program: rows and columns. Upright, because it is bearings that decide what is left out
COUNTS = ("rays", "height", "width", "rays_each", "solids", "boxes", "every")
"""Kernel arguments that are not compiled in: there would be a kernel for every size of image."""


def cast_by_kernel(
    view: View,
    direction: Tensor,  # [3, C, H, W] unit, scene axes; or [3, R], of neighbours
    cameras: tuple[Tensor, int],  # int64 [R / each], rising, and each: of so many consecutive rays
    spread: Tensor | None = None,  # [R] tangents of the half-angles of the cones about the rays
) -> tuple[Tensor, Tensor, Tensor | None]:  # [R] metres, int32 [R] as in `Hits`, bool [R] or None without `spread`
    """First hits of all rays, and whether a solid other than that hit reaches into the cone before it."""
    direction, solids = direction.contiguous(), view.solids
    is_image = direction.ndim == 4
    images, height, width = direction.shape[1:] if is_image else (1, 1, direction.shape[1])
    rows, columns = TILE if is_image else (1, TILE[0] * TILE[1])
    rays, tiles = direction[0].numel(), images * triton.cdiv(height, rows) * triton.cdiv(width, columns)
    distance = direction.new_empty(rays)
    solid = torch.empty(rays, dtype=torch.int32, device=direction.device)
    beside = None if spread is None else torch.empty(rays, dtype=torch.bool, device=direction.device)
    with torch.cuda.device_of(direction):  # Triton launches on the current device, wherever the tensors are
        _cast[(tiles,)](
            *(direction, cameras[0], spread, view.drop_m, distance, solid, beside),
            *(solids.origin, solids.half, solids.yaw_cos_sin, solids.bearing, solids.wedge_cos, solids.far_m),
            *(rays, height, width, cameras[1], solids.wedge_cos.shape[1], view.boxes, solids.far_m.numel()),
            CONES=spread is not None,
            TINY=TINY,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=1,  # which agrees on leaving out a solid without waiting for another
            enable_fp_fusion=False,
        )
    return distance, solid, beside


@triton.jit
def _box(ox, oy, oz, dx, dy, dz, hx, hy, hz, TINY: tl.constexpr):
    """`raycast.box_interval`."""
    ix = tl.div_rn(1.0, tl.where(tl.abs(dx) < TINY, TINY, dx))
    iy = tl.div_rn(1.0, tl.where(tl.abs(dy) < TINY, TINY, dy))
    iz = tl.div_rn(1.0, tl.where(tl.abs(dz) < TINY, TINY, dz))
    mx, my, mz = -ox * ix, -oy * iy, -oz * iz
    rx, ry, rz = hx * tl.abs(ix), hy * tl.abs(iy), hz * tl.abs(iz)
    enter = tl.maximum(tl.maximum(mx - rx, my - ry), mz - rz)
    return enter, tl.minimum(tl.minimum(mx + rx, my + ry), mz + rz)


@triton.jit
def _ellipsoid(ox, oy, oz, dx, dy, dz, hx, hy, hz, TINY: tl.constexpr):
    """`raycast.ellipsoid_interval`."""
    ox, oy, oz = tl.div_rn(ox, hx), tl.div_rn(oy, hy), tl.div_rn(oz, hz)
    dx, dy, dz = tl.div_rn(dx, hx), tl.div_rn(dy, hy), tl.div_rn(dz, hz)
    length = tl.maximum(dx * dx + dy * dy + dz * dz, TINY)
    nearest = tl.div_rn(-(ox * dx + oy * dy + oz * dz), length)
    ox, oy, oz = ox + nearest * dx, oy + nearest * dy, oz + nearest * dz
    square = tl.div_rn(1.0 - (ox * ox + oy * oy + oz * oz), length)
    half_chord = tl.sqrt_rn(tl.maximum(square, 0.0))
    missed = square < 0.0
    return tl.where(missed, float("inf"), nearest - half_chord), tl.where(missed, -float("inf"), nearest + half_chord)


@triton.jit
def _interval(ox, oy, oz, dx, dy, dz, hx, hy, hz, ROUND: tl.constexpr, TINY: tl.constexpr):
    if ROUND:
        enter, leave = _ellipsoid(ox, oy, oz, dx, dy, dz, hx, hy, hz, TINY)
    else:
        enter, leave = _box(ox, oy, oz, dx, dy, dz, hx, hy, hz, TINY)
    return enter, leave


@triton.jit
def _nearest(
    first, last, mine, x, y, z, level_x, level_z, spread, near, near_solid, next_near,
    origin, half, yaw_cos_sin, bearing, wedge_cos, far_m, every,
    CONES: tl.constexpr, ROUND: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Nearest of the solids `first` to `last` − 1, and the two nearest whose widened forms the rays enter."""
    best = tl.full(x.shape, float("inf"), tl.float32)
    index = tl.full(x.shape, -1, tl.int32)
    for s in range(first, last):
        towards = tl.load(bearing + 2 * s) * level_x + tl.load(bearing + 2 * s + 1) * level_z
        inside = mine & (towards >= tl.load(wedge_cos + s))
        if tl.max(inside.to(tl.int32), 0) > 0:
            ox, oy, oz = tl.load(origin + s), tl.load(origin + every + s), tl.load(origin + 2 * every + s)
            hx, hy, hz = tl.load(half + s), tl.load(half + every + s), tl.load(half + 2 * every + s)
            cosine, sine = tl.load(yaw_cos_sin + s), tl.load(yaw_cos_sin + every + s)
            dx, dz = cosine * x - sine * z, sine * x + cosine * z
            enter, leave = _interval(ox, oy, oz, dx, y, dz, hx, hy, hz, ROUND, TINY)
            distance = tl.where(enter > 0.0, enter, leave)
            met = inside & (leave >= enter) & (distance > 0.0) & (distance <= best)
            met = met & (distance < float("inf"))
            best, index = tl.where(met, distance, best), tl.where(met, s, index)
            if CONES:
                wider = tl.load(far_m + s) * spread
                enter, leave = _interval(ox, oy, oz, dx, y, dz, hx + wider, hy + wider, hz + wider, ROUND, TINY)
                enter = tl.where(inside & (leave >= enter) & (leave > 0.0), enter, float("inf"))
                nearer = enter < near
                next_near = tl.where(nearer, near, tl.minimum(next_near, enter))
                near, near_solid = tl.where(nearer, enter, near), tl.where(nearer, s, near_solid)
    return best, index, near, near_solid, next_near


@triton.jit(do_not_specialize=COUNTS)
def _cast(
    direction, cameras, spreads, drop_m, distance_m, hit_solid, beside,
    origin, half, yaw_cos_sin, bearing, wedge_cos, far_m,
    rays, height, width, rays_each, solids, boxes, every,
    CONES: tl.constexpr, TINY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rays of one program; those of several cameras take turns."""
    tile, lane = tl.program_id(0), tl.arange(0, ROWS * COLUMNS)
    across, down = tl.cdiv(width, COLUMNS), tl.cdiv(height, ROWS)
    column = tile % across * COLUMNS + lane % COLUMNS
    row = tile // across % down * ROWS + lane // COLUMNS
    there = (column < width) & (row < height)
    ray = (tile // (across * down)).to(tl.int64) * height * width + row * width + column
    camera = tl.load(cameras + ray // rays_each, mask=there, other=0).to(tl.int32)
    x = tl.load(direction + ray, mask=there, other=0.0)
    y = tl.load(direction + rays.to(tl.int64) + ray, mask=there, other=0.0)
    z = tl.load(direction + 2 * rays.to(tl.int64) + ray, mask=there, other=1.0)
    level = tl.maximum(tl.sqrt_rn(x * x + z * z), TINY)
    level_x, level_z = tl.div_rn(x, level), tl.div_rn(z, level)
    spread = tl.zeros_like(x)
    if CONES:
        spread = tl.load(spreads + ray, mask=there, other=0.0)
    drop = tl.load(drop_m + camera, mask=there, other=0.0)
    best = tl.div_rn(drop, tl.where(y == 0.0, TINY, y))
    best = tl.where((best > 0.0) & (y != 0.0), best, float("inf"))
    hit = tl.full(x.shape, -1, tl.int32)
    near = tl.full(x.shape, float("inf"), tl.float32)
    next_near = near
    near_solid = hit
    for c in range(tl.min(tl.where(there, camera, 2147483647), 0), tl.max(camera, 0) + 1):
        mine = there & (camera == c)
        reached, solid, near, near_solid, next_near = _nearest(
            c * solids, c * solids + boxes, mine, x, y, z, level_x, level_z, spread, near, near_solid, next_near,
            origin, half, yaw_cos_sin, bearing, wedge_cos, far_m, every, CONES, False, TINY,
        )  # fmt: skip
        hit, best = tl.where(reached < best, solid, hit), tl.minimum(reached, best)
        reached, solid, near, near_solid, next_near = _nearest(
            c * solids + boxes, (c + 1) * solids, mine, x, y, z, level_x, level_z, spread, near, near_solid, next_near,
            origin, half, yaw_cos_sin, bearing, wedge_cos, far_m, every, CONES, True, TINY,
        )  # fmt: skip
        hit, best = tl.where(reached < best, solid, hit), tl.minimum(reached, best)
    tl.store(distance_m + ray, best, mask=there)
    tl.store(hit_solid + ray, hit, mask=there)
    if CONES:
        tl.store(beside + ray, tl.where(near_solid == hit, next_near, near) < best, mask=there)
