"""A path drawn with a few points, as a car could drive it: past the points, never sharper than its wheels turn."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.trajectories import (
    MAX_ACCELERATION_M_S2,
    MAX_YAW_RATE_RAD_S,
    MIN_TURN_RADIUS_M,
    unicycle_path,
)
from merope.studio.steering import MOST_SPEED_M_S

MOST_POINTS, FARTHEST_M = 40, 1000.0
LEAST_SPEED_M_S = 1.0
STEPS_HZ = 48.0  # at least: how often the wheel is turned
LOOK_AHEAD_S, LOOK_AHEAD_M = 0.5, 3.0  # of driving, and at least: where the driver looks
NEARBY = 12  # places on the line that are tried for the nearest one

Point = tuple[float, float]  # metres to the right and ahead


@dataclass(frozen=True)
class DrawnPoint:
    """A place to go to, and the speed on the way there."""

    right_m: float
    ahead_m: float
    speed_m_s: float

    def __post_init__(self) -> None:
        limits = {"right_m": (-FARTHEST_M, FARTHEST_M), "ahead_m": (-FARTHEST_M, FARTHEST_M)}
        for name, (low, high) in (limits | {"speed_m_s": (LEAST_SPEED_M_S, MOST_SPEED_M_S)}).items():
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise invalid(f"{name} of a point", f"a number from {low:g} to {high:g}", repr(value), "move the point")


def drawn_path(points: Sequence[DrawnPoint], frame_rate_hz: float, most_frames: int) -> Tensor:  # [T, 4, 4]
    """The cameras of a drive from the origin, which looks ahead, past the points to the last one."""
    if not 1 <= len(points) <= MOST_POINTS:
        raise invalid("points", f"from 1 to {MOST_POINTS}", len(points), "click on the street to add one")
    line = _Line(points)
    finer = math.ceil(STEPS_HZ / frame_rate_hz)
    step_s, at, speed = 1.0 / (finer * frame_rate_hz), 0.0, points[0].speed_m_s
    place, heading_rad = (0.0, 0.0), 0.0
    speeds: list[float] = []
    rates: list[float] = []
    while at < line.length_m and len(speeds) < finer * (most_frames - 1):
        change = line.speed_m_s(at) - speed
        speed += min(max(change, -MAX_ACCELERATION_M_S2 * step_s), MAX_ACCELERATION_M_S2 * step_s)
        ahead_m = max(LOOK_AHEAD_M, LOOK_AHEAD_S * speed)
        rate = _yaw_rate(place, heading_rad, line.place(at + ahead_m), speed)
        speeds.append(speed)
        rates.append(rate)
        middle_rad = heading_rad + rate * step_s / 2
        place = (place[0] + speed * step_s * math.sin(middle_rad), place[1] + speed * step_s * math.cos(middle_rad))
        heading_rad += rate * step_s
        at = line.nearest(place, at, 3.0 * speed * step_s)
    whole = unicycle_path(
        torch.tensor(speeds, dtype=torch.float64), torch.tensor(rates, dtype=torch.float64), finer * frame_rate_hz
    )
    return whole[::finer]


def _yaw_rate(place: Point, heading_rad: float, target: Point, speed_m_s: float) -> float:
    """Along the circle through the target, as far as wheels, passengers and the model's training allow."""
    right_m, ahead_m = target[0] - place[0], target[1] - place[1]
    aside_m = right_m * math.cos(heading_rad) - ahead_m * math.sin(heading_rad)
    wanted = speed_m_s * 2.0 * aside_m / max(right_m**2 + ahead_m**2, 1e-6)
    most = min(MAX_YAW_RATE_RAD_S, speed_m_s / MIN_TURN_RADIUS_M, MAX_ACCELERATION_M_S2 / speed_m_s)
    return min(max(wanted, -most), most)


class _Line:
    """Straight from the origin to the first point, and from each to the next; by the metres along it."""

    def __init__(self, points: Sequence[DrawnPoint]) -> None:
        self._corners = [(0.0, 0.0), *((point.right_m, point.ahead_m) for point in points)]
        self._ends_m = list(accumulate(max(math.dist(a, b), 1e-9) for a, b in pairwise(self._corners)))
        self._speeds = [point.speed_m_s for point in points]

    @property
    def length_m(self) -> float:
        return self._ends_m[-1]

    def _segment(self, at_m: float) -> int:
        return min(bisect_right(self._ends_m, at_m), len(self._ends_m) - 1)

    def speed_m_s(self, at_m: float) -> float:
        return self._speeds[self._segment(at_m)]

    def place(self, at_m: float) -> Point:
        """Beyond the end the last segment goes on."""
        k = self._segment(at_m)
        begin_m = self._ends_m[k - 1] if k else 0.0
        share = (at_m - begin_m) / (self._ends_m[k] - begin_m)
        (x0, z0), (x1, z1) = self._corners[k], self._corners[k + 1]
        return x0 + (x1 - x0) * share, z0 + (z1 - z0) * share

    def nearest(self, place: Point, at_m: float, reach_m: float) -> float:
        """Where on the line, from here on, the car is. A tenth of a step is always made: no line holds it for ever."""
        tried = [at_m + reach_m * (0.03 + k / NEARBY) for k in range(NEARBY)]
        return min(tried, key=lambda one: math.dist(self.place(one), place))
