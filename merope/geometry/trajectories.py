"""Camera paths [T, 4, 4]: driving paths, the evaluation's variants of a path, resampling, and checks.

Yaw is positive to the right and lateral offsets are positive to the right, as the camera axes y (down) and x (right)
say. Everything that acts on a given path moves with the world frame: vertical and forward come from the path itself.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from merope.errors import invalid
from merope.geometry.poses import check_rigid, rigid, rotation_angle
from merope.geometry.quaternions import (
    matrix_from_quaternion,
    quaternion_from_axis_angle,
    quaternion_from_matrix,
    sinc,
    slerp,
)

SPEED_RANGE_M_S = (2.0, 15.0)
MAX_ACCELERATION_M_S2 = 3.0  # along and across the road: brisk, but what passengers accept
MAX_YAW_RATE_RAD_S = 0.6
MAX_YAW_ACCELERATION_RAD_S2 = 1.0  # above 0.5, the fastest that the limit on the yaw rate falls as the speed changes
MIN_TURN_RADIUS_M = 6.0
TARGET_HOLD_S = 2.0  # after the prefix the driver changes his mind this often

MOST_FRAMES = 1_000_000  # of a path that is resampled: nine hours at 30 Hz
STANDSTILL_M = 1e-6  # a path shorter than this has no direction of travel
VERTICAL = 1e-6  # sine of the angle between travel and the camera's y axis below which there is no road
JUMP_FACTOR = 8.0  # times the median of the steps around: full braking reaches 2
JUMP_FLOOR = 1e-3  # of the extent of the path: below, standing still with noise would count as jumping
JUMP_WINDOW = 7  # steps; a single wrong pose makes two of them wrong
JUMP_TURN_RAD = math.radians(45.0)


def driving_path(
    count: int, frame_rate_hz: float, generator: torch.Generator, prefix: int
) -> Tensor:  # [count, 4, 4] float64
    """A random drive whose first `prefix` frames do not say where it goes.

    Speed and yaw rate are constant during the prefix; then both go, as fast as the limits above allow, to targets that
    are drawn independently of the prefix and again every two seconds. The first pose is the identity; cameras stay
    level (y down) at its height.
    """
    _check_after(prefix, count, "prefix")
    speed_m_s, yaw_rate_rad_s = driving_controls(count, frame_rate_hz, generator, prefix)
    return unicycle_path(speed_m_s, yaw_rate_rad_s, frame_rate_hz)


def driving_controls(
    count: int, frame_rate_hz: float, generator: torch.Generator, prefix: int
) -> tuple[Tensor, Tensor]:  # [count − 1] m/s, [count − 1] rad/s
    """Speed and yaw rate between the frames of a random drive, within the limits of a passenger car."""
    step_s = 1.0 / _checked_rate(frame_rate_hz)
    target_count = 2 + int((count - prefix) * step_s / TARGET_HOLD_S)
    draws = torch.rand(target_count, 2, dtype=torch.float64, generator=generator).tolist()
    slowest, fastest = SPEED_RANGE_M_S
    targets = [(slowest + (fastest - slowest) * a, 2.0 * b - 1.0) for a, b in draws]  # speed, share of full steering
    speed, share = targets[0]
    yaw_rate = share * _yaw_rate_limit_rad_s(speed)
    controls = []
    for k in range(count - 1):
        if k >= prefix - 1:  # step k leads from frame k to frame k + 1
            target_speed, share = targets[1 + int((k - prefix + 1) * step_s / TARGET_HOLD_S)]
            speed = _approach(speed, target_speed, MAX_ACCELERATION_M_S2 * step_s)
            target_rate = share * _yaw_rate_limit_rad_s(speed)
            yaw_rate = _approach(yaw_rate, target_rate, MAX_YAW_ACCELERATION_RAD_S2 * step_s)
        controls.append((speed, yaw_rate))
    speed_m_s, yaw_rate_rad_s = torch.tensor(controls, dtype=torch.float64).reshape(-1, 2).unbind(-1)
    return speed_m_s, yaw_rate_rad_s


def _yaw_rate_limit_rad_s(speed_m_s: float) -> float:
    """What the steering, the tyres and the passengers allow at a speed."""
    return min(MAX_YAW_RATE_RAD_S, speed_m_s / MIN_TURN_RADIUS_M, MAX_ACCELERATION_M_S2 / speed_m_s)


def _approach(value: float, target: float, largest_change: float) -> float:
    return value + max(-largest_change, min(largest_change, target - value))


def unicycle_path(
    speed_m_s: Tensor,  # [T − 1] along the optical axis
    yaw_rate_rad_s: Tensor,  # [T − 1] positive to the right
    frame_rate_hz: float,
) -> Tensor:  # [T, 4, 4] float64, the first pose is the identity
    """Level path of a vehicle with constant speed and yaw rate between frames: exact arcs, no Euler steps.

    An arc that turns by δ has the chord (arc length)·sin(δ/2)/(δ/2) in the direction half-way through the turn.
    """
    speed, rate = speed_m_s.to(torch.float64), yaw_rate_rad_s.to(torch.float64)
    turn_rad, length_m = rate / _checked_rate(frame_rate_hz), speed / frame_rate_hz
    heading_rad = pad(turn_rad.cumsum(0), (1, 0))
    middle_rad = heading_rad[:-1] + turn_rad / 2
    chord_m = length_m * sinc(turn_rad / 2)
    steps_m = torch.stack((chord_m * middle_rad.sin(), torch.zeros_like(chord_m), chord_m * middle_rad.cos()), dim=-1)
    down = heading_rad.new_tensor([0.0, 1.0, 0.0])
    return rigid(_turn_about(down, heading_rad), pad(steps_m.cumsum(0), (0, 0, 1, 0)))


def turn(
    world_from_camera: Tensor,  # [T, 4, 4]
    yaw_rate_rad_s: float | Tensor,  # or [T − after], one per step from frame after − 1 on; positive to the right
    after: int,
    frame_rate_hz: float,
) -> Tensor:  # [T, 4, 4] float64
    """The path with a yaw rate added to its own from frame `after` − 1 on: the evaluation's left and right turns.

    The first `after` poses are returned to the last bit. Speed, height, pitch and roll stay as they were.
    """
    path = check_rigid(world_from_camera)
    _check_after(after, path.shape[0])
    rate = torch.as_tensor(yaw_rate_rad_s, dtype=torch.float64, device=path.device)
    count = path.shape[0] - after
    if rate.shape not in ((), (count,)):
        fix = "pass one rate per step that starts at frame after − 1 or later"
        raise invalid("yaw_rate_rad_s", f"a number or [{count}]", list(rate.shape), fix)
    added_turn_rad = rate.expand(count) / _checked_rate(frame_rate_hz)
    added_yaw_rad = added_turn_rad.cumsum(0)
    _, down = mount(path)
    tail = path[after - 1 :]
    own_turn_rad = _yaw_between(tail[:-1], tail[1:], down)
    steps = tail[:, :3, 3].diff(dim=0)
    rise = (steps @ down)[:, None] * down
    level = _turn_about(down, added_yaw_rad - added_turn_rad / 2) @ (steps - rise)[..., None]
    arc_factor = sinc((own_turn_rad + added_turn_rad) / 2) / sinc(own_turn_rad / 2)  # keeps arcs, not chords, as long
    centres = tail[:1, :3, 3] + (rise + arc_factor[:, None] * level.squeeze(-1)).cumsum(0)
    turned = rigid(_turn_about(down, added_yaw_rad) @ tail[1:, :3, :3], centres)
    return torch.cat((world_from_camera[:after].to(torch.float64), turned))


def turn_by(
    world_from_camera: Tensor,  # [T, 4, 4]
    yaw_rad: float,  # positive to the right
    after: int,
) -> Tensor:  # [T, 4, 4] float64
    """`turn` given by the heading that the last frame gains; it grows by smoothstep from frame `after` − 1 on."""
    steps = max(world_from_camera.shape[0] - after, 1)
    progress = torch.arange(steps + 1, dtype=torch.float64, device=world_from_camera.device) / steps
    return turn(world_from_camera, yaw_rad * smoothstep(progress).diff(), after, frame_rate_hz=1.0)


def lateral_shift(
    world_from_camera: Tensor,  # [T, 4, 4]
    offset_m: float,  # positive to the right
    after: int,
) -> Tensor:  # [T, 4, 4] float64
    """The path moved sideways, as in a change of lanes that starts at frame `after` − 1 and ends with the path.

    The offset grows by smoothstep of the distance driven, so nobody slides sideways at a red light; the heading follows
    the new path. The first `after` poses are returned to the last bit.
    """
    path = check_rigid(world_from_camera)
    _check_after(after, path.shape[0])
    forward_camera, down = mount(path)
    tail = path[after - 1 :]
    distance_m = pad(torch.linalg.vector_norm(tail[:, :3, 3].diff(dim=0), dim=-1).cumsum(0), (1, 0))
    if float(distance_m[-1]) < STANDSTILL_M:
        fix = "use a path that moves after the prefix"
        raise invalid("world_from_camera", f"moving after frame {after - 1}", f"{float(distance_m[-1]):.3g} m", fix)
    progress = distance_m / distance_m[-1]
    shift_m = offset_m * smoothstep(progress)
    slope = offset_m * 6.0 * progress * (1.0 - progress) / distance_m[-1]  # d shift / d distance
    heading_change_rad = torch.atan2(slope, 1.0 - _curvature_per_m(tail, down, distance_m) * shift_m)
    forward = tail[:, :3, :3] @ forward_camera
    right = normalize(torch.linalg.cross(down.expand_as(forward), forward), dim=-1)
    rotation = _turn_about(down, heading_change_rad) @ tail[:, :3, :3]
    shifted = rigid(rotation, tail[:, :3, 3] + shift_m[:, None] * right)
    return torch.cat((world_from_camera[:after].to(torch.float64), shifted[1:]))


def mount(world_from_camera: Tensor) -> tuple[Tensor, Tensor]:  # [T, 4, 4] -> [3] camera frame, [3] world frame; unit
    """How the camera sits on what carries it: the mean direction of travel seen by the camera, and the road's down.

    Down is the camera's y axis made perpendicular to travel, averaged over the path: right for level cameras that look
    anywhere and for pitched ones that look ahead or back. A path that stands still counts as moving along its axis; one
    that leads straight up or down in the camera's eyes has no road, and is refused.
    """
    rotation, centres = world_from_camera[:, :3, :3], world_from_camera[:, :3, 3]
    if centres.shape[0] > 2:  # central differences: chords of a circle are parallel to the tangent in between
        travel = (rotation[1:-1].mT @ (centres[2:] - centres[:-2])[..., None]).sum(0).squeeze(-1)
    else:
        travel = rotation[0].mT @ (centres[-1] - centres[0])
    z_axis, y_axis = travel.new_tensor([0.0, 0.0, 1.0]), travel.new_tensor([0.0, 1.0, 0.0])
    forward = normalize(travel, dim=-1) if float(torch.linalg.vector_norm(travel)) > STANDSTILL_M else z_axis
    down_camera = y_axis - (y_axis @ forward) * forward
    if float(torch.linalg.vector_norm(down_camera)) < VERTICAL:
        got = f"moving along it by {float(travel[1]):.3g} m"
        raise invalid("world_from_camera", "moving across the cameras' y axis", got, "use a path along the ground")
    return forward, normalize((rotation @ down_camera).sum(0), dim=-1)


def _curvature_per_m(path: Tensor, down: Tensor, distance_m: Tensor) -> Tensor:  # [T, 4, 4], [3], [T] -> [T]
    """Yaw per metre at each frame, from the frames beside it; 0 where the vehicle stands."""
    yaw_rad = pad(_yaw_between(path[:-1], path[1:], down).cumsum(0), (1, 0))
    index = torch.arange(path.shape[0], device=path.device)
    following, previous = (index + 1).clamp_max(path.shape[0] - 1), (index - 1).clamp_min(0)
    driven_m = distance_m[following] - distance_m[previous]
    return torch.where(driven_m > STANDSTILL_M, (yaw_rad[following] - yaw_rad[previous]) / driven_m, 0.0)


def _yaw_between(a: Tensor, b: Tensor, down: Tensor) -> Tensor:  # [N, 4, 4] twice, [3] -> [N]
    """Angle about `down` of the rotation from a to b: the twist of the swing-twist decomposition."""
    quaternion = quaternion_from_matrix(b[..., :3, :3] @ a[..., :3, :3].mT)
    half_rad = torch.atan2(quaternion[..., 1:] @ down, quaternion[..., 0])
    return 2.0 * torch.remainder(half_rad + math.pi / 2, math.pi) - math.pi


def _turn_about(axis: Tensor, angle_rad: Tensor) -> Tensor:  # [3], [N] -> [N, 3, 3]
    return matrix_from_quaternion(quaternion_from_axis_angle(axis.expand(*angle_rad.shape, 3), angle_rad))


def smoothstep(x: Tensor) -> Tensor:
    """3x² − 2x³: from 0 to 1 with slope 0 at both ends."""
    return x.square() * (3.0 - 2.0 * x)


def interpolate(
    world_from_camera: Tensor,  # [T, 4, 4]
    times_s: Tensor,  # [T] increasing
    new_times_s: Tensor,  # [N] within the given ones
) -> Tensor:  # [N, 4, 4] float64
    """Poses at other times: centres linearly, rotations by slerp the short way round. Never extrapolates."""
    path, times = check_path(world_from_camera, times_s)
    new_times = new_times_s.to(times)
    outside = ~((new_times >= times[0]) & (new_times <= times[-1]))
    if bool(outside.any()):
        got = f"{float(new_times[outside][0])} at index {int(outside.nonzero()[0])}"
        expected = f"within [{float(times[0])}, {float(times[-1])}]"
        raise invalid("new_times_s", expected, got, "leave out times that the path does not cover")
    if path.shape[0] == 1:
        return path.expand(new_times.shape[0], 4, 4).clone()
    after = torch.searchsorted(times, new_times, right=True).clamp(1, path.shape[0] - 1)
    share = (new_times - times[after - 1]) / (times[after] - times[after - 1])
    a, b = path[after - 1], path[after]
    quaternion = slerp(quaternion_from_matrix(a[:, :3, :3]), quaternion_from_matrix(b[:, :3, :3]), share)
    return rigid(matrix_from_quaternion(quaternion), a[:, :3, 3] + share[:, None] * (b[:, :3, 3] - a[:, :3, 3]))


def resample(
    world_from_camera: Tensor,  # [T, 4, 4]
    times_s: Tensor,  # [T] increasing
    frame_rate_hz: float,
    most: int | None = None,
) -> tuple[Tensor, Tensor]:  # [N, 4, 4] float64, [N] seconds
    """Poses at a constant frame rate from the first time on, and their times: as many as the path covers, or `most`."""
    path, times = check_path(world_from_camera, times_s)
    rate = _checked_rate(frame_rate_hz)
    if most is not None and most < 1:
        raise invalid("most", "at least 1", most, "leave it out for all frames")
    # A last frame that is missed by the rounding of the times themselves is kept.
    covered = 1.0 + float((times[-1] - times[0]) * rate) + 1e-3
    if most is None and covered > MOST_FRAMES:
        fix = "check that the times are in seconds, or say how many frames you need"
        raise invalid("times_s", f"of at most {MOST_FRAMES:,} frames at {rate:g} Hz", f"{covered:.3g}", fix)
    count = math.floor(min(covered, MOST_FRAMES if most is None else most))
    new_times = times[0] + torch.arange(count, dtype=torch.float64, device=times.device) / rate
    new_times = new_times.clamp_max(float(times[-1]))
    return interpolate(path, times, new_times), new_times


def check_path(
    world_from_camera: Tensor,  # [T, 4, 4]
    times_s: Tensor,  # [T]
) -> tuple[Tensor, Tensor]:  # [T, 4, 4] float64, [T] float64
    """Refuse poses that are not rigid and times that are not finite or do not increase, naming the first bad frame."""
    path = check_rigid(world_from_camera)
    if path.ndim != 3 or path.shape[0] == 0 or times_s.shape != path.shape[:1]:
        got = f"{list(path.shape)} and {list(times_s.shape)}"
        raise invalid("world_from_camera and times_s", "[T, 4, 4] and [T] with T ≥ 1", got, "pass one time per pose")
    problem = time_problem(times_s)
    if problem is not None:
        raise invalid("times_s", "finite and increasing", problem, "drop or repair these frames")
    return path, times_s.to(torch.float64)


def time_problem(times_s: Tensor) -> str | None:  # [T]
    """The first thing wrong with timestamps, with its index, in words; None if they are finite and increase."""
    finite = torch.isfinite(times_s)
    if not bool(finite.all()):
        return f"NaN or inf at index {int((~finite).nonzero()[0])}"
    bad = (times_s.diff() <= 0).nonzero()
    if len(bad) == 0:
        return None
    k = int(bad[0])
    kind = "a duplicate timestamp" if bool(times_s[k] == times_s[k + 1]) else "time running backwards"
    return f"{kind} at index {k + 1} ({float(times_s[k])} s, then {float(times_s[k + 1])} s), {len(bad)} such in all"


def jumps(
    world_from_camera: Tensor,  # [T, 4, 4]
    times_s: Tensor | None = None,  # [T] increasing
) -> Tensor:  # [K] index k of each jump from frame k to frame k + 1
    """Steps that the motion around them does not explain: far faster than the steps around, or a sudden turn."""
    if world_from_camera.shape[0] < 2:
        return torch.zeros(0, dtype=torch.long, device=world_from_camera.device)
    interval_s = 1.0 if times_s is None else times_s.diff()
    length, turn_rad = step_sizes(world_from_camera)
    centres = world_from_camera[:, :3, 3]
    extent = torch.linalg.vector_norm(centres - centres[0], dim=-1).max()
    leap = _stands_out(length / interval_s) & (length > JUMP_FLOOR * extent)
    return (leap | (_stands_out(turn_rad / interval_s) & (turn_rad > JUMP_TURN_RAD))).nonzero()[:, 0]


def step_sizes(world_from_camera: Tensor) -> tuple[Tensor, Tensor]:  # [T, 4, 4] -> [T − 1], [T − 1] radians
    """How far each step of a path goes, and how far it turns about any axis."""
    rotation, centres = world_from_camera[:, :3, :3], world_from_camera[:, :3, 3]
    return torch.linalg.vector_norm(centres.diff(dim=0), dim=-1), rotation_angle(rotation[:-1], rotation[1:])


def _stands_out(rates: Tensor) -> Tensor:  # [N] -> bool [N]
    size = min(JUMP_WINDOW, rates.shape[0])
    first = (torch.arange(rates.shape[0], device=rates.device) - size // 2).clamp(0, rates.shape[0] - size)
    return rates > JUMP_FACTOR * rates.unfold(0, size, 1).median(dim=-1).values[first]


def _checked_rate(frame_rate_hz: float) -> float:
    if not (math.isfinite(frame_rate_hz) and frame_rate_hz > 0):
        raise invalid("frame_rate_hz", "positive and finite", frame_rate_hz, "pass frames per second, such as 12.0")
    return frame_rate_hz


def _check_after(after: int, count: int, name: str = "after") -> None:
    if not 1 <= after < count:
        fix = "keep at least one frame and change at least one"
        raise invalid(name, f"between 1 and {count - 1} for {count} frames", after, fix)
