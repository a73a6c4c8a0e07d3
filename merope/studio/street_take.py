"""A take: one path driven from the true first frames of a street, or after a video, and how well the model followed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merope.demo.given_paths import on_the_road, path_source
from merope.evaluate.world_scores import Score, score_clip
from merope.formats.video import as_bytes, write_video
from merope.generate.camera_path import for_whole_path, read_metric_path, said_to
from merope.geometry.cameras import Cameras
from merope.geometry.poses import relative
from merope.studio.recording import write_cameras
from merope.studio.street_drive import Beginning
from merope.studio.street_view import StreetView, Where, on_the_ground
from merope.studio.studio_model import Sampling, StudioModel
from merope.world.commanded import CommandedClip

LEFT_M = 1.0  # from the command: the camera has left the path


@dataclass(frozen=True, eq=False)
class Verdict:
    """How a take followed its path."""

    true: Tensor  # uint8 [T, H, W, 3]
    score: Score
    off_m: dict[int, float]  # by frame, where a pose was found
    left_frame: int | None  # the first generated frame that is off the path, or has no pose

    @property
    def found(self) -> list[Where]:
        is_found = self.score.valid.tolist()
        frames = on_the_ground(self.score.recovered, list(range(len(is_found))))
        return [where for where in frames if is_found[where.frame]]

    def number(self, name: str) -> float | None:
        """A metric that is defined for this take."""
        value = self.score.metrics.as_dict()[name]
        return value if isinstance(value, float) else None


@dataclass(frozen=True, eq=False)
class Take:
    """The video of a path, and its files."""

    model: StudioModel
    beginning: Beginning
    sampling: Sampling
    world_from_camera: Tensor  # [T, 4, 4]
    frames: Tensor  # uint8 [T, H, W, 3], the given ones included
    given: int
    video: Path
    verdict: Verdict | None = None  # once it is found

    def write_cameras(self, kind: str) -> Path:
        file = self.video.with_suffix(f".{kind}")
        return write_cameras(self.world_from_camera, self.beginning.lens, self.model.clips.frame_rate_hz, file)


def make_take(
    model: StudioModel,
    beginning: Beginning,
    sampling: Sampling,
    route: Tensor,  # [T, 4, 4] cameras of all frames
    video: Path,
    on_step: Callable[[int, int], None],
) -> Take:
    """Drive the beginning of a route that the model can make."""
    poses = route[: model.fitting_frames(len(route))]
    prefix = beginning.frames_along(poses, model.prefix_frames)
    frames = model.clip(prefix, Cameras(poses, beginning.lens, plan_dtype=torch.float32), sampling, on_step)
    write_video(frames, video, model.clips.frame_rate_hz)
    return Take(model, beginning, sampling, poses, frames, len(prefix), video)


def judge(take: Take, street: StreetView) -> Verdict:
    """Recover where the camera went. The given frames are always right and do not count."""
    poses = take.world_from_camera
    seen = street.seen(poses)
    cameras = Cameras(poses, street.lens, plan_dtype=torch.float32)
    clip = CommandedClip(street.seed, "drawn", cameras, as_bytes(seen.image), street.world, seen)
    score = score_clip(clip, take.frames, take.given)
    is_found = score.valid.tolist()
    distances_m = (score.recovered[:, :3, 3] - poses[:, :3, 3]).norm(dim=-1).tolist()
    off_m = {k: distances_m[k] for k in range(len(poses)) if is_found[k]}
    left = (k for k in range(take.given, len(poses)) if off_m.get(k, LEFT_M) >= LEFT_M)
    return Verdict(clip.true, score, off_m, next(left, None))


@dataclass(frozen=True, eq=False)
class DroppedPath:
    """A pose file that was read, and what is odd about it."""

    world_from_camera: Tensor  # [T, 4, 4] relative to its first camera
    notes: tuple[str, ...]


def read_dropped(file: Path, model: StudioModel, assume_metric: bool) -> DroppedPath:
    """A pose file of any format, at the rate of the model's clips, from the start of the street on."""
    source, notes = path_source(file, model.clips, assume_metric), list[str]()
    with said_to(notes.append):
        poses = for_whole_path(source, read_metric_path(source)).world_from_camera
    return DroppedPath(on_the_road(Path(file.name), relative(poses[:1], poses)), tuple(notes))
