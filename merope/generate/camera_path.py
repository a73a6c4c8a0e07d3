"""The cameras of a clip from a pose file: in metres, checked, at the clip's frame rate, with the lens of its size.

`merope generate`, `merope drive`, `merope analyse` and `merope demo` read their paths here.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from merope import formats
from merope.errors import invalid
from merope.formats.rig_file import read_rig
from merope.formats.trajectory import Trajectory
from merope.geometry.lens_batches import has_ratio, picked, picked_view, resized
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.trajectories import MOST_FRAMES, resample

MOST_FPS = 1000.0
Listener = Callable[[str], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@dataclass(frozen=True)
class PathSource:
    """Where a clip's cameras come from, and the clip that they are for.

    file: a pose file or folder (docs/formats.md), whose first pose is that of the first frame.
    format, options: what `formats.read` needs where the content does not say it.
    assume_metric: the path is in metres, whatever its format says.
    lens: a pose file whose lens is taken.
    fov_deg: horizontal field of view of a centred lens, a pinhole, or with xi a unified camera.
    rig: a rig file, whose views all go along the path; the lens is that of its first view.
    """

    file: Path
    frames: int
    fps: float
    height: int
    width: int
    format: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    assume_metric: bool = False
    lens: Path | None = None
    fov_deg: float | None = None
    xi: float = 0.0
    rig: Path | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.lens, self.fov_deg, self.rig)) > 1:
            raise invalid("lens, fov and rig", "one of them given", "several", "leave the others out")
        if self.xi != 0.0 and self.fov_deg is None:
            raise invalid("xi", "given with a field of view", self.xi, "add --fov DEGREES")
        for name in ("frames", "height", "width"):
            if getattr(self, name) < 1:
                raise invalid(name, "at least 1", getattr(self, name), "pass a positive number")
        if not 0.0 < self.fps <= MOST_FPS:
            fix = "pass frames per second, such as 12"
            raise invalid("fps", f"positive and at most {MOST_FPS:g}", f"{self.fps:g}", fix)


def read_clip_path(source: PathSource) -> Trajectory:
    """The clip's cameras, one per frame, with the lens for frames of the clip's size."""
    return for_clip(source, read_metric_path(source))


def read_metric_path(source: PathSource) -> Trajectory:
    """The whole path in metres with its lens as calibrated. What looks wrong is refused, what looks odd is said."""
    is_metric = True if source.assume_metric else None
    return checked_path(source, formats.read(source.file, source.format, is_metric=is_metric, **source.options))


def checked_path(source: PathSource, trajectory: Trajectory) -> Trajectory:
    """The path with its lens as calibrated; `source.file` is the name of what it was made from."""
    if not trajectory.is_metric:
        fix = "scale it to metres, or pass --assume-metric if it is in metres already"
        raise invalid(str(source.file), "in metres", f"a path of arbitrary scale ({trajectory.convention})", fix)
    trajectory = replace(trajectory, lens=_calibrated_lens(source, trajectory))
    for finding in formats.validate(trajectory):
        if finding.severity == "error":
            raise ValueError(f"{source.file}: {finding.message}; {finding.hint}")
        say(f"warning: {source.file}: {finding.message}; {finding.hint}")
    return trajectory


def for_whole_path(source: PathSource, trajectory: Trajectory) -> Trajectory:
    """All of a path at the frame rate of the video."""
    frames = at_frame_rate(trajectory, source.fps, MOST_FRAMES).count
    return for_clip(replace(source, frames=frames), trajectory)


def for_clip(source: PathSource, trajectory: Trajectory) -> Trajectory:
    """The beginning of a path at the clip's frame rate. A path that goes on longer is cut, and that is said."""
    path = at_frame_rate(trajectory, source.fps, source.frames + 1)
    clip_s = (source.frames - 1) / source.fps
    if path.count < source.frames:
        got = f"{path.count} ({trajectory.count} poses in the file)"
        fix = f"use a longer path, of {clip_s:.3g} s or more"
        raise invalid(str(source.file), f"{source.frames} frames long at {source.fps:g} fps", got, fix)
    if path.count > source.frames:
        times_s = trajectory.timestamps_s
        path_s = (trajectory.count - 1) / source.fps if times_s is None else float(times_s[-1] - times_s[0])
        lasts = f"{source.file} lasts {path_s:.3g} s"
        others = "cut off its beginning to drive another part; merope drive makes all of it"
        say(f"{lasts}; the clip is its first {clip_s:.3g} s; {others}")
    path = first_frames(path, source.frames)
    return replace(path, lens=_scaled_lens(source, path.lens))


def at_frame_rate(trajectory: Trajectory, fps: float, most: int) -> Trajectory:
    """The first frames of a path at a constant rate, at most so many of them. Lenses are those nearest in time.

    Without times, every pose is a frame.
    """
    times_s = trajectory.timestamps_s
    if times_s is None:
        whole = replace(trajectory, timestamps_s=torch.arange(trajectory.count, dtype=torch.float64) / fps)
        return first_frames(whole, most)
    poses, new_times_s = resample(trajectory.world_from_camera, times_s.contiguous(), fps, most)
    nearest = torch.bucketize(new_times_s, (times_s[1:] + times_s[:-1]) / 2)
    lens = None if trajectory.lens is None else picked(trajectory.lens, nearest)
    return replace(trajectory, world_from_camera=poses, timestamps_s=new_times_s, lens=lens, frame_names=None)


def first_frames(path: Trajectory, count: int) -> Trajectory:
    """The beginning of a path."""
    return path.at(torch.arange(min(count, path.count)))


def _calibrated_lens(source: PathSource, trajectory: Trajectory) -> Lens:
    """The lens as it was given, from the option that says most; a field of view is that of the clip's frames."""
    if source.rig is not None:
        rig = read_rig(source.rig)
        return picked_view(rig.lens, rig.views, 0)
    if source.fov_deg is not None:
        return lens_of_fov(source.fov_deg, source.xi, source.width, source.height)
    lens = trajectory.lens if source.lens is None else formats.read(source.lens).lens
    if lens is None:
        fix = "pass --fov DEGREES, or --lens FILE with a pose file that has one"
        raise invalid(str(source.lens or source.file), "a file with a lens", "poses only", fix)
    return lens


def lens_of_fov(fov_deg: float, xi: float, width: int, height: int) -> Lens:
    """A centred lens with square pixels: a pinhole, which every encoding takes, or for xi ≠ 0 a unified camera."""
    unified = UnifiedCamera.from_fov(fov_deg, xi, width, height)
    return unified if xi != 0.0 else Pinhole(unified.fx, unified.fy, unified.cx, unified.cy, width, height)


def _scaled_lens(source: PathSource, lens: Lens | None) -> Lens:
    assert lens is not None
    if not has_ratio(lens, source.width, source.height):
        say(
            f"warning: images of {lens.width}×{lens.height} are stretched to {source.width}×{source.height}; "
            "lens and prefix are scaled alike, but models know upright pictures"
        )
    return resized(lens, source.width, source.height)


def say(text: str) -> None:
    """Tell the user about an input: whoever listens, or else on stderr, beside what the command prints."""
    listener = _listener.get()
    if listener is None:
        print(f"merope: {text}", file=sys.stderr)
    else:
        listener(text)


@contextmanager
def said_to(listener: Listener) -> Iterator[None]:
    """Everything that is said in this block, and in this thread, goes to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
