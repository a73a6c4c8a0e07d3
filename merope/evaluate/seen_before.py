"""Which part of what a frame should show was to be seen in the frames that a model was given.

What no given frame shows, or only from afar, a model has to invent. An estimator that compares with the true world then
finds no pose, however well the model follows.
"""

import torch
from torch import Tensor

from merope.evaluate.estimators.dense_flow import grey, textured
from merope.evaluate.estimators.render_anchored import STRIDE, smooth_depth
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import picked
from merope.geometry.poses import inverse
from merope.geometry.rays import patch_rays
from merope.world.render import Render

SAME_SURFACE = 0.05  # of the distance: nearer than that to what the given frame shows, a point is what it shows
FARTHEST = 2.0  # times as far away as in the frame itself, so at least half as large: grass seen from afar tells little


def seen_before(
    renders: Render,  # of all frames of one clip
    cameras: Cameras,  # [T]
    given: int,  # first frames, of which any may show a point
) -> Tensor:  # float64 [T]
    """For every frame the share of its textured surface that some given frame shows, at least half as large.

    It is 1 for a frame without such surface.
    """
    shares = torch.ones(cameras.count, dtype=torch.float64)
    for t in range(cameras.count):
        points, own_m = _surface_points(renders, cameras, t)
        if len(points):
            shares[t] = _is_shown(points, FARTHEST * own_m, renders, cameras, given).double().mean()
    return shares


def shown_by_references_alone(
    renders: Render,  # of all frames of one clip
    cameras: Cameras,  # [T]
    given: int,  # first frames
    references: Render,
    reference_cameras: Cameras,  # [R]
) -> Tensor:  # bool [T, H, W]
    """Pixels whose surface some reference shows, at least half as large, and no given frame; of every second row and
    column, without the sky. A model that was not shown the references has to invent these."""
    alone = torch.zeros_like(renders.valid)
    for t in range(given, cameras.count):
        pixels = (_every_second(renders, t) & renders.depth_m[t].isfinite()).nonzero()
        points, own_m = _world_points(renders, cameras, t, pixels)
        for is_wanted, (others, other_cameras, count) in (
            (True, (references, reference_cameras, reference_cameras.count)),
            (False, (renders, cameras, given)),
        ):
            kept = _is_shown(points, FARTHEST * own_m, others, other_cameras, count) == is_wanted
            pixels, points, own_m = pixels[kept], points[kept], own_m[kept]
        alone[t, pixels[:, 0], pixels[:, 1]] = True
    return alone


def _every_second(renders: Render, t: int) -> Tensor:  # bool [H, W]
    """Pixels of a frame of which each stands for its neighbours."""
    is_taken = torch.zeros_like(renders.valid[t])
    is_taken[STRIDE // 2 :: STRIDE, STRIDE // 2 :: STRIDE] = True
    return is_taken & renders.valid[t]


def _surface_points(renders: Render, cameras: Cameras, t: int) -> tuple[Tensor, Tensor]:  # float64 [P, 3], [P]
    """Points of a frame that the render-anchored estimator could pair, in the world, and their distances."""
    image, depth = renders.image[t], renders.depth_m[t].double()
    is_textured = torch.from_numpy(textured(grey((255.0 * image).round().to(torch.uint8))))
    return _world_points(renders, cameras, t, (_every_second(renders, t) & smooth_depth(depth) & is_textured).nonzero())


def _world_points(
    renders: Render,
    cameras: Cameras,
    t: int,
    pixels: Tensor,  # [P, 2] rows, columns
) -> tuple[Tensor, Tensor]:  # float64 [P, 3], [P]
    """What pixels of a frame show, in the world, and how far from its camera."""
    depth, (row, column) = renders.depth_m[t].double(), pixels.unbind(-1)
    height, width = depth.shape
    rays = patch_rays(picked(cameras.lens, torch.tensor(t)), (height, width))[0].unflatten(0, (height, width))
    pose = cameras.world_from_camera[t].double()
    own_m = depth[row, column]
    return own_m[:, None] * rays[row, column].double() @ pose[:3, :3].T + pose[:3, 3], own_m


def _is_shown(
    points: Tensor,  # float64 [P, 3]
    farthest_m: Tensor,  # float64 [P]
    renders: Render,
    cameras: Cameras,
    first: int,  # G frames, all asked at once: a point is little work
) -> Tensor:  # bool [P]
    """Whether any of the first frames shows points of the world no farther than that, and not something before them."""
    camera_from_world = inverse(cameras.world_from_camera[:first].double())
    local = points @ camera_from_world[:, :3, :3].mT + camera_from_world[:, None, :3, 3]
    lens, (height, width) = picked(cameras.lens, torch.arange(first)), renders.depth_m.shape[-2:]
    pixels, is_inside = lens.project(local)  # [G, P, 2], [G, P]
    column = (pixels[..., 0] * width / lens.width).floor().nan_to_num(-1.0).long()
    row = (pixels[..., 1] * height / lens.height).floor().nan_to_num(-1.0).long()
    is_inside = is_inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    frame = torch.arange(first)[:, None]
    shown_m = renders.depth_m[frame, row.clamp(0, height - 1), column.clamp(0, width - 1)].double()
    distance_m = local.norm(dim=-1)
    is_near = (distance_m <= farthest_m) & ((shown_m - distance_m).abs() < SAME_SURFACE * distance_m)
    return (is_inside & is_near).any(dim=0)
