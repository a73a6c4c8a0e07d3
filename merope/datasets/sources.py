"""Tables of clips for the loader: windows of nuScenes, and videos with pose files in any format."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from merope.datasets.clip import Clip
from merope.datasets.nuscenes import NuScenes, Window
from merope.datasets.panshot_clips import clip_key, read_near_depths, read_sample, read_samples
from merope.errors import invalid
from merope.formats import read, validate
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_video
from merope.geometry.lens_batches import picked, resized
from merope.geometry.trajectories import time_problem


@dataclass(frozen=True)
class NuScenesSource:
    """Windows of a nuScenes camera as clips of one size."""

    data: NuScenes
    windows: Sequence[Window]
    height: int
    width: int

    def __len__(self) -> int:
        return len(self.windows)

    def name(self, index: int) -> str:
        return self.data.name(self.windows[index])

    def clip(self, index: int) -> Clip:
        return self.data.clip(self.windows[index], self.height, self.width)


@dataclass(frozen=True)
class VideoRow:
    """A clip of a video: frames start, start + stride, … of a file, with the same rows of a pose file."""

    id: str
    video: str
    poses: str
    start: int = 0
    stride: int = 1
    caption: str = ""

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("stride", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise invalid(f"{name} of {self.id}", f"an int ≥ {least}", repr(value), "repair the row")


def read_video_rows(file: Path) -> list[VideoRow]:
    """Rows of a JSON-lines file {"id", "video", "poses", "start", "stride", "caption"}; other fields are left alone.

    A manifest of `merope curate` may be the same file: its fields stand beside these.
    """
    rows, known = [], VideoRow.__dataclass_fields__.keys()
    for number, line in enumerate(Path(file).read_text().splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
                if {"prompt", "text"} & row.keys() and "caption" not in row:  # it would be trained without a prompt
                    got = f"one under {next(name for name in ('prompt', 'text') if name in row)!r}"
                    raise invalid(f"{file}, line {number}", 'a text under "caption"', got, "rename the field")
                rows.append(VideoRow(**{name: value for name, value in row.items() if name in known}))
            except (json.JSONDecodeError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{file}, line {number}: {error}; expected an object with id, video and poses"
                ) from None
    if not rows:
        raise invalid(str(file), "at least one clip", "none", "check how the manifest was made")
    return rows


@dataclass(frozen=True)
class VideoSource:
    """Videos and pose files below a folder as clips of one length and size."""

    rows: Sequence[VideoRow]
    root: Path
    frames: int
    height: int
    width: int

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return self.rows[index].id

    def made_of(self, index: int) -> dict[str, Any]:
        """What a clip follows from besides the files: a cache of another row is not this clip's."""
        return asdict(self.rows[index])

    def trajectory(self, index: int) -> Trajectory:
        """The poses of a clip under its id, for curation; the video is not read."""
        path, chosen = self._rows_of(index)
        return Trajectory(path.world_from_camera[chosen], path.is_metric, path.convention, name=self.name(index))

    def _rows_of(self, index: int) -> tuple[Trajectory, torch.Tensor]:  # the whole path, rows of the clip [T]
        row = self.rows[index]
        path = _trajectory(self.root / row.poses)
        chosen = row.start + row.stride * torch.arange(self.frames)
        if int(chosen[-1]) >= path.count:
            raise invalid(f"poses of {row.id}", f"at least {int(chosen[-1]) + 1}", path.count, "shorten the clip")
        return path, chosen

    def clip(self, index: int) -> Clip:
        row = self.rows[index]
        path, chosen = self._rows_of(index)
        if path.lens is None:
            raise invalid(f"lens of {row.id}", "in the pose file", "none", f"write intrinsics into {row.poses}")
        problem = "no times" if path.timestamps_s is None else time_problem(path.timestamps_s)
        if path.timestamps_s is None or problem is not None:
            raise invalid(f"times of {row.id}", "increasing timestamps", problem, f"write them into {row.poses}")
        times_s = path.timestamps_s[chosen]
        return Clip(
            name=row.id,
            world_from_camera=path.world_from_camera[chosen],
            lens=resized(picked(path.lens, chosen), self.width, self.height),
            timestamps_s=times_s - times_s[0],
            fps=float(1 / times_s.diff().median()) if self.frames > 1 else 1.0,
            frames=read_video(self.root / row.video, chosen.tolist(), self.height, self.width),
            caption=row.caption,
            is_metric=path.is_metric,
        )

    def doubts(self, most: int = 16) -> list[str]:
        """What looks wrong with the paths of a few clips, spread over all: unit, convention, times, jumps.

        Files that cannot be read are left to the loader, which names them.
        """
        said = []
        files = list(dict.fromkeys(row.poses for row in self.rows))
        for file in files[:: -(-len(files) // most)]:
            try:
                path = _trajectory(self.root / file)
            except (ValueError, OSError):
                continue
            if not path.is_metric:
                said.append(f"{file} is of arbitrary scale: the model will not learn metres; scale it and say so there")
            said += [f"{file}: {finding.message}; {finding.hint}" for finding in validate(path)]
        return said


@dataclass(frozen=True)
class PanShotSource:
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
        """What a clip follows from besides the files: a cache of another row is not this clip's."""
        row = self.rows[index]
        return row | {"near_depth": None if self.depths is None else self.depths[clip_key(row["pose_path"])]}

    def clip(self, index: int) -> Clip:
        clip, count = read_sample(self.rows[index], self.root, self.height, self.width, self.depths), self.frames
        if len(clip.world_from_camera) < count:
            got = len(clip.world_from_camera)
            raise invalid(f"poses of {clip.name}", f"at least {count}", got, "shorten the clip")
        video = self.root / self.rows[index]["video_path"]
        frames = read_video(video, list(range(count)), self.height, self.width)
        return replace(
            clip,
            world_from_camera=clip.world_from_camera[:count],
            timestamps_s=clip.timestamps_s[:count],
            frames=frames,
        )


@lru_cache(maxsize=64)
def _trajectory(file: Path) -> Trajectory:
    """Many clips are cut from one path."""
    return read(file)
