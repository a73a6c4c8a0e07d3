"""PanShot clips (Zhang et al. 2026): poses of shots cut from panoramas, through unified cameras of many fields of view.

A sample list is a JSON file of {pose_path, x_fov (degrees, horizontal), xi, caption}; poses are .npy (T, 3, 4),
camera-to-world, OpenCV axes, world gravity-aligned with y down. Their unit is that of a SLAM run, not the metre; the
data set divides translations by the depth of the nearest surface (`near_depth`) to make clips comparable.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from merope.datasets.clip import Clip
from merope.datasets.data_kind import FrameData, PlacedClips
from merope.datasets.loader import ClipSource
from merope.errors import invalid
from merope.formats import read
from merope.formats.files import json_lines, load_json
from merope.formats.video import read_video
from merope.geometry.lenses import UnifiedCamera
from merope.geometry.poses import rigid

FRAME_RATE_HZ = 16.0


def read_samples(samples: Path) -> list[dict[str, Any]]:
    """The rows of a sample list."""
    rows = load_json(Path(samples))
    if not isinstance(rows, list) or not rows:
        raise invalid("samples", "a JSON list of samples", samples, "each with pose_path, x_fov, xi and caption")
    return rows


def read_near_depths(path: Path) -> dict[str, float]:
    """Near depth by "<video_id>-<clip_id>"."""
    try:
        rows = json_lines(Path(path))
        depths = {f"{row['video_id']}-{row['clip_id']}": float(row["near_depth"]) for _, row in rows}
    except (KeyError, TypeError, ValueError) as error:
        expected = "lines of JSON with video_id, clip_id and near_depth"
        raise invalid(str(path), expected, repr(error), "restore the file") from None
    for key, depth in depths.items():
        if not 0 < depth < math.inf:
            raise invalid(f"near_depth of {key}", "positive and finite", depth, "repair or drop this row")
    return depths


def clip_key(pose_file: str) -> str:
    """The "<video_id>-<clip_id>" of "<video_id>-<clip_id>-<k>-<augmentation>_<j>.npy"; video ids may hold dashes."""
    return Path(pose_file).stem.rsplit("-", 2)[0]


def read_sample(
    row: dict[str, Any],
    root: Path,
    height: int,
    width: int,
    depths: dict[str, float] | None,  # of `read_near_depths`
) -> Clip:
    """The clip of one row, without frames, in a world that is turned so that the first camera has no yaw."""
    file = Path(root) / str(row["pose_path"])
    world_from_camera = read(file, "panshot").world_from_camera
    if depths is not None:
        key = clip_key(file.name)
        if key not in depths:
            raise invalid("near_depths", f"a depth for {key}", f"{len(depths)} others", "use the list of this split")
        rotation, centres = world_from_camera[:, :3, :3], world_from_camera[:, :3, 3]
        world_from_camera = rigid(rotation, centres / depths[key])
    world_from_camera = without_first_yaw(world_from_camera)
    count = world_from_camera.shape[0]
    return Clip(
        name=file.stem,
        world_from_camera=world_from_camera,
        lens=UnifiedCamera.from_fov(float(str(row["x_fov"])), float(str(row["xi"])), width, height),
        timestamps_s=torch.arange(count, dtype=torch.float64) / FRAME_RATE_HZ,
        fps=FRAME_RATE_HZ,
        caption=str(row.get("caption", "")),
        is_metric=False,
    )


def without_first_yaw(world_from_camera: Tensor) -> Tensor:  # [T, 4, 4], world y down -> [T, 4, 4]
    """The world turned about its vertical so that the first camera's forward axis has no x component."""
    forward = world_from_camera[0, :3, 2]
    yaw_rad = math.atan2(float(forward[0]), float(forward[2]))
    c, s = math.cos(-yaw_rad), math.sin(-yaw_rad)
    turn = torch.tensor([[c, 0, s, 0], [0, 1, 0, 0], [-s, 0, c, 0], [0, 0, 0, 1]], dtype=torch.float64)
    return turn @ world_from_camera


@dataclass(frozen=True)
class PanShotSource(ClipSource[Clip]):
    """The clips of a PanShot sample list whose rows name their video in `video_path`; each is read when wanted."""

    rows: Sequence[dict[str, Any]]
    root: Path
    frames: int
    height: int
    width: int
    depths: dict[str, float] | None

    @classmethod
    def open(
        cls, samples: Path, root: Path, frames: int, height: int, width: int, near_depths: Path | None
    ) -> "PanShotSource":
        """Read a sample list; translations are divided by near_depths where that file is given."""
        rows = read_samples(samples)
        without = [index for index, row in enumerate(rows) if "video_path" not in row]
        if without:
            fix = "add the path of the video, relative to the root"
            raise invalid(f"video_path in {samples}", "in every row", f"missing in row {without[0]}", fix)
        depths = None if near_depths is None else read_near_depths(near_depths)
        unknown = [] if depths is None else sorted({clip_key(row["pose_path"]) for row in rows} - depths.keys())
        if unknown:
            got = f"{len(unknown)} clips without one, first {unknown[0]}"
            raise invalid(str(near_depths), f"a depth for every clip of {samples}", got, "use the list of this split")
        return cls(rows, Path(root), frames, height, width, depths)

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return Path(self.rows[index]["pose_path"]).stem

    def made_of(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return row | {"near_depth": None if self.depths is None else self.depths[clip_key(row["pose_path"])]}

    def clip(self, index: int) -> Clip:
        clip, count = read_sample(self.rows[index], self.root, self.height, self.width, self.depths), self.frames
        if len(clip.world_from_camera) < count:
            got = len(clip.world_from_camera)
            raise invalid(f"poses of {clip.name}", f"at least {count}", got, "shorten the clip")
        video = self.root / self.rows[index]["video_path"]
        frames = read_video(video, list(range(count)), self.height, self.width)
        poses, times_s = clip.world_from_camera[:count], clip.timestamps_s[:count]
        return replace(clip, world_from_camera=poses, timestamps_s=times_s, frames=frames)


@dataclass(frozen=True)
class PanShotData(PlacedClips, FrameData):
    """Shots cut from panoramas through unified cameras. Rows of the sample list also name their `video_path`."""

    kind: Literal["panshot"]
    root: Path
    samples: Path
    validation_samples: Path | None = None
    near_depths: Path | None = None  # divide translations by these (the paper's normalisation on); None keeps them
    frames: int = field(default=81, kw_only=True)
    height: int = field(default=480, kw_only=True)
    width: int = field(default=832, kw_only=True)
    places = ("samples", "validation_samples")

    def clips_of(self, place: Path) -> PanShotSource:
        return PanShotSource.open(place, self.root, self.frames, self.height, self.width, self.near_depths)
