"""Drives given by numbers: straight on, a turn, a change of lanes, a stop; and the numbers of any path.

The first pose is the identity. Right is positive. Drives begin straight on for `start_s` seconds.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.trajectories import MOST_FRAMES, lateral_shift, step_sizes, turn, unicycle_path

BRAKING_M_S2 = 2.0  # gentle, also for starting again


def straight_drive(speed_m_s: float, seconds: float, frame_rate_hz: float) -> Tensor:  # [T, 4, 4] float64
    """Straight on at a constant speed."""
    speeds_m_s = torch.full((_steps(seconds, frame_rate_hz),), _finite("speed", speed_m_s), dtype=torch.float64)
    return unicycle_path(speeds_m_s, torch.zeros_like(speeds_m_s), frame_rate_hz)


def turning_drive(
    speed_m_s: float, yaw_rate_rad_s: float, start_s: float, seconds: float, frame_rate_hz: float
) -> Tensor:  # [T, 4, 4] float64
    """A circle after the straight part."""
    path = straight_drive(speed_m_s, seconds, frame_rate_hz)
    first = _first_changed(start_s, seconds, frame_rate_hz)
    return turn(path, _finite("yaw rate", yaw_rate_rad_s), first, frame_rate_hz)


def shifting_drive(
    speed_m_s: float, offset_m: float, start_s: float, seconds: float, frame_rate_hz: float
) -> Tensor:  # [T, 4, 4] float64
    """A change of lanes after the straight part, which ends with the path."""
    path = straight_drive(speed_m_s, seconds, frame_rate_hz)
    return lateral_shift(path, _finite("offset", offset_m), _first_changed(start_s, seconds, frame_rate_hz))


def stop_and_go_drive(
    speed_m_s: float, stop_s: float, start_s: float, seconds: float, frame_rate_hz: float
) -> Tensor:  # [T, 4, 4] float64
    """Braking to a stop after the straight part, standing, and going on at the same speed."""
    count, braking_s = _steps(seconds, frame_rate_hz), abs(_finite("speed", speed_m_s)) / BRAKING_M_S2
    if braking_s == 0.0:
        return straight_drive(0.0, seconds, frame_rate_hz)
    needed_s = start_s + braking_s + stop_s + braking_s
    if not (start_s >= 0.0 and stop_s >= 0.0 and needed_s <= seconds):
        expected = f"at least {needed_s:g} for a start of {start_s:g} s and a stop of {stop_s:g} s (neither negative)"
        raise invalid("seconds", expected, f"{seconds:g}", "give it more seconds, or drive more slowly")
    middle_s = (torch.arange(count, dtype=torch.float64) + 0.5) / frame_rate_hz
    braking = 1.0 - (middle_s - start_s) / braking_s
    starting = (middle_s - start_s - braking_s - stop_s) / braking_s
    speeds_m_s = speed_m_s * torch.maximum(braking, starting).clamp(0.0, 1.0)
    return unicycle_path(speeds_m_s, torch.zeros_like(speeds_m_s), frame_rate_hz)


@dataclass(frozen=True)
class Motion:
    """The numbers of a path, from step to step."""

    length_m: float
    top_speed_m_s: float
    top_turn_rad_s: float  # about any axis


def motion(
    world_from_camera: Tensor,  # [T, 4, 4]
    times_s: Tensor,  # [T] increasing
) -> Motion:
    """How far, how fast and how sharply a path goes."""
    if len(world_from_camera) < 2:
        return Motion(0.0, 0.0, 0.0)
    intervals_s, (lengths_m, turns_rad) = times_s.diff(), step_sizes(world_from_camera)
    rates = ((lengths_m / intervals_s).max(), (turns_rad / intervals_s).max())
    return Motion(float(lengths_m.sum()), float(rates[0]), float(rates[1]))


def _steps(seconds: float, frame_rate_hz: float) -> int:
    steps = seconds * frame_rate_hz
    if not (0.0 < frame_rate_hz < math.inf and 0.5 < steps < MOST_FRAMES):
        expected = f"of at least 2 and at most {MOST_FRAMES:,} frames"
        raise invalid("seconds and fps", expected, f"{seconds:g} s at {frame_rate_hz:g} fps", "such as 4 s at 12 fps")
    return round(steps)


def _first_changed(start_s: float, seconds: float, frame_rate_hz: float) -> int:
    if not 0.0 <= start_s < seconds - 0.5 / frame_rate_hz:
        raise invalid("start", f"from 0 to less than {seconds:g} s", f"{start_s:g}", "turn before the path ends")
    return 1 + round(start_s * frame_rate_hz)


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise invalid(name, "a finite number", value, "check the command")
    return value
