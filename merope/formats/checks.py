"""`validate`: what looks wrong with a trajectory that a file's syntax cannot tell, above all its convention.

The statistic behind the checks of convention is the direction of travel seen by the camera, R_tᵀ (o_{t+1} − o_{t−1}).
On a vehicle it is constant: its length-weighted mean m has |m| = 1, so `spread` = 1 − |m| is near 0 (θ²/2 for a scatter
of θ), also for cameras that look sideways. Poses that were not inverted lose that as soon as the path turns. m_z, the
share of travel along the optical axis, is +1 for driving ahead; OpenGL axes, and poses of a straight drive that were
not inverted, turn it to −1. Axes of a vehicle (x forward, z up or down) have m_x = +1 and turn about z, which a camera
does only when it looks straight up or down. Hand-held paths that wander (spread above 0.03) give no evidence and are
left alone.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.trajectory import Trajectory
from merope.geometry.poses import inverse, relative
from merope.geometry.quaternions import quaternion_from_matrix
from merope.geometry.trajectories import jumps, step_sizes, time_problem

VEHICLE_SPREAD = 0.03  # a scatter of 14°; real driving has 1e-5, hand-held video 0.005 to 0.25
LESS_CONSISTENT = 5.0  # how much larger a spread must be to count; honest hand-held paths differ by up to 2
SPREAD_FLOOR = 2e-5  # below, noise of real poses decides
BACKWARD = -0.7
ALONG_AXIS, ACROSS_AXIS = 0.9999, 0.98  # cosines: within 0.8° of the optical axis, and more than 11° off it
PATH_SHARE = 0.01  # of the given path's length: a shorter one is what an orbit about the origin leaves when inverted
LOOKS_AT_ORIGIN = 0.9  # cosine: what orbits look at; the origin of a map is hardly ever there
PAN_SHARE = 0.3  # of the inverted path's length: a shorter one is a pan on a tripod far from the origin
UPRIGHT = 0.9
ALONG_X, ABOUT_Z = 0.95, 0.95  # cosines: within 18° of an axis of the vehicle
LEAST_TURN_RAD = 0.1  # of a path whose axis of turning is known
MAX_SPEED_M_S = 60.0  # 216 km/h
MAX_STEP_M = 20.0  # without times: two frames per second at 144 km/h
TORN_STEP_M = 1000.0  # a jump of a tracker that lost its way is shorter: the file is damaged
VIDEO_STEP_M = 5.0  # without times, in a video: ten frames per second at 180 km/h
TURN_RADIUS_M = 200.0  # a street's turns are tighter; a car's tightest in centimetres is 500
SUBUNITS = {"centimetres": 100.0, "millimetres": 1000.0}
TIME_SUBUNITS = {"milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
LONG_INTERVAL_S, SHORT_INTERVAL_S = 0.5, 1e-4  # between frames: sparser than key frames, denser than any camera
CREEP_M_S = 0.1  # slower than anything that is filmed so sparsely
MOVED_M = 0.5  # noise about a parked car stays below


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong, and what to do about it."""

    severity: Literal["error", "warning"]  # surely wrong, or unusual enough to look at
    message: str
    hint: str


@dataclass(frozen=True)
class Travel:
    """How a path moves as seen by its camera."""

    length: float  # of the path, each step counted twice
    spread: float  # 0 for a fixed direction of travel, 1 for none
    along_axis: float  # −1 to 1
    along_x: float = 0.0  # −1 to 1, to the right

    @property
    def is_vehicle_like(self) -> bool:
        return self.spread < VEHICLE_SPREAD

    @property
    def scatter_deg(self) -> float:
        return math.degrees(math.acos(max(-1.0, min(1.0, 1.0 - self.spread))))


