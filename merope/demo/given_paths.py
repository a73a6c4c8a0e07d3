"""A path from a file, driven down the demo's street, and how far that is from what the model was trained on."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.generate.camera_path import PathSource, read_clip_path
from merope.geometry.poses import relative, rotation_angle
from merope.geometry.trajectories import MAX_YAW_RATE_RAD_S, SPEED_RANGE_M_S
from merope.world.clips import WorldClips
from merope.world.clips_file import CLIPS_FILE, read_clips

LENSES = {"pinhole": (70.0, 0.0), "fisheye": (140.0, 1.0)}
"""Horizontal field of view in degrees, and xi of the unified camera model."""

LOWEST_M = 1.2  # below the first camera; the road is 1.5 m below
LEVEL_RAD, LEVEL_M = math.radians(3.0), 0.3
STANDING_M_S = 0.2  # a standing camera has no direction
SLACK = 1.1  # on the limits of training: real drives are noisy


def seen_through(clips: WorldClips, lens: str) -> WorldClips:
    """The same clips, all through one of LENSES."""
    fov_deg, xi = LENSES[lens]
    return replace(clips, fov_deg=(fov_deg, fov_deg), xi=(xi, xi))


def clip_options(model: Path) -> dict[str, int | float]:
    """What the clips of a model are like, in the words of `merope generate`; nothing for one without a clips.json."""
    if not (model / CLIPS_FILE).is_file():
        return {}
    clips, steps = read_clips(model)
    known = {name: getattr(clips, name) for name in ("height", "width", "frames", "prefix_frames")}
    return known | {"fps": clips.frame_rate_hz, "steps": steps}


def given_path(file: Path, clips: WorldClips, assume_metric: bool) -> Tensor:  # [T, 4, 4]
    """A pose file as a drive down the street: metres, the clips' rate and length, its first camera at the start.

    Without times, every pose is a frame, as in `merope generate`. Lenses in the file are not read.
    """
    poses = read_clip_path(path_source(file, clips, assume_metric)).world_from_camera
    return on_the_road(file, relative(poses[:1], poses))


def path_source(file: Path, clips: WorldClips, assume_metric: bool) -> PathSource:
    """A pose file that is read for clips like these, through their lens."""
    return PathSource(
        file,
        clips.frames,
        clips.frame_rate_hz,
        clips.height,
        clips.width,
        assume_metric=assume_metric,
        fov_deg=clips.fov_deg[0],
        xi=clips.xi[0],
    )


def on_the_road(
    name: Path,
    poses: Tensor,  # [T, 4, 4] relative to the first camera
) -> Tensor:  # [T, 4, 4]
    """The path itself; one that goes below the road is refused."""
    lowest_m = float(poses[:, 1, 3].max())
    if lowest_m > LOWEST_M:
        expected = f"above the road, at most {LOWEST_M:g} m lower than its first camera"
        raise invalid(str(name), expected, f"{lowest_m:.2f} m lower", "use a path on level ground")
    return poses


def beyond_training(
    path: Tensor | None,  # [T, 4, 4] relative to the first camera; None for the paths of a test
    clips: WorldClips,  # that are driven, all through one lens
    trained: WorldClips,
) -> list[str]:
    """In what the commanded cameras differ from all that a model has seen, in words."""
    found = []
    if not (_within(clips.fov_deg, trained.fov_deg) and _within(clips.xi, trained.xi)):
        found.append(f"{_lens_words(clips)}; the model has seen {_lens_words(trained)} only")
    if path is not None:
        found += [*_unusual_speeds(path, clips.frame_rate_hz), *_unusual_directions(path, clips.frame_rate_hz)]
    return [f"outside the training range: {difference}" for difference in found]


def _within(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _lens_words(clips: WorldClips) -> str:
    fov_deg, xi = ("–".join(f"{end:g}" for end in sorted(set(ends))) for ends in (clips.fov_deg, clips.xi))
    return f"a {fov_deg}° pinhole" if xi == "0" else f"a {fov_deg}° fisheye (xi = {xi})"


def _unusual_speeds(
    path: Tensor,  # [T, 4, 4] relative to the first camera
    rate_hz: float,
) -> list[str]:
    slowest, fastest = SPEED_RANGE_M_S
    speeds_m_s = path[:, :3, 3].diff(dim=0).norm(dim=-1) * rate_hz
    low, high = float(speeds_m_s.min()), float(speeds_m_s.max())
    turn_rad_s = float((rotation_angle(path[:-1, :3, :3], path[1:, :3, :3]) * rate_hz).max())
    found = []
    if low * SLACK < slowest or high > SLACK * fastest:
        found.append(f"speeds of {low:.1f} to {high:.1f} m/s; the model has seen {slowest:g} to {fastest:g}")
    if turn_rad_s > SLACK * MAX_YAW_RATE_RAD_S:
        limit_deg_s = math.degrees(MAX_YAW_RATE_RAD_S)
        found.append(f"turns of {math.degrees(turn_rad_s):.0f}°/s; the model has seen up to {limit_deg_s:.0f}°/s")
    return found


def _unusual_directions(
    path: Tensor,  # [T, 4, 4] relative to the first camera
    rate_hz: float,
) -> list[str]:
    """A tilted camera, a climb, and motion against or across the camera's view."""
    found = []
    tilt_rad = float(torch.acos(path[:, 1, 1].clamp(-1.0, 1.0)).max())
    if tilt_rad > LEVEL_RAD:
        found.append(f"a camera that tilts by {math.degrees(tilt_rad):.0f}°; the model has seen level ones only")
    height_m = -path[:, 1, 3]
    if float(height_m.abs().max()) > LEVEL_M:
        extremes = f"{float(height_m.min()):+.1f} to {float(height_m.max()):+.1f} m"
        found.append(f"heights of {extremes} from the first camera; the model has seen level roads only")
    moved_m_s = path[:, :3, 3].diff(dim=0) * rate_hz
    ahead_m_s = (moved_m_s * path[:-1, :3, 2]).sum(dim=-1)
    if bool((ahead_m_s < 0.5 * moved_m_s.norm(dim=-1) - STANDING_M_S).any()):
        found.append("motion backwards or sideways; the model has seen cameras that drive where they look")
    return found
