"""Clips of the procedural world for training and for benchmarks: a fresh world and a fresh drive per seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.video import as_bytes
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import stacked
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.rigs import Rig, ring
from merope.geometry.trajectories import driving_path
from merope.world.render import render
from merope.world.scene import World

SEEDS = 1 << 32
"""So many worlds and drives there are: PyTorch's generators on the CPU read no more than 32 bits of a seed."""

HELD_OUT_SEEDS = 1 << 17
"""Worlds with smaller seeds are never trained on."""

DRIVE, LENS, OTHER_DRIVES = 1, 2, 3
"""What dice of a seed are thrown for, besides its world."""

DRIVES = 2
"""Raised when a seed gets another drive or lens: whatever was measured on others is not comparable."""


@dataclass(frozen=True)
class WorldClips:
    """What the clips are like. fov_deg (horizontal) and xi (0: pinhole) are ranges, drawn uniformly per clip.

    rig_yaw_deg: where the views of a rig look, right positive. The drive is that of the middle of the rig.
    rig_fov_deg: the horizontal field of view of each; where it is empty, all views have that of the clip.
    rig_offset_m: how far from the middle of the rig each camera stands, in its own direction.
    """

    frames: int = 13
    height: int = 72
    width: int = 128
    frame_rate_hz: float = 4.0
    prefix_frames: int = 3  # frames after which speed and yaw rate go to new targets
    fov_deg: tuple[float, float] = (70.0, 70.0)
    xi: tuple[float, float] = (0.0, 0.0)
    rig_yaw_deg: tuple[float, ...] = (0.0,)
    rig_fov_deg: tuple[float, ...] = ()
    rig_offset_m: float = 0.0
    drives: int = field(default=DRIVES, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.prefix_frames < self.frames:
            raise invalid("prefix_frames", f"in [1, frames = {self.frames})", self.prefix_frames, "shorten the prefix")
        for name in ("fov_deg", "xi"):
            low, high = getattr(self, name)
            if low > high:
                raise invalid(name, "a rising range", (low, high), "swap its ends")
        if not self.rig_yaw_deg:
            raise invalid("rig_yaw_deg", "at least one view", "none", "[0] is a camera that looks ahead")
        if self.rig_fov_deg and len(self.rig_fov_deg) != self.views:
            expected = f"one for each of the {self.views} views of rig_yaw_deg, or none"
            raise invalid("rig_fov_deg", expected, len(self.rig_fov_deg), "give as many as views")

    @property
    def views(self) -> int:
        """Cameras of every moment."""
        return len(self.rig_yaw_deg)

    def path(self, seed: int) -> Tensor:  # [T, 4, 4] float64
        """The drive of a seed: it starts at the origin of its world and looks along +z."""
        return driving_path(self.frames, self.frame_rate_hz, dice(seed, DRIVE), self.prefix_frames)

    def rig(self, seed: int) -> Rig:
        """The rig of a seed: how its views stand, and their lenses."""
        return ring(self.rig_yaw_deg, self.lens(seed), self.rig_offset_m)

    def first_view(self) -> "WorldClips":
        """The same clips through the first camera of the rig alone, whose drives are then the given ones."""
        fov_deg = (self.rig_fov_deg[0],) * 2 if self.rig_fov_deg else self.fov_deg
        return replace(self, fov_deg=fov_deg, rig_yaw_deg=(0.0,), rig_fov_deg=(), rig_offset_m=0.0)

    def lens(self, seed: int) -> Lens:
        """The lens of a seed; of a rig whose views differ, parameters [views]."""
        fov_share, xi_share = torch.rand(2, dtype=torch.float64, generator=dice(seed, LENS)).tolist()
        fov_deg = self.fov_deg[0] + (self.fov_deg[1] - self.fov_deg[0]) * fov_share
        xi = self.xi[0] + (self.xi[1] - self.xi[0]) * xi_share
        of_views = torch.tensor(self.rig_fov_deg, dtype=torch.float64) if self.rig_fov_deg else fov_deg
        unified = UnifiedCamera.from_fov(of_views, xi, self.width, self.height)
        if self.xi != (0.0, 0.0):
            return unified
        return Pinhole(unified.fx, unified.fy, unified.cx, unified.cy, self.width, self.height)

    def lenses(self, seeds: Sequence[int]) -> Lens:
        """The lenses of some seeds: one for all where they do not differ, else one parameter set per clip [B, 1].

        Where the views of a rig differ, those of all cameras [views · T], or [B, views · T].
        """
        is_same = self.fov_deg[0] == self.fov_deg[1] and self.xi[0] == self.xi[1]
        own = [self.rig(seed).lenses(self.frames) for seed in (seeds[:1] if is_same else seeds)]
        return own[0] if is_same else stacked(own)

    def cameras(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> Cameras:
        """The drives of some seeds [B, T], of rigs [B, views · T]."""
        paths = torch.stack([self.path(seed) for seed in seeds])
        poses = self.rig(seeds[0]).poses(paths)
        return Cameras(poses, self.lenses(seeds), plan_dtype=torch.float32, views=self.views).to(device)

    def pictures(
        self,
        seeds: Sequence[int],  # one world each
        cameras: Cameras,  # [B, views · T]
        clear_of: Tensor | None = None,  # [B, N, 4, 4] all poses that must be free, those of the cameras by default
    ) -> Tensor:  # uint8 [B, views · T, H, W, 3]
        """The worlds as the cameras see them."""
        world = World(tuple(seeds), cameras.device).cleared(cameras.world_from_camera if clear_of is None else clear_of)
        return as_bytes(render(world, cameras, self.height, self.width).image)


def by_view(frames: Tensor, views: int) -> Tensor:  # [B, views · T, …] -> [B · views, T, …]
    """The frames of each view of a rig apart, the views of a clip next to each other."""
    return frames.unflatten(1, (views, -1)).flatten(0, 1)


def as_video(frames: Tensor) -> Tensor:  # uint8 [B, T, H, W, 3] -> float32 [B, 3, T, H, W] in [−1, 1]
    """Frames as a pixel-space model takes them."""
    return (frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0).contiguous()


def dice(seed: int, what: int) -> torch.Generator:
    """Random numbers apart from those of the world of the same seed: scenery must not tell the drive."""
    (state,) = np.random.SeedSequence((seed, what)).generate_state(1, np.uint32)
    return torch.Generator().manual_seed(int(state))