def validate(trajectory: Trajectory) -> list[Finding]:
    """Findings about times, jumps, convention and unit; an empty list if nothing looks wrong."""
    of_times = None if trajectory.timestamps_s is None else _time_finding(trajectory, trajectory.timestamps_s)
    times_s = trajectory.timestamps_s if of_times is None else None
    convention = _convention(trajectory, times_s)
    findings = [of_times, convention]
    if convention is None or convention.severity == "warning":
        findings += [_unit_finding(trajectory, times_s), _jump_finding(trajectory, times_s)]
    return [finding for finding in findings if finding is not None]


def require_increasing_times(trajectory: Trajectory, place: Path | str) -> None:
    """Refuse a path that is to be paired with frames, which are in order, and whose own times are not."""
    problem = None if trajectory.timestamps_s is None else time_problem(trajectory.timestamps_s)
    if problem is not None:
        raise invalid(f"times in {place}", "increasing", problem, "drop repeated poses and sort by time")


def require_sound(trajectory: Trajectory, place: Path | str) -> None:
    """Refuse a path with an error of `validate`: wrong unit, wrong convention, broken times."""
    for finding in validate(trajectory):
        if finding.severity == "error":
            raise ValueError(f"{place}: {finding.message}; {finding.hint}")


def _time_finding(trajectory: Trajectory, times_s: Tensor) -> Finding | None:
    """Times that do not increase, and times whose spacing says that they are no seconds."""
    problem = time_problem(times_s)
    if problem is not None:
        return Finding("error", f"timestamps do not increase: {problem}", "drop repeated frames or sort by time")
    if trajectory.count < 2:
        return None
    poses, interval_s = trajectory.world_from_camera, float(times_s.diff().median())
    spacing = f"times are not in seconds: frames are {interval_s:.3g} s apart"
    if interval_s < SHORT_INTERVAL_S:
        return Finding("error", spacing, "if they were divided once too often, multiply them by 1e3, 1e6 or 1e9")
    centres, pace_m_s = poses[:, :3, 3], _travelling_pace(poses, times_s)
    has_moved = float(torch.linalg.vector_norm(centres - centres[0], dim=-1).max()) > MOVED_M
    if not (trajectory.is_metric and has_moved and interval_s > LONG_INTERVAL_S and pace_m_s < CREEP_M_S):
        return None
    hints = [
        f"if they are in {unit}, divide them by {factor:g} ({pace_m_s * factor:.3g} m/s)"
        for unit, factor in TIME_SUBUNITS.items()
        if CREEP_M_S < pace_m_s * factor <= MAX_SPEED_M_S and interval_s / factor > SHORT_INTERVAL_S
    ]
    hints.append("if they count frames, or the camera does creep, leave them out: every pose is then a frame")
    return Finding("error", f"{spacing}, and the camera moves at {pace_m_s:.2g} m/s", "; ".join(hints))


def travel(world_from_camera: Tensor) -> Travel | None:  # [T, 4, 4]
    """The statistic of this module; None for fewer than three poses or a path that does not move."""
    rotation, centres = world_from_camera[:, :3, :3], world_from_camera[:, :3, 3]
    seen = (rotation[1:-1].mT @ (centres[2:] - centres[:-2])[..., None]).squeeze(-1)
    length = float(torch.linalg.vector_norm(seen, dim=-1).sum())
    if length == 0.0:
        return None
    mean = seen.sum(0) / length
    return Travel(length, 1.0 - float(torch.linalg.vector_norm(mean)), float(mean[2]), float(mean[0]))


def _convention(trajectory: Trajectory, times_s: Tensor | None) -> Finding | None:
    poses = trajectory.world_from_camera
    given, inverted = travel(poses), travel(inverse(poses))
    if given is None or inverted is None:
        return None
    is_too_fast = trajectory.is_metric and _travelling_pace(poses, times_s) > _largest_pace(times_s)
    is_orbit = inverted.length < PATH_SHARE * given.length and _looks_at_origin(poses) and not is_too_fast
    comparable = given.length > PAN_SHARE * inverted.length and not is_orbit
    is_less_consistent = _is_less_consistent(given, inverted) or _goes_forward_only_inverted(given, inverted)
    if comparable and inverted.is_vehicle_like and is_less_consistent:
        return _inverted_finding(given, inverted)
    if given.is_vehicle_like and given.along_axis < BACKWARD:
        return _backward_finding(given, may_be_inverted=not _is_less_consistent(inverted, given), poses=poses)
    if given.is_vehicle_like and given.along_x > ALONG_X and _turns_about_z(poses):
        return _body_axes_finding(given)
    return None


