"""Retrieved history in procedural worlds: the street of a clip, driven once more and once in the lane beside.

Both other drives follow the clip's own path. The first is a little aside, and ahead or behind, as on another day. The
second is a lane away: the lateral conflict of the paper's training. Retrieval is that of real data
(merope.curation.retrieve).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from merope.curation.retrieve import FrameTable, History, HistoryIndex, Target, spread_frames
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.trajectories import interpolate
from merope.world.clips import OTHER_DRIVES, WorldClips, as_video, dice
from merope.world.street import LANE_M

SAME_LANE_M = 0.6  # largest distance to the side on another day
PHASE_FRAMES = 0.45  # largest part of a frame by which another drive is ahead or behind
LANE_JITTER_M = 0.4


@dataclass(frozen=True, eq=False)
class WorldReferences:
    """What was retrieved for a clip, and what must stand free for all its drives."""

    history: History
    cameras: Cameras  # [1, R] in the clip's world
    all_poses: Tensor  # [1, 3T, 4, 4] of the clip and the two other drives, on one line

    def video(self, clips: WorldClips, seed: int) -> Tensor:  # [1, 3, R, H, W] in [−1, 1]
        """The references as their cameras saw them."""
        return as_video(clips.pictures([seed], self.cameras, self.all_poses))


def retrieve_revisits(
    clips: WorldClips,
    seed: int,  # of the clip
    count: int,  # references asked for
    conflict_rate: float,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> WorldReferences:
    """References of a clip. One number is drawn: whether they come from the lane beside."""
    path = clips.path(seed)
    again, beside = other_drives(path, seed)
    table = FrameTable(
        world_from_camera=torch.cat((again, beside)),
        location=["world"] * 2 * len(path),
        traversal=["again"] * len(path) + ["beside"] * len(path),
        timestamp_s=torch.zeros(2 * len(path)),
    )
    history = HistoryIndex(table).retrieve(Target(path, "world", "clip"), count, generator, conflict_rate)
    cameras = Cameras(table.world_from_camera[history.frame][None], clips.lenses([seed]), plan_dtype=torch.float32)
    there_and_back = torch.cat((path, again.flip(0), beside))  # no jumps across houses
    return WorldReferences(history, cameras.to(device), there_and_back[None].to(device))


@dataclass(frozen=True)
class EarlierDrives:
    """Pictures that an earlier drive took along the path of each clip, one for each of the same latent frames.

    So all clips have as many, and can be learnt together. The drive keeps within what is cleared for the clip: its
    pictures show the very world of the clip, and the clip stays as it is.
    """

    clips: WorldClips
    count: int  # references asked for
    latent_stride: int  # RGB frames per latent frame
    frames: ClassVar[int] = 1  # references are pictures by themselves, as views of one frame

    @property
    def views(self) -> int:
        """References of a clip."""
        return len(self.matched)

    @property
    def matched(self) -> list[int]:
        """The latent frames that references are matched with."""
        return spread_frames(len(range(0, self.clips.frames, self.latent_stride)), self.count)

    def poses(self, path: Tensor, seed: int) -> Tensor:  # [T, 4, 4] -> [R, 4, 4]
        """Where the references of a path through the world of a seed were taken."""
        again = earlier_drive(path, seed)
        table = FrameTable(again, ["world"] * len(path), ["again"] * len(path), torch.zeros(len(path)))
        found = HistoryIndex(table).nearest(Target(path[:: self.latent_stride], "world", "clip"), self.matched)
        if found.count != self.views:
            fix = "ask for fewer: where the drive hardly moves, one picture is the nearest of several frames"
            raise invalid("history.frames", f"that many different pictures, {self.views}", found.count, fix)
        return again[found.frame]

    def cameras(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> Cameras:
        """Of the references of some clips [B, R]."""
        poses = torch.stack([self.poses(self.clips.path(seed), seed) for seed in seeds])
        return Cameras(poses, self.clips.lenses(seeds), plan_dtype=torch.float32).to(device)

    def pictures(self, seeds: Sequence[int], cameras: Cameras) -> Tensor:  # [B, R] -> uint8 [B, R, H, W, 3]
        """The references of some clips, in the worlds as the clips show them."""
        paths = torch.stack([self.clips.path(seed) for seed in seeds])
        return self.clips.pictures(seeds, cameras, paths.to(cameras.device))


def other_drives(path: Tensor, seed: int) -> tuple[Tensor, Tensor]:  # [T, 4, 4] -> [T, 4, 4] twice
    """A path through the world of a seed on another day, and in the lane to its left or right."""
    _, _, beside_phase, side, jitter = _chances(seed)
    lane_m = (LANE_M if side > 0 else -LANE_M) + LANE_JITTER_M * jitter
    return earlier_drive(path, seed), _drive(path, lane_m, PHASE_FRAMES * beside_phase)


def earlier_drive(path: Tensor, seed: int) -> Tensor:  # [T, 4, 4] -> [T, 4, 4]
    """A path through the world of a seed on another day."""
    aside, phase, *_ = _chances(seed)
    return _drive(path, SAME_LANE_M * aside, PHASE_FRAMES * phase)


def _chances(seed: int) -> list[float]:
    """What the other drives of a seed draw, in [−1, 1]."""
    return (2 * torch.rand(5, dtype=torch.float64, generator=dice(seed, OTHER_DRIVES)) - 1).tolist()


def _drive(path: Tensor, right_m: float, ahead_frames: float) -> Tensor:  # [T, 4, 4]
    """A path followed at a distance to the right, its frames taken a part of a frame later."""
    frame = torch.arange(len(path), dtype=torch.float64)
    shifted = interpolate(path, frame, (frame + ahead_frames).clamp(0, len(path) - 1))
    offset = torch.eye(4, dtype=torch.float64)
    offset[0, 3] = right_m
    return shifted @ offset
