"""Training clips of your own videos: one line a clip, with a pose file in any format."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from merope.datasets.clip import Clip
from merope.datasets.data_kind import FrameData, PlacedClips
from merope.datasets.loader import ClipSource
from merope.errors import invalid
from merope.formats import read, validate
from merope.formats.files import json_lines
from merope.formats.trajectory import Trajectory
from merope.formats.video import RATE_TOLERANCE, rate_and_size, read_video
from merope.geometry.lens_batches import has_ratio, in_row, picked, resized
from merope.geometry.trajectories import time_problem


@dataclass(frozen=True)
class VideoRow:
    """A clip of a video: frames start, start + stride, … of a file, with the same rows of a pose file.

    A rig has lists of both, one video and one pose file per view; frames with the same number are of one moment.
    """

    id: str
    video: str | list[str]
    poses: str | list[str]
    start: int = 0
    stride: int = 1
    caption: str = ""

    def __post_init__(self) -> None:
        for name, value in (("id", self.id), (f"caption of {self.id}", self.caption)):
            if not isinstance(value, str):
                raise invalid(name, "a text", repr(value), "repair the row")
        for name, least in (("start", 0), ("stride", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise invalid(f"{name} of {self.id}", f"an int ≥ {least}", repr(value), "repair the row")
        for name in ("video", "poses"):
            value = getattr(self, name)
            if not all(isinstance(file, str) for file in (value if isinstance(value, list) else [value])):
                raise invalid(f"{name} of {self.id}", "a file, or a list of files", repr(value), "repair the row")
        if type(self.video) is not type(self.poses) or len(self.videos) != len(self.pose_files) or not self.videos:
            got = f"{self.video!r} and {self.poses!r}"
            raise invalid(f"video and poses of {self.id}", "one file each, or as many of both", got, "repair the row")

    @property
    def videos(self) -> list[str]:
        """Of every view."""
        return [self.video] if isinstance(self.video, str) else self.video

    @property
    def pose_files(self) -> list[str]:
        """Of every view."""
        return [self.poses] if isinstance(self.poses, str) else self.poses


def read_video_rows(file: Path) -> list[VideoRow]:
    """Rows of a JSON-lines file {"id", "video", "poses", "start", "stride", "caption"}; other fields are left alone.

    A manifest of `merope curate` may be the same file: its fields stand beside these.
    """
    rows, known = [], VideoRow.__dataclass_fields__.keys()
    for place, row in json_lines(Path(file)):
        if {"prompt", "text"} & row.keys() and "caption" not in row:  # it would be trained without a prompt
            got = f"one under {next(name for name in ('prompt', 'text') if name in row)!r}"
            raise invalid(place, 'a text under "caption"', got, "rename the field")
        if not {"id", "video", "poses"} <= row.keys():
            raise invalid(place, "an object with id, video and poses", f"only {sorted(row)}", "repair the row")
        rows.append(VideoRow(**{name: value for name, value in row.items() if name in known}))
    if not rows:
        raise invalid(str(file), "at least one clip", "none", "check how the manifest was made")
    return rows


@dataclass(frozen=True)
class VideoSource(ClipSource[Clip]):
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
        return asdict(self.rows[index])

    def trajectory(self, index: int) -> Trajectory:
        """The poses of a clip under its id, for curation; the video is not read."""
        path, chosen = self._rows_of(index, self.rows[index].pose_files[0])
        times_s = None if path.timestamps_s is None else path.timestamps_s[chosen]
        return Trajectory(
            path.world_from_camera[chosen], path.is_metric, path.convention, times_s, name=self.name(index)
        )

    def _rows_of(self, index: int, poses: str) -> tuple[Trajectory, torch.Tensor]:  # a whole path, the clip's rows [T]
        row = self.rows[index]
        path = _trajectory(self.root / poses)
        chosen = row.start + row.stride * torch.arange(self.frames)
        if int(chosen[-1]) >= path.count:
            raise invalid(f"poses of {row.id}", f"at least {int(chosen[-1]) + 1}", path.count, "shorten the clip")
        return path, chosen

    def clip(self, index: int) -> Clip:
        row = self.rows[index]
        views = [self._view(index, *files) for files in zip(row.videos, row.pose_files, strict=True)]
        if len(views) == 1:
            return views[0]
        counts = [self.frames] * len(views)
        return replace(
            views[0],
            world_from_camera=torch.cat([view.world_from_camera for view in views]),
            lens=in_row([view.lens for view in views], counts),
            frames=torch.cat([view.frames for view in views if view.frames is not None]),
            views=len(views),
        )

    def _view(self, index: int, video: str, poses: str) -> Clip:
        """A clip of one camera."""
        row = self.rows[index]
        path, chosen = self._rows_of(index, poses)
        if path.lens is None:
            raise invalid(f"lens of {row.id}", "in the pose file", "none", f"write intrinsics into {poses}")
        problem = "no times" if path.timestamps_s is None else time_problem(path.timestamps_s)
        if path.timestamps_s is None or problem is not None:
            raise invalid(f"times of {row.id}", "increasing timestamps", problem, f"write them into {poses}")
        times_s = path.timestamps_s[chosen]
        return Clip(
            name=row.id,
            world_from_camera=path.world_from_camera[chosen],
            lens=resized(picked(path.lens, chosen), self.width, self.height),
            timestamps_s=times_s - times_s[0],
            fps=float(1 / times_s.diff().median()) if self.frames > 1 else 1.0,
            frames=read_video(self.root / video, chosen.tolist(), self.height, self.width),
            caption=row.caption,
            is_metric=path.is_metric,
        )

    def doubts(self, most: int = 16) -> list[str]:
        """What looks wrong with a few clips, spread over all: unit, convention, times, jumps; poses of another video.

        Files that cannot be read are left to the loader, which names them.
        """
        said = list[str]()
        videos = {poses: video for row in self.rows for poses, video in zip(row.pose_files, row.videos, strict=True)}
        for file in list(videos)[:: -(-len(videos) // most)]:
            try:
                path = _trajectory(self.root / file)
            except (ValueError, OSError):
                continue
            said += self._unlike_video(file, path, videos[file])
            if not path.is_metric:
                said.append(f"{file} is of arbitrary scale: the model will not learn metres; scale it and say so there")
            said += [f"{file}: {finding.message}; {finding.hint}" for finding in validate(path)]
        return said

    def _unlike_video(self, poses: str, path: Trajectory, video: str) -> Iterator[str]:
        """Frame i has pose i: what speaks against it."""
        try:
            rate_hz, width, height = rate_and_size(self.root / video)
        except (ValueError, OSError):
            return
        if path.timestamps_s is not None and path.count > 1 and time_problem(path.timestamps_s) is None:
            poses_hz = float(1.0 / path.timestamps_s.diff().median())
            if abs(rate_hz / poses_hz - 1.0) > RATE_TOLERANCE:
                yield (
                    f"{poses} has {poses_hz:.3g} poses a second, {video} {rate_hz:.3g} frames: a frame and the pose of "
                    "its number are not of one moment; write a pose for every frame"
                )
        if path.lens is not None and not has_ratio(path.lens, width, height):
            yield (
                f"{poses} has a lens for {path.lens.width}×{path.lens.height}, {video} is of {width}×{height}: "
                "write the lens of these frames"
            )


@dataclass(frozen=True)
class VideoData(PlacedClips, FrameData):
    """Videos with pose files (docs/training.md, "Your own videos")."""

    kind: Literal["videos"]
    root: Path
    manifest: Path
    validation_manifest: Path | None = None
    places = ("manifest", "validation_manifest")

    def clips_of(self, place: Path) -> VideoSource:
        return VideoSource(read_video_rows(place), self.root, self.frames, self.height, self.width)


@lru_cache(maxsize=64)
def _trajectory(file: Path) -> Trajectory:
    """Many clips are cut from one path."""
    return read(file)
