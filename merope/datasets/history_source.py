"""nuScenes clips together with the frames that other drives took of the same place.

Which of the two candidates a clip is trained with, the nearest frames or those of a neighbouring lane, is decided
later, where the dice of the clip are known; loading both costs a few images next to the dozens of the clip.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merope.curation.retrieve import FrameTable, History, HistoryIndex, Target, spread_frames
from merope.datasets.clip import Clip
from merope.datasets.loader import Batch, ClipSource, collate
from merope.datasets.nuscenes import NuScenes
from merope.errors import invalid
from merope.formats.video import read_image
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole


@dataclass(frozen=True, eq=False)
class DonorFrames:
    """R retrieved images with their cameras, in the map frame of the clip."""

    frames: Tensor  # uint8 [R, H, W, 3]
    cameras: Cameras  # [R]
    matched: Tensor  # int64 [R] latent frames of the clip


@dataclass(frozen=True, eq=False)
class ClipWithHistory:
    """A clip and its candidates; None where no other drive came by."""

    clip: Clip
    nearest: DonorFrames | None
    beside: DonorFrames | None  # from a neighbouring lane

    def chosen(self, wants_conflict: bool) -> DonorFrames | None:
        """A lateral conflict where one is wanted and there is one, otherwise the nearest frames."""
        return self.beside if wants_conflict and self.beside is not None else self.nearest


@dataclass(frozen=True, eq=False)
class FrameLibrary:
    """The frames of some scenes as history for all clips."""

    data: NuScenes
    rows: NDArray[np.int64]  # of the data's frame table, in the order of the index
    index: HistoryIndex

    @classmethod
    def of(cls, data: NuScenes, scenes: Sequence[str] | None) -> Self:
        """Frames of these scenes, None takes all. A traversal is a log: the scenes of one log overlap."""
        table = data.frames
        names = table.scene_name[table.scene]
        rows = np.flatnonzero(np.isin(names, list(scenes))) if scenes is not None else np.arange(len(names))
        frames = FrameTable(
            world_from_camera=torch.from_numpy(table.world_from_camera[rows]),
            location=table.location[table.scene[rows]].tolist(),
            traversal=table.log[table.scene[rows]].tolist(),
            timestamp_s=torch.from_numpy(table.timestamp_us[rows] * 1e-6),
        )
        return cls(data, rows, HistoryIndex(frames))

    def donors(self, history: History | None, height: int, width: int) -> DonorFrames | None:
        """Read the images of a history."""
        if history is None or history.count == 0:
            return None
        table, rows = self.data.frames, self.rows[history.frame.numpy()]
        images = [read_image(self.data.root / str(name), height, width) for name in table.filename[rows]]
        fx, fy, cx, cy = torch.from_numpy(table.intrinsics[rows]).unbind(-1)
        across, down = torch.from_numpy(np.array((width, height)) / table.size[rows]).unbind(-1)
        lens = Pinhole(fx * across, fy * down, cx * across, cy * down, width, height)
        poses = torch.from_numpy(table.world_from_camera[rows])
        return DonorFrames(torch.stack(images), Cameras(poses, lens), history.target)


@dataclass(frozen=True, eq=False)
class HistorySource(ClipSource[ClipWithHistory]):
    """Clips with what a library of frames holds about their places."""

    source: ClipSource[Clip]
    library: FrameLibrary
    count: int  # references asked for
    latent_stride: int  # RGB frames per latent frame

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def clip(self, index: int) -> ClipWithHistory:
        clip, library = self.source.clip(index), self.library
        target = Target(clip.world_from_camera[:: self.latent_stride], clip.location, clip.traversal)
        asked = spread_frames(len(target.world_from_camera), self.count)
        found = library.index.nearest(target, asked), library.index.neighbouring_lane(target, asked)
        nearest, beside = (library.donors(history, clip.lens.height, clip.lens.width) for history in found)
        return ClipWithHistory(clip, nearest, beside)


def collate_history(clips: Sequence[ClipWithHistory]) -> tuple[Batch, ClipWithHistory]:
    """One clip as a batch, and the clip with its candidates: others have different numbers of references."""
    if len(clips) != 1:
        raise invalid("clips with history", "one at a time", len(clips), "use run.micro_batch = 1")
    return collate([clips[0].clip]), clips[0]
