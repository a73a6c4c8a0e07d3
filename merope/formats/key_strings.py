"""Key strings of games, `w*40 a*10 w*40`: a drive by the keys that are held from frame to frame.

w goes forward and s backward, a turns left and d right, one step per frame; `wa*10` holds two keys for ten steps. A car
does not turn on the spot, so a and d alone go forward too. A full stop stands still. `speed=4` (m/s) and `yaw=20` (°/s)
hold from there on; with `speed=0`, a and d do turn on the spot. N steps make N + 1 poses, the first is the identity.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import Sample, data_lines
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text
from merope.geometry.poses import relative
from merope.geometry.quaternions import sinc
from merope.geometry.trajectories import MOST_FRAMES, unicycle_path

SPEED_M_S, YAW_RATE_DEG_S, FRAME_RATE_HZ = 8.0, 15.0, 12.0
KEYS = re.compile(r"(\.|[wasd]{1,2})(?:\*(\d{1,7}))?")
SETTING = re.compile(r"(speed|yaw)=(\S+)")
FORWARD, RIGHT = {"w": 1, "s": -1}, {"d": 1, "a": -1}
EXAMPLE = "write it as w*40 wa*10 w*40 (docs/formats.md)"
UNITS = {"speed": "metres per second", "yaw": "degrees per second"}
STANDING = ".*0"  # a single pose
NOISE, DIGITS = 1e-12, 13  # of speeds and yaw rates that are written
SAME_PATH = 1e-6  # of the extent of a path, and at least in metres: what keys must give back to be written


@dataclass(frozen=True)
class Step:
    """What happens from one frame to the next."""

    speed_m_s: float  # backward is negative
    yaw_rate_deg_s: float  # positive to the right


def poses_from_keys(
    keys: str,
    frame_rate_hz: float,
    speed_m_s: float = SPEED_M_S,
    yaw_rate_deg_s: float = YAW_RATE_DEG_S,
) -> Tensor:  # [T, 4, 4] float64 world_from_camera, metres; the first pose is the identity
    """The drive that a key string describes: exact arcs between the frames, on a level plane."""
    words = keys.split()
    if all(SETTING.fullmatch(word) for word in words):
        raise invalid("keys", "at least one key", repr(keys), EXAMPLE)
    steps = list(_steps(words, speed_m_s, yaw_rate_deg_s))
    speeds = torch.tensor([step.speed_m_s for step in steps], dtype=torch.float64)
    rates = torch.tensor([step.yaw_rate_deg_s for step in steps], dtype=torch.float64)
    return unicycle_path(speeds, rates.deg2rad(), frame_rate_hz)


def _steps(words: list[str], speed_m_s: float, yaw_rate_deg_s: float) -> Iterator[Step]:
    settings = {name: _checked(name, value) for name, value in (("speed", speed_m_s), ("yaw", yaw_rate_deg_s))}
    count = 0
    for word in words:
        if setting := SETTING.fullmatch(word):
            settings[setting[1]] = _checked(setting[1], setting[2])
            continue
        held = KEYS.fullmatch(word)
        if held is None or len(set(held[1])) < len(held[1]) or set(held[1]) in ({"w", "s"}, {"a", "d"}):
            raise invalid("keys", "w, a, s, d or a full stop, each with *COUNT", repr(word), EXAMPLE)
        count += int(held[2] or 1)
        if count >= MOST_FRAMES:
            raise invalid("keys", f"fewer than {MOST_FRAMES:,} steps", repr(word), "drive in several parts")
        forward = 0 if held[1] == "." else max((FORWARD.get(key, 0) for key in held[1]), key=abs) or 1
        right = sum(RIGHT.get(key, 0) for key in held[1])
        yield from [Step(forward * settings["speed"], right * settings["yaw"])] * int(held[2] or 1)


def _checked(name: str, value: float | str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise invalid(
            name, f"a number of {UNITS[name]}, not below 0", value, "the keys say forward or backward, left or right"
        )
    return number


def keys_from_poses(
    world_from_camera: Tensor,  # [T, 4, 4]
    frame_rate_hz: float,
) -> str:
    """The key string of a level drive along the optical axis; any other path is refused."""
    path = relative(world_from_camera[:1], world_from_camera)
    moved = relative(path[:-1], path[1:])
    turn_rad = torch.atan2(moved[:, 0, 2], moved[:, 2, 2])
    along_m = (moved[:, 0, 3] * (turn_rad / 2).sin() + moved[:, 2, 3] * (turn_rad / 2).cos()) / sinc(turn_rad / 2)
    controls = torch.stack((along_m, turn_rad.rad2deg()), dim=-1) * frame_rate_hz
    steps = [Step(_without_noise(speed), _without_noise(rate)) for speed, rate in controls.tolist()]
    text = " ".join(_words(steps)) or STANDING
    extent_m = max(1.0, float(path[:, :3, 3].abs().max()))
    off = float((poses_from_keys(text, frame_rate_hz) - path).abs().max())
    if off > SAME_PATH * extent_m:
        got = f"one that slips, climbs or tilts by {off:.3g}"
        raise invalid("trajectory", "a level drive along the optical axis for keys", got, "write merope JSON instead")
    return text


def _without_noise(value: float) -> float:
    """The number of the drive: what is left of rounding, here and in the poses, would make a run of every step."""
    return 0.0 if abs(value) < NOISE else float(f"{value:.{DIGITS}g}")


def _words(steps: list[Step]) -> Iterator[str]:
    speed, yaw = SPEED_M_S, YAW_RATE_DEG_S
    for step, run in groupby(steps):
        key = "." if step == Step(0.0, 0.0) else ("s" if step.speed_m_s < 0.0 else "w")
        key += "" if step.yaw_rate_deg_s == 0.0 else ("d" if step.yaw_rate_deg_s > 0.0 else "a")
        if key != "." and abs(step.speed_m_s) != speed:
            speed = abs(step.speed_m_s)
            yield f"speed={speed!r}"
        if step.yaw_rate_deg_s != 0.0 and abs(step.yaw_rate_deg_s) != yaw:
            yaw = abs(step.yaw_rate_deg_s)
            yield f"yaw={yaw!r}"
        yield f"{key}*{len(list(run))}"


def matches(sample: Sample) -> bool:
    """A text of nothing but keys and settings."""
    words = [word for line in sample.data_lines for word in line.split()]
    return bool(words) and all(KEYS.fullmatch(word) or SETTING.fullmatch(word) for word in words)


def read(
    path: Path, fps: float = FRAME_RATE_HZ, speed: float = SPEED_M_S, yaw_rate: float = YAW_RATE_DEG_S
) -> Trajectory:
    """A file with a key string, on any number of lines. speed (m/s) and yaw_rate (°/s): until the file says another."""
    lines = list(data_lines(path))
    try:
        poses = poses_from_keys(" ".join(text for _, text in lines), fps, speed, yaw_rate)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return Trajectory(
        world_from_camera=poses,
        is_metric=True,
        convention=f"keys at {fps:g} frames per second: a level drive in metres from the identity, OpenCV axes",
        timestamps_s=torch.arange(len(poses), dtype=torch.float64) / fps,
        name=path.stem,
    )


def write(trajectory: Trajectory, path: Path, fps: float = FRAME_RATE_HZ) -> None:
    """The keys of a level drive, as seen from its first camera. Pass the fps of the path; times are not written."""
    replace_text(path, keys_from_poses(trajectory.world_from_camera, fps) + "\n")
