"""What rays of posed cameras meet in the procedural world: solids and ground, nearest first.

Differences of positions are float64; rays are cast in float32, relative to the camera. Rays come as whole grids of
cameras (`cast`), which sorts out the solids that each ray's cone can reach, or as a few more rays inside the cones of
some of them (`cast_within`), for which only those solids are tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.world.raycast import (
    Interval,
    Pairs,
    SeenSolids,
    box_interval,
    ellipsoid_interval,
    nearest,
    pairs_in_reach,
    ray_plane,
    seen_solids,
)
from merope.world.scene import World
from merope.world.street import CAMERA_HEIGHT_M


@dataclass(frozen=True, eq=False)
class Hits:
    """What R rays meet first."""

    direction: Tensor  # [3, R] unit, scene axes
    distance_m: Tensor  # [R], inf for the sky
    solid: Tensor  # int64 [R], c · N + n, -1 for ground and sky
    camera: Tensor  # int64 [R]

    def at(self, ray: Tensor) -> "Hits":  # int64 [n]
        parts = (self.direction, self.distance_m, self.solid, self.camera)
        return Hits(*(part.index_select(-1, ray) for part in parts))


@dataclass(frozen=True, eq=False)
class View:
    """C cameras in the scenes of their worlds."""

    rotation: Tensor  # [C, 3, 3] float32, scene from camera
    centre_m: Tensor  # [C, 3] float32, scene frame
    drop_m: Tensor  # [C] float32, camera to ground
    which: Tensor  # int64 [C], its world
    solids: SeenSolids
    boxes: int

    def kinds(self) -> list[tuple[range, Interval]]:
        """Numbers of the boxes and of the ellipsoids, and how to meet them."""
        return [
            (range(self.boxes), box_interval),
            (range(self.boxes, self.solids.wedge_cos.shape[1]), ellipsoid_interval),
        ]


def view_of(
    world: World,
    scene_from_camera: Tensor,  # [C, 4, 4] float64
    which: Tensor,  # int64 [C], the world of each camera
    spread: Tensor | None = None,  # [C, P] tangents of the half-angles of the cones that will be cast, None for rays
) -> View:
    """The solids relative to the cameras; subtracted in float64, then cast."""
    solids, centre = world.solids, scene_from_camera[:, :3, 3]
    towards = solids.centre_m[which] - centre[:, None]
    widest = 0.0 if spread is None else spread.double().amax(dim=1, keepdim=True)
    seen = seen_solids(towards, solids.half_m[which], solids.yaw_rad[which], solids.present[which], widest)
    drop = (CAMERA_HEIGHT_M - centre[:, 1]).float()
    return View(scene_from_camera[:, :3, :3].float(), centre.float(), drop, which, seen, solids.boxes)


def rotated(rotation: Tensor, rays: Tensor) -> Tensor:  # [C, 3, 3], [C, 3, P] -> [3, C, P]
    """Rays of each camera in scene axes."""
    # Not a matrix product: TF32 and autocast would round it to three digits.
    columns = rotation.permute(2, 1, 0)[..., None]  # [3 (column), 3, C, 1]
    x, y, z = rays.transpose(0, 1)
    return columns[0] * x + columns[1] * y + columns[2] * z


def cast(
    view: View,
    directions: Tensor,  # [3, C, P] unit, scene axes
    spread: Tensor | None = None,  # [C, P] tangents of the half-angles of the cones about the rays
) -> tuple[Hits, list[Pairs]]:
    """First hits of all rays, and the boxes and ellipsoids that their cones may meet."""
    camera = torch.arange(directions.shape[1], device=directions.device).repeat_interleave(directions.shape[-1])
    pairs = [pairs_in_reach(view.solids, *kind, directions, spread) for kind in view.kinds()]
    return cast_within(view, pairs, directions.flatten(1), camera), pairs


def cast_within(
    view: View,
    pairs: Sequence[Pairs],  # of boxes and of ellipsoids
    direction: Tensor,  # [3, R] unit, scene axes
    camera: Tensor,  # int64 [R]
) -> Hits:
    """Nearest of ground and paired solids along every ray."""
    distance, solid = ray_plane(view.drop_m.index_select(0, camera), direction[1]), torch.full_like(camera, -1)
    for (_, interval), those in zip(view.kinds(), pairs, strict=True):
        reached, index = nearest(view.solids, interval, those, direction)
        nearer = reached < distance
        distance, solid = torch.where(nearer, reached, distance), torch.where(nearer, index, solid)
    return Hits(direction, distance, solid, camera)