def _looks_at_origin(poses: Tensor) -> bool:  # [T, 4, 4]
    """Whether the world's origin stays before or behind the camera, as in an orbit about it."""
    origin = inverse(poses)[:, :3, 3].mean(0)
    return float(origin[2].abs()) > LOOKS_AT_ORIGIN * float(torch.linalg.vector_norm(origin))


def _turns_about_z(poses: Tensor) -> bool:  # [T, 4, 4]
    """Whether the farthest turn from the first camera is one about its z axis."""
    halves = quaternion_from_matrix(relative(poses[:1], poses)[:, :3, :3])[:, 1:]  # axis times sine of half the turn
    sizes = torch.linalg.vector_norm(halves, dim=-1)
    k = int(sizes.argmax())
    return float(sizes[k]) > math.sin(LEAST_TURN_RAD / 2) and float(halves[k, 2].abs() / sizes[k]) > ABOUT_Z


def _body_axes_finding(given: Travel) -> Finding:
    message = (
        f"the camera travels along its x axis (cosine {given.along_x:.2f}) and turns about its z axis, as a vehicle"
    )
    hint = (
        "if these are poses of a vehicle (x forward), multiply them by body_from_camera, the camera's place on it: for "
        "a camera that looks ahead its rows are 0 0 1, −1 0 0, 0 −1 0 (y left, z up) or 0 0 1, 1 0 0, 0 1 0 (z down); "
        "if the camera looks straight up or down, all is well"
    )
    return Finding("warning", message, hint)


def _is_less_consistent(a: Travel, b: Travel) -> bool:
    return a.spread > LESS_CONSISTENT * max(b.spread, SPREAD_FLOOR)


def _goes_forward_only_inverted(given: Travel, inverted: Travel) -> bool:
    """Nearly straight drives scatter little either way, but only one way leads exactly along the optical axis.

    Which way is left to `_inverted_finding`: forwards, or backwards if the axes are wrong too.
    """
    is_along = abs(inverted.along_axis) > ALONG_AXIS and abs(given.along_axis) < ACROSS_AXIS
    return is_along and given.spread > LESS_CONSISTENT * inverted.spread


def _inverted_finding(given: Travel, inverted: Travel) -> Finding:
    message = (
        f"poses look like world-to-camera matrices: the direction of travel seen by the camera scatters by "
        f"{given.scatter_deg:.1f}° as given and by {inverted.scatter_deg:.1f}° after inversion"
    )
    hint = "invert them: merope.geometry.poses.inverse(world_from_camera)"
    if inverted.along_axis < BACKWARD:
        hint += "; they then move backwards, so the axes may be OpenGL too: world_from_camera @ diag(1, -1, -1, 1)"
    return Finding("error", message, hint)


def _backward_finding(given: Travel, may_be_inverted: bool, poses: Tensor) -> Finding:
    is_upside_down = float(poses[:, 2, 1].mean()) > UPRIGHT  # camera y along world z, the vertical of most z-up worlds
    message = f"the camera travels against its optical axis (cosine {given.along_axis:.2f}), as if driving backwards"
    if is_upside_down:
        message += ", and its y axis, which should point down, points along the world's z axis"
    hint = "if the axes are OpenGL (y up, z backwards), use world_from_camera @ diag(1, -1, -1, 1)"
    if may_be_inverted:
        hint += "; if the poses are world-to-camera, invert them (a drive this straight does not tell the two apart)"
    return Finding("warning", message, hint + "; if the camera looks back or the vehicle reverses, all is well")


