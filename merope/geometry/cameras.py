"""A clip's cameras: where they were and what lens they looked through."""

import copy
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Self

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.lens_batches import joined, picked, regrouped, repeated, require_lens
from merope.geometry.lenses import Lens
from merope.geometry.poses import check_rigid, check_shape, relative
from merope.geometry.rays import patch_rays

LATENT_STRIDE = 4
"""RGB frames per latent frame of Wan's VAEs; latent frame n has the camera of RGB frame 4n."""


@dataclass(frozen=True, eq=False)
class Cameras:
    """Posed, calibrated cameras of one clip [V, 4, 4] or of a batch of clips [B, V, 4, 4].

    `world_from_camera` is camera-to-world, OpenCV axes, metres. It is kept in float64 with exactly orthonormal
    rotations; plans are made in `dtype`, which is `plan_dtype` or else the precision in which the poses came. `lens` is
    shared by all cameras or carries one set of parameters per camera (batch_shape [V] or [B, V]). Cameras with
    `has_pose` False keep their tokens, but these act as tokens without a camera; their matrices are not read.

    A rig has several `views` of every moment. Its V cameras stand view by view: all moments of the first view, then all
    of the second. Cameras of one moment share a time. `merope.Rig` makes such cameras.

    `given_dtype` says how coarsely the poses are rounded. Change cameras by making them anew from the original poses:
    `dataclasses.replace` hands on the float64 copy, and both dtypes are then float64.
    """

    world_from_camera: Tensor  # [V, 4, 4] or [B, V, 4, 4]
    lens: Lens
    has_pose: Tensor | None = None  # bool [V] or [B, V]
    plan_dtype: InitVar[torch.dtype | None] = None
    views: int = 1  # cameras of every moment
    dtype: torch.dtype = field(init=False)
    given_dtype: torch.dtype = field(init=False)

    def __post_init__(self, plan_dtype: torch.dtype | None) -> None:
        poses = self.world_from_camera
        check_shape(poses, "world_from_camera")
        if poses.ndim not in (3, 4) or 0 in poses.shape:
            expected = "[V, 4, 4] or [B, V, 4, 4] with at least one camera"
            raise invalid("world_from_camera", expected, list(poses.shape), "add the camera dimension with poses[None]")
        if self.has_pose is not None:
            poses = self._without_unknown(poses, self.has_pose)
        object.__setattr__(self, "world_from_camera", check_rigid(poses))
        object.__setattr__(self, "given_dtype", poses.dtype)
        object.__setattr__(self, "dtype", plan_dtype or poses.dtype)
        if self.dtype not in (torch.float32, torch.float64):
            raise invalid("plan_dtype", "torch.float32 or torch.float64", plan_dtype, "half precision is too coarse")
        self._check_lens()
        if not isinstance(self.views, int) or self.views < 1 or self.count % self.views:
            fix = "give every view as many poses, view after view"
            raise invalid("views", f"a divisor of the {self.count} cameras", repr(self.views), fix)

    @staticmethod
    def _without_unknown(poses: Tensor, has_pose: Tensor) -> Tensor:
        if not isinstance(has_pose, Tensor) or has_pose.dtype != torch.bool or has_pose.shape != poses.shape[:-2]:
            got = f"{has_pose.dtype} {list(has_pose.shape)}" if isinstance(has_pose, Tensor) else repr(has_pose)
            raise invalid("has_pose", f"a bool tensor {list(poses.shape[:-2])}", got, "pass one flag per camera")
        if has_pose.device != poses.device:
            fix = f"use has_pose.to({str(poses.device)!r})"
            raise invalid("has_pose", f"on {poses.device} like world_from_camera", has_pose.device, fix)
        identity = torch.eye(4, dtype=poses.dtype, device=poses.device)
        return torch.where(has_pose[..., None, None], poses, identity)

    def _check_lens(self) -> None:
        require_lens(self.lens)
        expected = self.world_from_camera.shape[:-2]
        lens_shape = self.lens.batch_shape
        try:
            fits = torch.broadcast_shapes(lens_shape, expected) == expected
        except RuntimeError:
            fits = False
        if not fits:
            fix = "give each parameter the leading shape of the poses"
            raise invalid("lens", f"one lens, or one per camera {list(expected)}", list(lens_shape), fix)

    @property
    def count(self) -> int:
        """Number of cameras V."""
        return self.world_from_camera.shape[-3]

    @property
    def moments(self) -> int:
        """Cameras of each view: their number, but for a rig."""
        return self.count // self.views

    @property
    def device(self) -> torch.device:
        return self.world_from_camera.device

    def to(self, device: torch.device | str) -> Self:
        """The same cameras on another device; precision never changes."""
        if isinstance(device, torch.dtype):
            fix = "poses stay float64; Cameras(..., plan_dtype=) and plan.to(dtype=) choose the precision of tables"
            raise invalid("device", "a device", device, fix)
        return self._each(lambda part: part.to(device), lens=self.lens.to(device))

    def at(self, moments: slice) -> Self:
        """Some of every clip's cameras; of a rig, the same moments of every view."""
        poses = self.world_from_camera.unflatten(-3, (self.views, -1))[..., moments, :, :].flatten(-4, -3)
        flags = (
            None if self.has_pose is None else self.has_pose.unflatten(-1, (self.views, -1))[..., moments].flatten(-2)
        )
        chosen = torch.arange(self.count).unflatten(0, (self.views, -1))[:, moments].flatten()
        return self._with(world_from_camera=poses, lens=picked(self.lens, chosen), has_pose=flags)

    def by_view(self) -> Self:  # [(B,) V] -> [B · views, moments]
        """Every view of a rig as a clip of its own, the views of a clip next to each other."""
        cameras, shape = self.world_from_camera.shape[:-2], (-1, self.moments)
        lens = regrouped(self.lens, cameras, shape)
        return self._each(lambda part: part.reshape(*shape, *part.shape[len(cameras) :]), lens=lens, views=1)

    def joined(self, other: "Cameras") -> Self:  # [(B,) V], [(B,) R] -> [(B,) V + R]
        """These cameras and behind them the other ones, clip by clip. Lenses must be of one kind and size.

        Plans are made in the finer of the two dtypes; the poses count as rounded as coarsely as the coarser ones.
        """
        both = (self, other)
        if any(c.views > 1 for c in both):
            got = f"{self.views} and {other.views} views"
            raise invalid("cameras", "of one view, to be joined with others", got, "join the views one by one")
        lead = torch.broadcast_shapes(*(c.world_from_camera.shape[:-3] for c in both))
        has_pose = None
        if any(c.has_pose is not None for c in both):
            has_pose = torch.cat([c._flags().expand(*lead, c.count) for c in both], dim=-1)
        return self._with(
            world_from_camera=torch.cat([c.world_from_camera.expand(*lead, c.count, 4, 4) for c in both], dim=-3),
            lens=joined(self.lens, self.count, other.lens, other.count),
            has_pose=has_pose,
            dtype=torch.promote_types(self.dtype, other.dtype),
            given_dtype=max((c.given_dtype for c in both), key=lambda dtype: torch.finfo(dtype).eps),
        )

    def batched(self) -> Self:  # [(B,) V] -> [B, V]
        """A clip without a batch as a batch of one."""
        return self if self.world_from_camera.ndim == 4 else self._each(lambda part: part[None])

    def repeated(self, copies: int) -> Self:  # [b, V] -> [b · copies, V]
        """Every clip of a batch `copies` times in a row."""
        return self._each(lambda part: part.repeat_interleave(copies, dim=0), lens=repeated(self.lens, copies))

    def seen_from(self, origin: Tensor) -> Self:  # [(B,) 1, 4, 4] world_from_origin
        """The same cameras in another world frame."""
        return self._with(world_from_camera=self.relative_to(origin))

    def _flags(self) -> Tensor:  # bool [(B,) V]
        """`has_pose`, also where it was not given."""
        return self.world_from_camera.new_ones(self.count).bool() if self.has_pose is None else self.has_pose

    def _each(self, change: Callable[[Tensor], Tensor], **parts: Lens | int) -> Self:
        """A copy with poses and flags changed alike, along the dimensions that they share, and with other parts."""
        flags = None if self.has_pose is None else change(self.has_pose)
        return self._with(world_from_camera=change(self.world_from_camera), has_pose=flags, **parts)

    def _with(self, **parts: Tensor | Lens | torch.dtype | int | None) -> Self:
        """A copy with other parts, which are not checked again. It remembers in what precision the poses came."""
        changed = copy.copy(self)
        for name, part in parts.items():
            object.__setattr__(changed, name, part)
        return changed

    def rays(
        self,
        grid: tuple[int, int],  # rows, columns
    ) -> tuple[Tensor, Tensor]:  # [(B,) V, rows · columns, 3] float64, bool [(B,) V, rows · columns]
        """Unit rays of the patch centres in each camera's own frame, and which tokens have a camera at all."""
        rays, valid = patch_rays(self.lens, grid, self.device)
        shape = self.world_from_camera.shape[:-2]
        rays, valid = rays.expand(*shape, *rays.shape[-2:]), valid.expand(*shape, valid.shape[-1])
        return rays, valid if self.has_pose is None else valid & self.has_pose[..., None]

    def origin(self) -> Tensor:  # [(B,) 1, 4, 4]
        """world_from_camera of the first camera that has a pose: the frame in which a clip's numbers stay small."""
        if self.has_pose is None:
            return self.world_from_camera[..., :1, :, :]
        first = self.has_pose.to(torch.int8).argmax(-1)[..., None, None, None]
        return self.world_from_camera.gather(-3, first.expand(*first.shape[:-2], 4, 4))

    def relative_to(self, origin: Tensor) -> Tensor:  # [(B,) 1, 4, 4] world_from_origin -> [(B,) V, 4, 4]
        """origin_from_camera, the centres subtracted in float64 before anything else."""
        return relative(origin, self.world_from_camera)
