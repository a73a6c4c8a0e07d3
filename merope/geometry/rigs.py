"""Rigs: several cameras that are fixed to one body, such as the six around a car, and their cameras along a path."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import picked, require_lens
from merope.geometry.lenses import Lens
from merope.geometry.poses import check_rigid, check_shape, rigid


@dataclass(frozen=True, eq=False)
class Rig:
    """V cameras on a body: where they are fixed, and one lens each.

    `rig_from_camera` is camera-to-body, metres. The body has the axes of a camera that looks ahead: x right, y down,
    z forward. Where the first entry is the identity, the path of the rig is that of its first camera. Lenses are of
    one kind and image size.
    """

    rig_from_camera: Tensor  # [V, 4, 4]
    lens: Lens  # of all views, or parameters [V]
    names: tuple[str, ...] = ()  # of the views; their numbers by default

    def __post_init__(self) -> None:
        poses = check_rigid(self.rig_from_camera, "rig_from_camera")
        if poses.ndim != 3 or len(poses) == 0:
            raise invalid("rig_from_camera", "[V, 4, 4] with at least one view", list(poses.shape), "stack the poses")
        object.__setattr__(self, "rig_from_camera", poses)
        object.__setattr__(self, "names", self.names or tuple(str(view) for view in range(self.views)))
        require_lens(self.lens)
        if tuple(self.lens.batch_shape) not in ((), (self.views,)):
            expected = f"one, or one per view [{self.views}]"
            raise invalid("lens", expected, list(self.lens.batch_shape), "give each parameter one number per view")
        if len(set(self.names)) != self.views:
            raise invalid("names", f"{self.views} different ones", list(self.names), "name every view once")

    @property
    def views(self) -> int:
        """Number of views V."""
        return self.rig_from_camera.shape[0]

    def cameras(
        self,
        world_from_rig: Tensor,  # [(B,) T, 4, 4]
        plan_dtype: torch.dtype | None = None,
    ) -> Cameras:  # [(B,) V · T]
        """The cameras of all views along a path, view by view."""
        lens = self.lenses(world_from_rig.shape[-3]).to(world_from_rig.device)
        return Cameras(self.poses(world_from_rig), lens, plan_dtype=plan_dtype, views=self.views)

    def poses(self, world_from_rig: Tensor) -> Tensor:  # [(B,) T, 4, 4] -> [(B,) V · T, 4, 4], in the same dtype
        """world_from_camera of all views along a path, view by view."""
        check_shape(world_from_rig, "world_from_rig")
        path = world_from_rig.double().unsqueeze(-4)
        poses = path @ self.rig_from_camera[:, None].to(path.device)
        return poses.flatten(-4, -3).to(world_from_rig.dtype)

    def lenses(self, moments: int) -> Lens:  # one, or parameters [V · moments]
        """The lens of every camera, view by view."""
        return picked(self.lens, torch.arange(self.views).repeat_interleave(moments))


def ring(
    yaw_deg: Sequence[float],  # of every view, right positive
    lens: Lens,  # of all views, or parameters [V]
    offset_m: float = 0.0,  # from the middle of the rig, in the direction of each view
    names: tuple[str, ...] = (),
) -> Rig:
    """Level cameras that look outwards from around a point."""
    poses = []
    for yaw in map(math.radians, yaw_deg):
        sine, cosine = math.sin(yaw), math.cos(yaw)
        turn = torch.tensor([[cosine, 0.0, sine], [0.0, 1.0, 0.0], [-sine, 0.0, cosine]], dtype=torch.float64)
        poses.append(rigid(turn, offset_m * turn[:, 2]))
    return Rig(torch.stack(poses), lens, names)
