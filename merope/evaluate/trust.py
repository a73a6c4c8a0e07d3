"""Whether recovered poses can be believed: a second, independent estimator has to find the same path.

An estimator can be wrong without knowing it: all frames have a pose, many points fit, and the path is another one. Two
estimators that work in different ways are rarely wrong in the same way.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from merope.evaluate.estimators.estimator import PoseEstimate
from merope.evaluate.estimators.structure_from_motion import ColmapEstimator
from merope.evaluate.metrics import NORM_FLOOR, aligning_scale, relative_to_first
from merope.geometry.poses import rotation_angle

MAX_TURN_DEG, MAX_SHIFT_PERCENT = 2.0, 10.0
"""Estimators agree below both. On true renders two right paths differ by up to 0.8° and 5 %, a right and a wrong one by
10 % or more, most of them by 15° and 30 % (docs/estimators.md)."""

UNCHECKED = "could not be checked"

SMALL_PX = 144
"""On frames with a shorter side COLMAP is wrong too often to be believed alone."""


@dataclass(frozen=True)
class Difference:
    """How far two recovered paths are apart, over the frames that both have."""

    turn_deg: float  # mean angle between orientations
    shift_percent: float  # mean distance of centres after scaling, of the farthest centre

    def __str__(self) -> str:
        return f"{self.turn_deg:.2g}° and {self.shift_percent:.2g} % of the way"

    @property
    def is_small(self) -> bool:
        return self.turn_deg <= MAX_TURN_DEG and self.shift_percent <= MAX_SHIFT_PERCENT


def difference(first: PoseEstimate, second: PoseEstimate) -> Difference | None:
    """Of the second path from the first; None where they share less than half of the first one's frames."""
    shared = first.valid & second.valid
    if int(shared.sum()) < max(3, int(first.valid.sum()) / 2):
        return None
    here, there = (relative_to_first(one.world_from_camera[shared]) for one in (first, second))
    turn_rad = rotation_angle(here[1:, :3, :3], there[1:, :3, :3]).mean()
    return Difference(math.degrees(float(turn_rad)), _shift_percent(here[:, :3, 3], there[:, :3, 3]))


def _shift_percent(here: Tensor, there: Tensor) -> float:  # [n, 3] relative centres each
    farthest = here.norm(dim=-1).max()
    if float(farthest) <= NORM_FLOOR:
        return 0.0 if float(there.norm(dim=-1).max()) <= NORM_FLOOR else math.inf
    return 100.0 * float((here - aligning_scale(here, there) * there)[1:].norm(dim=-1).mean() / farthest)


def is_small(estimator_name: str, frames: Tensor) -> bool:  # uint8 [T, H, W, 3]
    """Whether the frames are too small for an estimator to be believed alone."""
    return estimator_name == ColmapEstimator.name and min(frames.shape[1:3]) < SMALL_PX


def checked(
    estimate: PoseEstimate,
    frames: Tensor,  # uint8 [T, H, W, 3]
    ask_second: Callable[[], PoseEstimate] | None,  # None: nobody is asked
) -> PoseEstimate:
    """The estimate with what the second estimator says of it, and whether that leaves a doubt."""
    if int(estimate.valid.sum()) < max(2, len(frames) / 2):
        return estimate  # failed: there is nothing to believe
    check, verdict = ("", None) if ask_second is None else _compared(estimate, ask_second)
    doubt = ""
    if verdict is not None and not verdict.is_small:
        doubt = f"the estimators disagree: {check}"
    elif verdict is None and is_small(estimate.name, frames):
        size = f"{frames.shape[1]}×{frames.shape[2]}"
        reason = check or "no second estimator checked it"
        doubt = f"frames of {size} are too small for {estimate.name} alone, it needs {SMALL_PX} pixels; {reason}"
    return replace(estimate, check=check, doubt=doubt)


def _compared(estimate: PoseEstimate, ask_second: Callable[[], PoseEstimate]) -> tuple[str, Difference | None]:
    try:
        second = ask_second()
    except ModuleNotFoundError:
        raise
    except Exception as error:  # of any library below: the poses of the first estimator are still there
        return f"{UNCHECKED}: {type(error).__name__}: {error}", None
    found = difference(estimate, second)
    if found is None:
        seen = f"{int(second.valid.sum())} of {len(second.valid)}"
        return f"{UNCHECKED}: {second.name} found a pose in {seen} frames", None
    return f"{second.name} differs by {found}", found
