"""What an earlier drive saw along a commanded path: the history of rows that take one, and what all are scored by.

The path returns to streets that the drive has passed. The given frames of the clip show little of them.
"""

from collections.abc import Sequence

import torch

from merope.adapters.history import HistoryReferences
from merope.formats.video import as_bytes
from merope.generate.history_frames import HistoryFrames
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import stacked
from merope.world.commanded import CommandedClip
from merope.world.render import Render, render
from merope.world.revisits import EarlierDrives


def reference_cameras(clip: CommandedClip, earlier: EarlierDrives) -> Cameras:  # [R]
    """Where the references of a commanded path were taken."""
    poses = earlier.poses(clip.cameras.world_from_camera, clip.seed)
    return Cameras(poses, clip.cameras.lens, plan_dtype=torch.float32)


def seen_earlier(clip: CommandedClip, cameras: Cameras) -> Render:  # [R] -> of R frames, on the CPU
    """The world of a clip, as cleared for all of its paths, from the cameras of its references."""
    seen = render(clip.world, cameras.to(clip.world.device), *clip.true.shape[1:3])
    return Render(seen.image.cpu(), seen.depth_m.cpu(), seen.valid.cpu(), clip.world)


def history_of(clips: Sequence[CommandedClip], earlier: EarlierDrives) -> HistoryReferences:
    """References of some clips that are generated together, as images."""
    cameras = [reference_cameras(clip, earlier) for clip in clips]
    frames = torch.stack([as_bytes(seen_earlier(*each).image) for each in zip(clips, cameras, strict=True)])
    poses = torch.stack([each.world_from_camera for each in cameras])
    lens = stacked([each.lens for each in cameras])
    return HistoryFrames(frames, Cameras(poses, lens, plan_dtype=torch.float32), earlier.matched)