def _steps_and_paces(poses: Tensor, times_s: Tensor | None) -> tuple[Tensor, Tensor]:  # [T, 4, 4] -> [T − 1] twice
    """Metres of each step, and its pace in m/s, or per frame without times."""
    steps = torch.linalg.vector_norm(poses[:, :3, 3].diff(dim=0), dim=-1)
    return steps, steps if times_s is None else steps / times_s.diff()


def _travelling_pace(poses: Tensor, times_s: Tensor | None) -> float:
    """The pace above which half of the way was covered; standing still does not count."""
    steps, paces = _steps_and_paces(poses, times_s)
    if not len(steps):
        return 0.0
    paces, order = paces.sort()
    way = steps[order].cumsum(0)
    return float(paces[int((way < way[-1] / 2).sum())])


def _largest_pace(times_s: Tensor | None) -> float:
    return MAX_STEP_M if times_s is None else MAX_SPEED_M_S


def _unit_finding(trajectory: Trajectory, times_s: Tensor | None) -> Finding | None:
    """Metric paths must move like something on a road."""
    if not trajectory.is_metric or trajectory.count < 2:
        return None
    _, paces = _steps_and_paces(trajectory.world_from_camera, times_s)
    pace, largest = float(paces.median()), _largest_pace(times_s)
    if pace <= largest:
        return _wide_steps_finding(trajectory.world_from_camera, pace) if times_s is None else None
    unit = "m per frame" if times_s is None else "m/s"
    units = [(name, factor) for name, factor in SUBUNITS.items() if pace / factor <= largest]  # a slow drive fits both
    hint = "; ".join(f"if they are in {n}, divide them by {f:.0f} ({pace / f:.3g} {unit})" for n, f in units)
    hint = hint or (
        "the poses are world-to-camera, of arbitrary scale or damaged: invert them, read them with is_metric=False, or "
        "repair them"
    )
    return Finding("error", f"positions are not in metres: the median pace is {pace:.3g} {unit}", hint)


def _wide_steps_finding(poses: Tensor, step_m: float) -> Finding | None:
    """Without times, steps too long for a video that never turn as a street does: centimetres, or sparse key frames."""
    if step_m <= VIDEO_STEP_M or (radius_m := turning_radius(poses)) < TURN_RADIUS_M:
        return None
    bends = "does not turn" if math.isinf(radius_m) else f"turns no tighter than a radius of {radius_m:.0f} m"
    message = f"positions may not be in metres: the path moves {step_m:.3g} m per frame and {bends}"
    hint = f"if they are in centimetres, divide them by 100 ({step_m / 100:.3g} m per frame)"
    return Finding("warning", message, hint + "; if they are key frames of a fast drive, give the times, which tell")


def turning_radius(world_from_camera: Tensor) -> float:  # [T, 4, 4]
    """Radius of the tighter turns of a path, in its own unit and whatever its frame rate; inf if it never turns.

    Step length by the camera's turn, the tenth of the steps that is tightest left out: orientations carry less noise
    than directions of steps, and a few frames of shake do not count as a turn.
    """
    length, angle_rad = step_sizes(world_from_camera)
    return float((length / angle_rad).nan_to_num(nan=math.inf, posinf=math.inf).quantile(0.1, interpolation="higher"))


def _jump_finding(trajectory: Trajectory, times_s: Tensor | None) -> Finding | None:
    found = jumps(trajectory.world_from_camera, times_s).tolist()
    if not found:
        return None
    steps = ", ".join(f"{k}→{k + 1}" for k in found[:5]) + (" …" if len(found) > 5 else "")
    message = f"{len(found)} jumps in position or orientation, between frames {steps}"
    farthest_m = float(_steps_and_paces(trajectory.world_from_camera, times_s)[0][found].max())
    is_torn = trajectory.is_metric and farthest_m > TORN_STEP_M
    if is_torn:
        message += f", one of {farthest_m:.3g} m"
    hint = "split the path there, or drop the frames that lost track"
    return Finding("error" if is_torn else "warning", message, hint)
