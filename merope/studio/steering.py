"""From what a driver holds down to the next cameras: speed and yaw rate go to their targets as a car's would."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.trajectories import (
    MAX_ACCELERATION_M_S2,
    MAX_YAW_ACCELERATION_RAD_S2,
    step_sizes,
    unicycle_path,
)

MOST_SPEED_M_S, MOST_YAW_RATE_DEG_S = 20.0, 45.0


@dataclass(frozen=True)
class Controls:
    """What is commanded. Backward is negative; right is positive."""

    speed_m_s: float = 0.0
    yaw_rate_deg_s: float = 0.0

    def __post_init__(self) -> None:
        limits = {"speed_m_s": MOST_SPEED_M_S, "yaw_rate_deg_s": MOST_YAW_RATE_DEG_S}
        for name, most in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= most:
                raise invalid(name, f"a number from −{most:g} to {most:g}", repr(value), "move the slider")

    @property
    def is_standing(self) -> bool:
        return self.speed_m_s == 0.0 and self.yaw_rate_deg_s == 0.0


def steered(
    last: Tensor,  # [4, 4] world_from_camera
    before: Controls,  # at the last camera
    target: Controls,
    frames: int,
    frame_rate_hz: float,
) -> tuple[Tensor, list[Controls]]:  # [frames, 4, 4] world_from_camera, and what was held at each of them
    """The next cameras of a drive. The changes per second are those of the drives that models are trained on."""
    most_m_s = MAX_ACCELERATION_M_S2 / frame_rate_hz
    most_deg_s = math.degrees(MAX_YAW_ACCELERATION_RAD_S2) / frame_rate_hz
    held = []
    for _ in range(frames):
        before = Controls(
            _towards(before.speed_m_s, target.speed_m_s, most_m_s),
            _towards(before.yaw_rate_deg_s, target.yaw_rate_deg_s, most_deg_s),
        )
        held.append(before)
    speeds = torch.tensor([one.speed_m_s for one in held], dtype=torch.float64)
    rates = torch.tensor([one.yaw_rate_deg_s for one in held], dtype=torch.float64)
    return last @ unicycle_path(speeds, rates.deg2rad(), frame_rate_hz)[1:], held


def _towards(value: float, target: float, most: float) -> float:
    return value + min(max(target - value, -most), most)


def controls_of(
    world_from_camera: Tensor,  # [T, 4, 4] a level drive
    frame_rate_hz: float,
) -> list[Controls]:
    """Speed and yaw rate at every camera of a path; the first has those of the second."""
    if len(world_from_camera) < 2:
        return [Controls()] * len(world_from_camera)
    lengths_m, _ = step_sizes(world_from_camera)
    look = world_from_camera[:, [0, 2], 2]
    heading_rad = torch.atan2(look[:, 0], look[:, 1])
    turns_rad = torch.remainder(heading_rad.diff() + math.pi, 2 * math.pi) - math.pi
    speeds = (lengths_m * frame_rate_hz).clamp_max(MOST_SPEED_M_S).tolist()
    rates = (turns_rad.rad2deg() * frame_rate_hz).clamp(-MOST_YAW_RATE_DEG_S, MOST_YAW_RATE_DEG_S).tolist()
    steps = [Controls(speed, rate) for speed, rate in zip(speeds, rates, strict=True)]
    return [steps[0], *steps]
