"""A take: one path driven through a street from its true first frames on, and how well the model followed it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merope.demo.given_paths import on_the_road, path_source
from merope.evaluate.world_scores import score_clip
from merope.formats.video import as_bytes, write_video
from merope.generate.camera_path import for_whole_path, read_metric_path
from merope.geometry.cameras import Cameras
from merope.geometry.poses import relative
from merope.studio.recording import write_cameras
from merope.studio.street_view import StreetView, Where, on_the_ground
from merope.studio.studio_model import StudioModel
from merope.world.commanded import CommandedClip

LEFT_M = 1.0  # from the command: the camera has left the path


@dataclass(frozen=True, eq=False)
class Take:
    """The video of a path, and its files."""

    view: StreetView
    world_from_camera: Tensor  # [T, 4, 4]
    frames: Tensor  # uint8 [T, H, W, 3], the given ones included
    given: int
    video: Path

    def write_cameras(self, kind: str) -> Path:
        file = self.video.with_suffix(f".{kind}")
        return write_cameras(self.world_from_camera, self.view.lens, self.view.clips.frame_rate_hz, file)


@dataclass(frozen=True, eq=False)
class Verdict:
    """How a take followed its path."""

    true: Tensor  # uint8 [T, H, W, 3]
    found: list[Where]
    off_m: dict[int, float]  # by frame, where a pose was found
    rot_deg: float | None
    metric_tr_percent: float | None
    psnr_db: float
    left_frame: int | None  # the first generated frame that is off the path, or has no pose


def make_take(
    model: StudioModel, view: StreetView, path: Tensor, video: Path, on_step: Callable[[int, int], None]
) -> Take:  # path [T, 4, 4]
    """Drive the beginning of a path that the model can make."""
    poses = path[: model.fitting_frames(len(path))]
    view.clear(poses)
    prefix = view.pictures(poses[: model.prefix_frames])
    frames = model.clip(prefix, Cameras(poses, view.lens, plan_dtype=torch.float32), on_step)
    write_video(frames, video, model.clips.frame_rate_hz)
    return Take(view, poses, frames, len(prefix), video)


def judge(take: Take) -> Verdict:
    """Recover where the camera went. The given frames are always right and do not count."""
    view, poses = take.view, take.world_from_camera
    seen = view.seen(poses)
    cameras = Cameras(poses, view.lens, plan_dtype=torch.float32)
    clip = CommandedClip(view.seed, "drawn", cameras, as_bytes(seen.image), view.world, seen)
    score = score_clip(clip, take.frames, take.given)
    is_found = score.valid.tolist()
    distances_m = (score.recovered[:, :3, 3] - poses[:, :3, 3]).norm(dim=-1).tolist()
    off_m = {k: distances_m[k] for k in range(len(poses)) if is_found[k]}
    left = (k for k in range(take.given, len(poses)) if off_m.get(k, LEFT_M) >= LEFT_M)
    numbers = score.metrics.as_dict()
    rot_deg, tr_percent = numbers["rot_deg"], numbers["metric_tr_percent"]
    return Verdict(
        clip.true,
        [where for where in on_the_ground(score.recovered, list(range(len(poses)))) if is_found[where.frame]],
        off_m,
        rot_deg if isinstance(rot_deg, float) else None,
        tr_percent if isinstance(tr_percent, float) else None,
        score.psnr_db,
        next(left, None),
    )


def read_dropped(file: Path, model: StudioModel, assume_metric: bool) -> Tensor:  # [T, 4, 4]
    """A pose file of any format, at the rate of the model's clips, from the start of the street on."""
    source = path_source(file, model.clips, assume_metric)
    poses = for_whole_path(source, read_metric_path(source)).world_from_camera
    return on_the_road(Path(file.name), relative(poses[:1], poses))
