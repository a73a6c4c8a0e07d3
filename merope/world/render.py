"""Images of the procedural world through any lens, with exact depth and point correspondences.

Geometry (poses, lens rays, differences of centres) is float64; rays are cast and shaded in float32, relative to the
camera, in blocks whose size depends on the device. The plain code here runs everywhere and is the definition. On NVIDIA
GPUs Triton kernels draw the same images (`merope.world.fast_draw`).
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens
from merope.geometry.poses import relative, transform
from merope.world.edges import needs_more_rays, with_fine_rays
from merope.world.lens_grids import LensGrid, lens_grid
from merope.world.scene import World
from merope.world.shade import shaded
from merope.world.sight import cast, rotated, view_of
from merope.world.threads import run_each

# A cache's worth on a CPU, about a frame; on CUDA many, because each block is launched anew, but what memory allows.
RAYS_PER_BLOCK = {"cpu": 1 << 15, "cuda": 1 << 23}
OCCLUSION_TOLERANCE = 1e-3  # of the distance: a surface nearer by more than this hides a point

Draw = Callable[[World, Tensor, Tensor, LensGrid], tuple[Tensor, Tensor]]


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


@torch.no_grad()
def render(
    world: World,
    cameras: Cameras,
    height: int,
    width: int,
    samples: int = 3,
    by_kernels: bool | None = None,  # whether Triton kernels draw; None: on an NVIDIA GPU, where Triton is installed
) -> Render:
    """Render height × width images: a ray per pixel, samples × samples of them where a pixel holds an edge.

    The image covers the lens's whole image plane whatever its own size: pixel (row i, column j) is centred on
    ((j + ½) · lens.width / width, (i + ½) · lens.height / height). A batch of worlds takes cameras [B, V], one clip per
    world; one world is seen by all cameras. With `samples` = 1 silhouettes are jagged; an even number adds the central
    ray to its grid.
    """
    for name, value in (("height", height), ("width", width), ("samples", samples)):
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise invalid(name, "a positive int", repr(value), "pass the image size in pixels, 1, 2 or 3 samples")
    poses = world.scene_from_camera(cameras.world_from_camera).flatten(0, 1)
    lens, which = lens_grid(cameras, (height, width), samples), _world_of_camera(world, len(poses))
    image = torch.empty(len(poses), height, width, 3, device=poses.device)
    depth = torch.empty(len(poses), height, width, device=poses.device)
    draw = _by_kernels(poses.device) if by_kernels or (by_kernels is None and _has_kernels(poses.device)) else _drawn

    @torch.no_grad()
    def draw_block(block: slice, rows: range) -> None:
        drawn = range(max(0, rows.start - 1), min(height, rows.stop + 1))  # a row more: neighbours tell where edges are
        colour, distance = draw(world, poses[block], which[block], lens.part(block, drawn))
        own = slice(rows.start - drawn.start, rows.stop - drawn.start)
        image[block, rows.start : rows.stop] = colour[:, own]
        depth[block, rows.start : rows.stop] = distance[:, own]

    run_each(draw_block, _blocks(len(poses), height, width, poses.device), poses.device)
    seen = lens.seen[lens.of_camera]
    if cameras.has_pose is not None:
        seen = seen & cameras.has_pose.flatten()[:, None, None]
    shape = cameras.world_from_camera.shape[:-2]
    parts = image.mul_(seen[..., None]), depth.masked_fill_(~seen, torch.inf), seen
    image, depth, seen = (part.unflatten(0, shape) for part in parts)
    return Render(image, depth, seen, world)


def _world_of_camera(world: World, cameras: int) -> Tensor:  # int64 [cameras]
    worlds = len(world.seeds)
    return torch.arange(worlds, device=world.world_from_scene.device).repeat_interleave(cameras // worlds)


def _blocks(cameras: int, height: int, width: int, device: torch.device) -> Iterator[tuple[slice, range]]:
    """Cameras and rows of their pixels: whole cameras while they fit into a block, else some rows of one."""
    limit = RAYS_PER_BLOCK[device.type]
    at_once, parts = max(1, limit // (height * width)), -(-height * width // limit)
    rows = -(-height // parts)
    for first in range(0, cameras, at_once):
        for start in range(0, height, rows):
            yield slice(first, first + at_once), range(start, min(height, start + rows))


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None


def _by_kernels(device: torch.device) -> Draw:
    if not _has_kernels(device) and os.environ.get("TRITON_INTERPRET") != "1":
        raise invalid("by_kernels", "None or False without GPU and Triton", f"True on {device}", "leave it out")
    from merope.world.fast_draw import drawn_by_kernels  # needs Triton

    return drawn_by_kernels


def _drawn(
    world: World,
    scene_from_camera: Tensor,  # [C, 4, 4] float64
    which: Tensor,  # int64 [C]
    lens: LensGrid,
) -> tuple[Tensor, Tensor]:  # [C, H, W, 3], [C, H, W] metres
    """Colours and distances of some rows of some cameras."""
    own = lens.of_camera
    spread = None if lens.fine_rays is None else lens.spread[own].flatten(1)
    view = view_of(world, scene_from_camera, which, spread)
    directions = rotated(view.rotation, lens.rays[own].flatten(2))
    hits, pairs = cast(view, directions, spread)
    colour = shaded(world, view, hits, lens.angle_rad[own].flatten())
    shape = (len(own), *lens.seen.shape[1:])
    if lens.fine_rays is not None:
        more = needs_more_rays(colour.unflatten(1, shape), hits, pairs) & lens.seen[own]
        ray = more.flatten().nonzero().squeeze(-1)
        colour[:, ray] = with_fine_rays(world, view, lens, pairs, ray, colour[:, ray])
    return colour.T.unflatten(0, shape), hits.distance_m.unflatten(0, shape)


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
    which, free = _world_of_camera(world, len(poses)), torch.empty_like(distance, dtype=torch.bool)

    @torch.no_grad()
    def cast_block(block: slice, some: range) -> None:
        span = slice(some.start, some.stop)
        view = view_of(world, poses[block], which[block])
        hits, _ = cast(view, rotated(view.rotation, rays[block, :, span]))
        first = hits.distance_m.reshape(-1, len(some))
        free[block, span] = first > distance[block, span] * (1.0 - OCCLUSION_TOLERANCE)

    run_each(cast_block, _blocks(len(poses), rays.shape[-1], 1, poses.device), poses.device)
    return free.reshape(points_m.shape[:-1])
