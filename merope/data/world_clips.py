"""Clips of the procedural world for training and for benchmarks: a fresh world and a fresh drive per seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.data.render import render
from merope.data.world import World
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.trajectories import driving_path

HELD_OUT_SEEDS = 1 << 32
"""Worlds with smaller seeds are never trained on; those of training clips start here."""


@dataclass(frozen=True)
class WorldClips:
    """What the clips are like. fov_deg (horizontal) and xi (0: pinhole) are ranges, drawn uniformly per clip."""

    frames: int = 13
    height: int = 72
    width: int = 128
    frame_rate_hz: float = 4.0
    prefix_frames: int = 3  # frames that do not tell where the drive goes
    fov_deg: tuple[float, float] = (70.0, 70.0)
    xi: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if not 1 <= self.prefix_frames < self.frames:
            raise invalid("prefix_frames", f"in [1, frames = {self.frames})", self.prefix_frames, "shorten the prefix")
        for name in ("fov_deg", "xi"):
            low, high = getattr(self, name)
            if low > high:
                raise invalid(name, "a rising range", (low, high), "swap its ends")

    def path(self, seed: int) -> Tensor:  # [T, 4, 4] float64
        """The drive of a seed: it starts at the origin of its world and looks along +z."""
        dice = torch.Generator().manual_seed(seed)
        return driving_path(self.frames, self.frame_rate_hz, dice, self.prefix_frames)

    def lens(self, seeds: Sequence[int]) -> Lens:
        """The lenses of some clips, one parameter set per clip [B, 1] unless all are the same."""
        dice = torch.stack([_lens_dice(seed) for seed in seeds])[:, :, None]  # [B, 2, 1]
        fov_deg = self.fov_deg[0] + (self.fov_deg[1] - self.fov_deg[0]) * dice[:, 0]
        xi = self.xi[0] + (self.xi[1] - self.xi[0]) * dice[:, 1]
        if self.fov_deg[0] == self.fov_deg[1] and self.xi[0] == self.xi[1]:
            fov_deg, xi = fov_deg[0, 0], xi[0, 0]
        unified = UnifiedCamera.from_fov(fov_deg, xi, self.width, self.height)
        if self.xi != (0.0, 0.0):
            return unified
        return Pinhole(unified.fx, unified.fy, unified.cx, unified.cy, self.width, self.height)

    def cameras(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> Cameras:
        """The drives of some seeds [B, T]."""
        paths = torch.stack([self.path(seed) for seed in seeds])
        return Cameras(paths, self.lens(seeds), plan_dtype=torch.float32).to(device)

    def video(
        self,
        seeds: Sequence[int],  # one world each
        cameras: Cameras,  # [B, T]
        clear_of: Tensor | None = None,  # [B, N, 4, 4] all poses that must be free, those of the cameras by default
    ) -> Tensor:  # [B, 3, T, H, W] float32 in [−1, 1]
        """The worlds as the cameras see them."""
        world = World(tuple(seeds), cameras.device).cleared(cameras.world_from_camera if clear_of is None else clear_of)
        image = render(world, cameras, self.height, self.width).image
        return (2.0 * image - 1.0).permute(0, 4, 1, 2, 3).contiguous()


def _lens_dice(seed: int) -> Tensor:  # [2] float64
    """Numbers that are independent of the drive of the same seed."""
    return torch.rand(2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed ^ 0x9E3779B97F4A7C15))
