"""Retrieved history in procedural worlds: the street of a clip, driven once more and once in the lane beside.

Both other drives follow the clip's own path. The first is a little aside, and ahead or behind, as on another day. The
second is a lane away: the lateral conflict of the paper's training. Retrieval is that of real data
(merope.curation.retrieve).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from merope.curation.retrieve import FrameTable, History, HistoryIndex, Target
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
    path, (again, beside) = clips.path(seed), other_drives(clips, seed)
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


def other_drives(clips: WorldClips, seed: int) -> tuple[Tensor, Tensor]:  # [T, 4, 4] twice
    """The same path on another day, and in the lane to its left or right."""
    path = clips.path(seed)
    shares = torch.rand(5, dtype=torch.float64, generator=dice(seed, OTHER_DRIVES))
    aside, phase, beside_phase, side, jitter = (2 * shares - 1).tolist()
    lane_m = (LANE_M if side > 0 else -LANE_M) + LANE_JITTER_M * jitter
    return _drive(path, SAME_LANE_M * aside, PHASE_FRAMES * phase), _drive(path, lane_m, PHASE_FRAMES * beside_phase)


def _drive(path: Tensor, right_m: float, ahead_frames: float) -> Tensor:  # [T, 4, 4]
    """A path followed at a distance to the right, its frames taken a part of a frame later."""
    frame = torch.arange(len(path), dtype=torch.float64)
    shifted = interpolate(path, frame, (frame + ahead_frames).clamp(0, len(path) - 1))
    offset = torch.eye(4, dtype=torch.float64)
    offset[0, 3] = right_m
    return shifted @ offset
