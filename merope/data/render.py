"""Images of the procedural world through any lens, with exact depth and point correspondences.

Geometry (poses, lens rays, differences of centres) is float64; rays are cast and shaded in float32, relative to the
camera. The same code runs on CPU and CUDA: there is one way to cast rays (`merope.data.raycast`), in blocks whose size
depends on the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.data.raycast import (
    SeenSolids,
    box_interval,
    ellipsoid_interval,
    nearest,
    ray_plane,
    seen_solids,
    turned_into,
)
from merope.data.street import CAMERA_HEIGHT_M, FACADE
from merope.data.textures import Surface, facade_colour, fitting_colour, ground_colour, mixed, sky_colour
from merope.data.world import World
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens
from merope.geometry.poses import relative, transform
from merope.geometry.rays import patch_rays

RAYS_PER_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}  # cache on one, launch overhead and memory on the other
OCCLUSION_TOLERANCE = 1e-3  # of the distance: a surface nearer by more than this hides a point


@dataclass(frozen=True, eq=False)
class Render:
    """What V cameras of a clip (or B clips) see.

    image: [(B,) V, H, W, 3] float32 in [0, 1]; black where not valid.
    depth_m: [(B,) V, H, W] float32, metres along the ray of the pixel's centre; inf for the sky and where not valid.
    valid: bool [(B,) V, H, W], where the lens has a ray at the pixel's centre and the camera has a pose.
    """

    image: Tensor
    depth_m: Tensor
    valid: Tensor
    world: World


@dataclass(frozen=True, eq=False)
class _Hits:
    """What R rays meet first."""

    direction: Tensor  # [3, R] unit, scene axes
    distance_m: Tensor  # [R], inf for the sky
    solid: Tensor  # int64 [R], c · N + n, -1 for ground and sky
    camera: Tensor  # int64 [R]

    def at(self, ray: Tensor) -> "_Hits":  # int64 [n]
        return _Hits(self.direction[:, ray], self.distance_m[ray], self.solid[ray], self.camera[ray])


@dataclass(frozen=True, eq=False)
class _View:
    """Cameras of a block in the scenes of their worlds."""

    rotation: Tensor  # [C, 3, 3] float32, scene from camera
    centre_m: Tensor  # [C, 3] float32, scene frame
    drop_m: Tensor  # [C] float32, camera to ground
    which: Tensor  # int64 [C], its world
    solids: SeenSolids
    boxes: int


@torch.no_grad()
def render(world: World, cameras: Cameras, height: int, width: int, samples: int = 2) -> Render:
    """Render height × width images, each pixel the mean of samples × samples rays.

    The image covers the lens's whole image plane whatever its own size: pixel (row i, column j) is centred on
    ((j + ½) · lens.width / width, (i + ½) · lens.height / height). A batch of worlds takes cameras [B, V], one clip per
    world; one world is seen by all cameras.
    """
    for name, value in (("height", height), ("width", width), ("samples", samples)):
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise invalid(
                name, "a positive int", repr(value), "pass the size of the image in pixels, and 1, 2 or 3 samples"
            )
    poses = world.scene_from_camera(cameras.world_from_camera)
    shape = cameras.world_from_camera.shape[:-2]
    valid, depth, image = _cast_grid(world, poses, cameras, (height, width), shade=samples == 1)
    if samples > 1:
        image = _cast_grid(world, poses, cameras, (height * samples, width * samples), shade=True)[2]
        image = image.reshape(-1, height, samples, width, samples, 3).mean(dim=(2, 4))
    image = image.reshape(*shape, height, width, 3) * valid.reshape(*shape, height, width, 1)
    return Render(image, depth.reshape(*shape, height, width), valid.reshape(*shape, height, width), world)


def _cast_grid(
    world: World,
    scene_from_camera: Tensor,  # [B, V, 4, 4]
    cameras: Cameras,
    grid: tuple[int, int],
    shade: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # bool [B · V, P], [B · V, P], [B · V, P, 3] (empty if not shaded)
    """Cast the rays of a grid of pixel centres, block by block."""
    lens = _lens_grid(cameras, grid)
    poses, pixels = scene_from_camera.flatten(0, 1), grid[0] * grid[1]
    which = torch.arange(len(world.seeds), device=poses.device).repeat_interleave(len(poses) // len(world.seeds))
    depth = torch.empty(len(poses), pixels, device=poses.device)
    image = torch.empty(len(poses), pixels, 3, device=poses.device) if shade else depth.new_zeros(())
    for block, span in _blocks(len(poses), pixels, poses.device):
        view, own = _view(world, poses[block], which[block]), lens.of_camera[block]
        directions = _rotated(view.rotation, lens.rays[own, :, span])
        hits = _cast(view, directions)
        depth[block, span] = hits.distance_m.reshape(-1, directions.shape[-1])
        if shade:
            colour = _shaded(world, view, hits, lens.angle_rad[own, span].flatten())
            image[block, span] = colour.T.reshape(-1, directions.shape[-1], 3)
    seen = lens.seen[lens.of_camera]
    if cameras.has_pose is not None:
        seen = seen & cameras.has_pose.flatten()[:, None]
    return seen, depth.masked_fill_(~seen, torch.inf), image.mul_(seen[..., None]) if shade else image


@dataclass(frozen=True, eq=False)
class _LensGrid:
    """Rays of L different lenses through the pixels of a grid, and which lens each of all cameras has."""

    rays: Tensor  # [L, 3, P] float32, unit, camera frame
    angle_rad: Tensor  # [L, P] float32, between neighbouring rays
    seen: Tensor  # bool [L, P]
    of_camera: Tensor  # int64 [B · V]


def _lens_grid(cameras: Cameras, grid: tuple[int, int]) -> _LensGrid:
    rays, seen = patch_rays(cameras.lens, grid, cameras.device)
    shape, batch = cameras.world_from_camera.shape[:-2], cameras.lens.batch_shape
    lens_of_camera = torch.arange(batch.numel(), device=cameras.device).reshape(batch).expand(shape).flatten()
    rays, seen = rays.reshape(-1, *rays.shape[-2:]), seen.reshape(-1, seen.shape[-1])
    angle = _angle_to_neighbours(rays.unflatten(1, grid)).flatten(1)
    return _LensGrid(rays.mT.float().contiguous(), angle.float(), seen, lens_of_camera)


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


def _blocks(cameras: int, pixels: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Slices of cameras and of their pixels: whole cameras while they fit into a block, else parts of one."""
    limit = RAYS_PER_BLOCK[device.type]
    at_once, part = max(1, limit // pixels), min(pixels, limit)
    for first in range(0, cameras, at_once):
        for start in range(0, pixels, part):
            yield slice(first, first + at_once), slice(start, start + part)


def _view(
    world: World,
    scene_from_camera: Tensor,  # [C, 4, 4] float64
    which: Tensor,  # int64 [C]
) -> _View:
    """The solids relative to the cameras; subtracted in float64, then cast."""
    solids, centre = world.solids, scene_from_camera[:, :3, 3]
    towards = solids.centre_m[which] - centre[:, None]
    seen = seen_solids(towards, solids.half_m[which], solids.yaw_rad[which], solids.present[which])
    drop = (CAMERA_HEIGHT_M - centre[:, 1]).float()
    return _View(scene_from_camera[:, :3, :3].float(), centre.float(), drop, which, seen, solids.boxes)


def _rotated(rotation: Tensor, rays: Tensor) -> Tensor:  # [C, 3, 3], [C, 3, P] -> [3, C, P]
    # Not a matrix product: TF32 and autocast would round it to three digits.
    columns = rotation.permute(2, 1, 0)[..., None]  # [3 (column), 3, C, 1]
    x, y, z = rays.transpose(0, 1)
    return columns[0] * x + columns[1] * y + columns[2] * z


def _cast(
    view: _View,
    directions: Tensor,  # [3, C, P] unit, scene axes
) -> _Hits:
    """Nearest of boxes, ellipsoids and ground along every ray."""
    cameras, count = view.solids.wedge_cos.shape
    camera = torch.arange(cameras, device=directions.device).repeat_interleave(directions.shape[-1])
    distance = ray_plane(view.drop_m[:, None], directions[1]).flatten()
    solid = torch.full_like(camera, -1)
    for interval, start, stop in ((box_interval, 0, view.boxes), (ellipsoid_interval, view.boxes, count)):
        reached, index = nearest(view.solids.part(start, stop), interval, directions)
        nearer = reached < distance
        distance = torch.where(nearer, reached, distance)
        solid = torch.where(nearer, index + start + camera * (count - stop + start), solid)
    return _Hits(directions.flatten(1), distance, solid, camera)


def _shaded(world: World, view: _View, hits: _Hits, angle_rad: Tensor) -> Tensor:  # [R] -> [3, R]
    """Colours of all rays, each kind of surface on its own, then the haze in front of them."""
    on_solid, finite = hits.solid >= 0, hits.distance_m.isfinite()
    is_facade = world.solids.material[hits.solid % len(world.solids.material)] == FACADE
    colour = torch.empty_like(hits.direction)
    for shader, where in (
        (_sky, ~finite),
        (_ground, finite & ~on_solid),
        (_facade, on_solid & is_facade),
        (_fitting, on_solid & ~is_facade),
    ):
        ray = where.nonzero().squeeze(-1)
        colour[:, ray] = shader(world, view, hits.at(ray), angle_rad[ray])
    which = view.which[hits.camera]
    left = torch.exp(-hits.distance_m / world.air.haze_m[which])
    return mixed(world.air.horizon.T[:, which], colour, torch.where(finite, left, 1.0)).clamp(0.0, 1.0)


def _sky(world: World, view: _View, hits: _Hits, angle_rad: Tensor) -> Tensor:  # [3, n]
    air, which = world.air, view.which[hits.camera]
    zenith, horizon, sun = (t.T[:, which] for t in (air.zenith, air.horizon, air.sun))
    return sky_colour(hits.direction, angle_rad, zenith, horizon, sun, air.clouds[which], air.grain.T[:, which])


def _ground(world: World, view: _View, hits: _Hits, angle_rad: Tensor) -> Tensor:  # [3, n]
    air, which = world.air, view.which[hits.camera]
    x, _, z = view.centre_m.T[:, hits.camera] + hits.distance_m * hits.direction
    streets = world.streets.each(lambda t: t.T.float()[:, which])
    spread = hits.distance_m * angle_rad
    return ground_colour(streets, x, z, hits.direction, spread, air.grass.T[:, which], air.grain.T[:, which])


def _facade(world: World, view: _View, hits: _Hits, angle_rad: Tensor) -> Tensor:  # [3, n]
    return facade_colour(_surface(world, view, hits, angle_rad))


def _fitting(world: World, view: _View, hits: _Hits, angle_rad: Tensor) -> Tensor:  # [3, n]
    material = world.solids.material[hits.solid % len(world.solids.material)]
    return fitting_colour(_surface(world, view, hits, angle_rad), material)


def _surface(world: World, view: _View, hits: _Hits, angle_rad: Tensor) -> Surface:
    """The hits in the axes of the solids that were hit."""
    air, which, seen = world.air, view.which[hits.camera], view.solids
    number = hits.solid % len(world.solids.material)
    yaw = seen.yaw_cos_sin[:, hits.solid]
    direction = turned_into(yaw, hits.direction)
    return Surface(
        point_m=seen.origin[:, hits.solid] + hits.distance_m * direction,
        direction=direction,
        half_m=seen.half[:, hits.solid],
        spread_m=hits.distance_m * angle_rad,
        colour=world.solids.colour[which, number].T.contiguous(),
        grain=world.solids.grain[which, number],
        sun=turned_into(yaw, air.sun.T[:, which]),
        sunlight=1.0 - 0.6 * air.clouds[which],
    )


@torch.no_grad()
def correspondences(
    render_a: Render,
    cameras_a: Cameras,
    cameras_b: Cameras,
) -> tuple[Tensor, Tensor]:  # [(B,) V, H, W, 2] float64, bool [(B,) V, H, W]
    """Where camera b_v sees the surface point behind each pixel centre of camera a_v, and whether it does.

    `render_a` is what `cameras_a` saw; `cameras_b` are as many. Pixels are those of b's lens, whatever size b is
    rendered at. A point is visible if b's lens reaches it inside the image and nothing stands in front of it.
    """
    if cameras_a.world_from_camera.shape != cameras_b.world_from_camera.shape:
        expected = f"{list(cameras_a.world_from_camera.shape)} like cameras_a"
        raise invalid("cameras_b", expected, list(cameras_b.world_from_camera.shape), "pair the cameras one to one")
    grid = render_a.depth_m.shape[-2:]
    rays, _ = cameras_a.rays((grid[0], grid[1]))
    has_surface = render_a.depth_m.isfinite().flatten(-2)
    depth = torch.where(has_surface, render_a.depth_m.flatten(-2).double(), 1.0)
    b_from_a = relative(cameras_b.world_from_camera, cameras_a.world_from_camera)
    points = transform(b_from_a, depth[..., None] * rays)
    pixels, reached = _project(cameras_b.lens, points)
    size = pixels.new_tensor([cameras_b.lens.width, cameras_b.lens.height])
    inside = reached & ((pixels >= 0.0) & (pixels <= size)).all(dim=-1) & has_surface
    if cameras_b.has_pose is not None:
        inside = inside & cameras_b.has_pose[..., None]
    visible = inside & _unobstructed(render_a.world, cameras_b, points)
    return pixels.unflatten(-2, grid), visible.unflatten(-1, grid)


def _project(lens: Lens, points: Tensor) -> tuple[Tensor, Tensor]:  # [(B,) V, P, 3] -> [(B,) V, P, 2], bool
    # A lens wants its own dimensions first; one lens per camera, shared by all clips, has only the cameras.
    if len(lens.batch_shape) == 1 and points.ndim == 4:
        pixels, valid = lens.project(points.transpose(0, 1))
        return pixels.transpose(0, 1), valid.transpose(0, 1)
    return lens.project(points)


def _unobstructed(world: World, cameras: Cameras, points_m: Tensor) -> Tensor:  # [(B,) V, P, 3] camera frame -> bool
    """Whether nothing stands between each camera and its points."""
    poses = world.scene_from_camera(cameras.world_from_camera).flatten(0, 1)
    points = points_m.reshape(len(poses), -1, 3)
    distance = torch.linalg.vector_norm(points, dim=-1).clamp_min(1e-9)
    rays = (points / distance[..., None]).mT.float()
    which = torch.arange(len(world.seeds), device=poses.device).repeat_interleave(len(poses) // len(world.seeds))
    free = torch.empty_like(distance, dtype=torch.bool)
    for block, span in _blocks(len(poses), rays.shape[-1], poses.device):
        view = _view(world, poses[block], which[block])
        hits = _cast(view, _rotated(view.rotation, rays[block, :, span]))
        first = hits.distance_m.reshape(-1, rays[block, :, span].shape[-1])
        free[block, span] = first > distance[block, span] * (1.0 - OCCLUSION_TOLERANCE)
    return free.reshape(points_m.shape[:-1])
