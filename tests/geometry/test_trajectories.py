"""Driving paths, turns and lane shifts, interpolation, smoothing, and checks of paths."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import random_poses, random_rotations, straight_drive
from torch import Tensor

from merope.geometry import trajectories as paths
from merope.geometry.poses import check_rigid, relative, rigid
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle, quaternion_from_matrix

seeds = st.integers(0, 2**31)
RATE_HZ = 12.0


def drive(seed: int, count: int = 49, prefix: int = 9) -> Tensor:  # [count, 4, 4]
    return paths.driving_path(count, RATE_HZ, torch.Generator().manual_seed(seed), prefix)


def circle(count: int, radius_m: float, step_rad: float) -> Tensor:  # [count, 4, 4] to the right, tangential cameras
    yaw = step_rad * torch.arange(count, dtype=torch.float64)
    rotation = matrix_from_quaternion(quaternion_from_axis_angle(torch.tensor([0.0, 1.0, 0.0]).expand(count, 3), yaw))
    centres = radius_m * torch.stack((1 - yaw.cos(), 0 * yaw, yaw.sin()), dim=-1)
    return rigid(rotation.double(), centres)


def yaw_of(path: Tensor) -> Tensor:  # [T, 4, 4] -> [T] about the world's y axis
    return torch.atan2(path[:, 0, 2], path[:, 2, 2])


def moved_world() -> Tensor:
    return rigid(random_rotations(seed=8), torch.tensor([1e3, -2e3, 5e2], dtype=torch.float64))


@given(seeds, st.sampled_from([4.0, 12.0, 30.0]), st.integers(1, 40))
def test_drives_keep_the_limits_of_a_car(seed: int, rate_hz: float, prefix: int) -> None:
    speed, yaw_rate = paths.driving_controls(60, rate_hz, torch.Generator().manual_seed(seed), prefix)
    assert speed.min() >= 2.0
    assert speed.max() <= 15.0
    assert (speed.diff().abs() * rate_hz).max() <= 3.0 + 1e-9
    assert (speed * yaw_rate).abs().max() <= 3.0 + 1e-9
    assert (speed / yaw_rate.abs().clamp_min(1e-9)).min() >= 6.0 - 1e-9
    assert (yaw_rate.diff().abs() * rate_hz).max() <= 1.0 + 1e-9
    assert speed[: prefix - 1].unique().numel() <= 1
    assert yaw_rate[: prefix - 1].unique().numel() <= 1


@given(seeds)
def test_drives_start_at_the_identity_stay_level_and_follow_their_controls(seed: int) -> None:
    path = drive(seed)
    assert (check_rigid(path) - path).abs().max() < 1e-14
    assert torch.equal(path[0], torch.eye(4, dtype=torch.float64))
    assert (path[:, 1, 3] == 0).all()
    assert (path[:, :3, 1] - torch.tensor([0.0, 1.0, 0.0])).abs().max() < 1e-14
    speed, _ = paths.driving_controls(49, RATE_HZ, torch.Generator().manual_seed(seed), 9)
    chord_m = path[:, :3, 3].diff(dim=0).norm(dim=-1)
    assert (chord_m <= speed / RATE_HZ + 1e-12).all()
    assert (chord_m >= 0.999 * speed / RATE_HZ).all()


def test_the_prefix_does_not_predict_the_rest() -> None:
    controls = [paths.driving_controls(97, RATE_HZ, torch.Generator().manual_seed(s), 9) for s in range(400)]
    speed = torch.stack([c[0] for c in controls])  # [400, 96]
    yaw_rate = torch.stack([c[1] for c in controls])
    for signal in (speed, yaw_rate):
        assert torch.corrcoef(torch.stack((signal[:, 0], signal[:, -1])))[0, 1].abs() < 0.15
    assert (speed[:, 8] - speed[:, 7]).abs().mean() * RATE_HZ > 2.0  # already the first step of the rest differs
    assert not torch.equal(drive(0), drive(1))
    assert torch.equal(drive(0), drive(0))


def test_unicycle_drives_exact_circles_and_lines() -> None:
    ones = torch.ones(30, dtype=torch.float64)
    arc = paths.unicycle_path(8.0 * ones, 0.4 * ones, RATE_HZ)
    assert (arc - circle(31, radius_m=20.0, step_rad=0.4 / RATE_HZ)).abs().max() < 1e-13
    line = paths.unicycle_path(8.0 * ones, 0.0 * ones, RATE_HZ)
    assert (line - straight_drive(31, step_m=8.0 / RATE_HZ)).abs().max() < 1e-13
    slow = paths.unicycle_path(8.0 * torch.ones(60), 0.4 * torch.ones(60), 2 * RATE_HZ)
    assert (slow[::2] - arc).abs().max() < 1e-6  # the frame rate does not matter: float32 controls, same arcs


def test_turning_a_straight_drive_gives_an_exact_circle() -> None:
    turned = paths.turn(straight_drive(31, step_m=0.5), 0.3, after=1, frame_rate_hz=10.0)
    assert (turned - circle(31, radius_m=0.5 / 0.03, step_rad=0.03)).abs().max() < 1e-12
    left = paths.turn(straight_drive(31, step_m=0.5), -0.3, after=1, frame_rate_hz=10.0)
    assert (left[:, 0, 3] + turned[:, 0, 3]).abs().max() < 1e-12
    assert left[-1, 0, 3] < -1.0


def test_turning_a_circle_back_gives_a_straight_line() -> None:
    straight = paths.turn(circle(31, radius_m=20.0, step_rad=0.03), -0.03, after=1, frame_rate_hz=1.0)
    assert (straight - straight_drive(31, step_m=20.0 * 0.03)).abs().max() < 1e-12


@given(seeds, st.integers(1, 48), st.floats(-0.5, 0.5))
def test_turns_keep_the_prefix_the_speed_and_the_height(seed: int, after: int, rate: float) -> None:
    path = drive(seed)
    turned = paths.turn(path, rate, after, RATE_HZ)
    assert torch.equal(turned[:after], path[:after])
    assert (turned[:, 1, 3] - path[:, 1, 3]).abs().max() < 1e-12
    gained = torch.remainder(yaw_of(turned) - yaw_of(path) + math.pi, 2 * math.pi) - math.pi
    assert (gained[after:] - rate / RATE_HZ * torch.arange(1, 50 - after, dtype=torch.float64)).abs().max() < 1e-9
    steps, before = turned[:, :3, 3].diff(dim=0).norm(dim=-1), path[:, :3, 3].diff(dim=0).norm(dim=-1)
    assert (steps / before - 1).abs().max() < 2e-3  # chords differ, arcs do not
    again = paths.turn(turned, -rate, after, RATE_HZ)
    assert (again - path).abs().max() < 1e-9


@given(seeds, st.floats(-2.0, 2.0))
def test_turn_by_reaches_its_angle(seed: int, yaw: float) -> None:
    path = drive(seed)
    turned = paths.turn_by(path, yaw, after=9)
    assert torch.equal(turned[:9], path[:9])
    gained = relative(path[-1], turned[-1])[:3, :3]
    assert math.isclose(math.atan2(gained[0, 2], gained[0, 0]), yaw, abs_tol=1e-9)


def test_turn_takes_a_profile_and_refuses_other_lengths() -> None:
    profile = torch.zeros(40)
    profile[20:] = 0.4
    turned = paths.turn(straight_drive(49), profile, after=9, frame_rate_hz=RATE_HZ)
    assert (turned[:29] - straight_drive(49)[:29]).abs().max() < 1e-12
    assert yaw_of(turned)[-1] == pytest.approx(20 * 0.4 / RATE_HZ)
    with pytest.raises(ValueError, match=r"yaw_rate_rad_s must be a number or \[40\], got \[39\]"):
        paths.turn(straight_drive(49), profile[1:], after=9, frame_rate_hz=RATE_HZ)
    for after in (0, 49, 60):
        with pytest.raises(ValueError, match="after must be between 1 and 48"):
            paths.turn_by(straight_drive(49), 1.0, after)


@pytest.mark.parametrize("offset", [3.0, -3.0])
def test_lane_shift_of_a_straight_drive_is_a_smoothstep(offset: float) -> None:
    path = straight_drive(41, step_m=1.0)
    shifted = paths.lateral_shift(path, offset, after=1)
    x = torch.linspace(0, 1, 41, dtype=torch.float64)
    assert (shifted[:, 0, 3] - offset * (3 * x**2 - 2 * x**3)).abs().max() < 1e-12
    assert (shifted[:, 2, 3] - path[:, 2, 3]).abs().max() < 1e-12
    assert (yaw_of(shifted) - torch.atan(offset * 6 * x * (1 - x) / 40)).abs().max() < 1e-12
    assert shifted[-1, 0, 3] == pytest.approx(offset)


def test_lane_shift_of_a_circle_ends_on_the_concentric_circle() -> None:
    path = circle(60, radius_m=30.0, step_rad=0.02)
    shifted = paths.lateral_shift(path, 3.0, after=5)  # to the right, towards the centre at x = 30
    centre = torch.tensor([30.0, 0.0, 0.0], dtype=torch.float64)
    radius = (shifted[:, :3, 3] - centre).norm(dim=-1)
    assert radius[-1] == pytest.approx(27.0, abs=1e-9)
    assert (shifted[-1, :3, :3] - path[-1, :3, :3]).abs().max() < 1e-9
    tangent = torch.nn.functional.normalize(shifted[2:, :3, 3] - shifted[:-2, :3, 3], dim=-1)
    assert ((tangent * shifted[1:-1, :3, 2]).sum(-1)[5:] > math.cos(1e-4)).all()


@given(seeds, st.integers(1, 40), st.floats(-4, 4))
def test_lane_shifts_keep_the_prefix_and_the_end_heading(seed: int, after: int, offset: float) -> None:
    path = drive(seed)
    shifted = paths.lateral_shift(path, offset, after)
    assert torch.equal(shifted[:after], path[:after])
    moved = relative(path[-1], shifted[-1])
    assert (moved[:3, :3] - torch.eye(3)).abs().max() < 1e-9
    assert moved[:3, 3].norm() == pytest.approx(abs(offset), abs=1e-9)
    assert moved[0, 3] * offset >= 0


def test_nobody_slides_sideways_while_standing() -> None:
    path = straight_drive(30)
    path[10:20, 2, 3] = path[10, 2, 3]
    shifted = paths.lateral_shift(path, 3.0, after=5)
    assert shifted[10:20, 0, 3].unique().numel() == 1
    with pytest.raises(ValueError, match="moving after frame 4"):
        paths.lateral_shift(torch.eye(4, dtype=torch.float64).repeat(9, 1, 1), 3.0, after=5)


@pytest.mark.parametrize(("axis", "angle_rad"), [(0, -0.2), (0, 0.3), (1, 1.2), (1, 3.0)], ids=str)
def test_pitched_and_sideways_cameras_stay_on_the_road(axis: int, angle_rad: float) -> None:
    body = drive(3)
    quaternion = quaternion_from_axis_angle(torch.eye(3, dtype=torch.float64)[axis], torch.tensor(angle_rad).double())
    body_from_camera = rigid(matrix_from_quaternion(quaternion), torch.zeros(3, dtype=torch.float64))
    for variant in (lambda p: paths.turn(p, 0.3, 9, RATE_HZ), lambda p: paths.lateral_shift(p, 3.0, 9)):
        changed = variant(body @ body_from_camera)
        assert (changed[:, 1, 3] - body[:, 1, 3]).abs().max() < 1e-3
        assert (changed - variant(body) @ body_from_camera).abs().max() < 1e-3


def test_a_path_straight_up_has_no_road_to_turn_on() -> None:
    rising = torch.eye(4, dtype=torch.float64).repeat(10, 1, 1)
    rising[:, 1, 3] = -torch.arange(10.0)
    for changed in (lambda: paths.turn_by(rising, 0.5, after=3), lambda: paths.lateral_shift(rising, 2.0, after=3)):
        with pytest.raises(ValueError, match="across the cameras' y axis"):
            changed()


@given(seeds)
def test_everything_moves_with_the_world(seed: int) -> None:
    path, world = drive(seed), moved_world()
    times = torch.arange(49, dtype=torch.float64) / RATE_HZ
    operations = (
        lambda p: paths.turn(p, 0.3, 9, RATE_HZ),
        lambda p: paths.turn_by(p, -0.6, 9),
        lambda p: paths.lateral_shift(p, -3.0, 9),
        lambda p: paths.resample(p, times, 7.0)[0],
    )
    for operation in operations:
        assert (operation(world @ path) - world @ operation(path)).abs().max() < 1e-8


@given(seeds, st.floats(0, 1))
def test_slerp_turns_at_constant_rate_the_short_way(seed: int, share: float) -> None:
    a, b = quaternion_from_matrix(random_rotations(2, seed=seed))
    part = paths.slerp(a, b, torch.tensor(share, dtype=torch.float64))
    assert part.norm() == pytest.approx(1)
    angle = 2 * math.acos(min(1.0, abs(float(a @ b))))
    assert 2 * math.acos(min(1.0, abs(float(a @ part)))) == pytest.approx(share * angle, abs=1e-7)
    assert torch.allclose(matrix_from_quaternion(paths.slerp(a, -b, torch.tensor(share))), matrix_from_quaternion(part))
    back = paths.slerp(b, a, torch.tensor(1 - share, dtype=torch.float64))
    assert (matrix_from_quaternion(back) - matrix_from_quaternion(part)).abs().max() < 1e-12


def test_interpolation_hits_the_given_poses_and_halves_a_turn() -> None:
    path = random_poses(6)
    times = torch.tensor([0.0, 0.1, 0.4, 0.5, 2.0, 2.1], dtype=torch.float64)
    assert (paths.interpolate(path, times, times) - path).abs().max() < 1e-14
    pair = circle(2, radius_m=20.0, step_rad=0.5)
    (middle,) = paths.interpolate(pair, torch.tensor([0.0, 1.0]), torch.tensor([0.5]))
    assert yaw_of(middle[None])[0] == pytest.approx(0.25)
    assert (middle[:3, 3] - pair[:, :3, 3].mean(0)).abs().max() < 1e-14


@pytest.mark.parametrize("time", [-1e-6, 2.1 + 1e-6, math.nan])
def test_interpolation_refuses_to_extrapolate(time: float) -> None:
    times = torch.tensor([0.0, 0.1, 0.4, 0.5, 2.0, 2.1], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"new_times_s must be within \[0.0, 2.1\], got .* at index 1"):
        paths.interpolate(random_poses(6), times, torch.tensor([1.0, time], dtype=torch.float64))


@given(seeds, st.sampled_from([10.0, 12.0, 20.0, 23.976, 30.0]))
def test_resampling_twice_is_resampling_once(seed: int, rate_hz: float) -> None:
    path = drive(seed)
    times = 1.4e9 + torch.arange(49, dtype=torch.float64) / RATE_HZ
    once, once_times = paths.resample(path, times, rate_hz)
    assert once.shape[0] == math.floor(4 * rate_hz + 1e-3) + 1
    twice, twice_times = paths.resample(once, once_times, rate_hz)
    assert torch.equal(once_times, twice_times)
    assert (once - twice).abs().max() < 1e-12
    same, _ = paths.resample(path, times, RATE_HZ)
    assert (same - path).abs().max() < 1e-4  # times near 1.4e9 s are known to 2.4e-7 s


def test_a_last_frame_missed_by_rounding_is_kept() -> None:
    times = torch.tensor([0.0, 1.9995 / RATE_HZ], dtype=torch.float64)
    resampled, new_times = paths.resample(straight_drive(2), times, RATE_HZ)
    assert new_times.tolist() == [0.0, 1 / RATE_HZ, float(times[1])]
    assert (resampled[-1] - straight_drive(2)[-1]).abs().max() < 1e-12


def test_bad_times_are_named_with_their_index() -> None:
    times = torch.arange(5, dtype=torch.float64)
    for value, words in ((1.0, "a duplicate timestamp at index 2"), (0.5, "time running backwards"), (math.nan, "NaN")):
        bad = times.clone()
        bad[2] = value
        with pytest.raises(ValueError, match=words):
            paths.resample(random_poses(5), bad, 10.0)
    with pytest.raises(ValueError, match=r"\[5, 4, 4\] and \[4\]"):
        paths.check_path(random_poses(5), times[:4])
    with pytest.raises(ValueError, match="frame_rate_hz must be positive"):
        paths.resample(random_poses(5), times, 0.0)


@given(seeds, st.integers(0, 48), st.booleans())
def test_jumps_are_found_and_driving_is_not_one(seed: int, frame: int, shift_rest: bool) -> None:
    path, times = drive(seed), torch.arange(49, dtype=torch.float64) / RATE_HZ
    assert paths.jumps(path, times).tolist() == []
    path[frame : None if shift_rest else frame + 1, 1, 3] += 25.0
    expected = [frame - 1] if shift_rest else [frame - 1, frame]
    assert paths.jumps(path, times).tolist() == [k for k in expected if 0 <= k < 48]


def test_a_flipped_frame_is_a_jump_and_a_late_frame_is_none(highway: Tensor) -> None:
    path = straight_drive(20)
    path[7, :3, :3] = path[7, :3, :3] @ torch.diag(torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64))
    assert paths.jumps(path).tolist() == [6, 7]
    gap = straight_drive(40)[[*range(10), *range(30, 40)]]
    times = torch.tensor([*range(10), *range(30, 40)], dtype=torch.float64)
    assert paths.jumps(gap).tolist() == [9]
    assert paths.jumps(gap, times).tolist() == []
    parked = torch.cat((straight_drive(40), straight_drive(40)[-1:].repeat(40, 1, 1)))
    parked[40:, 0, 3] = 1e-4 * torch.arange(40)
    parked[60:, 0, 3] += 5e-3  # a twitch of a standing car
    assert paths.jumps(parked).tolist() == []
    assert paths.jumps(highway).tolist() == []
    assert paths.jumps(highway[:1]).tolist() == []


def test_jumps_are_looked_for_where_the_path_is() -> None:
    """Where another device is the default, a tensor that is made without naming one would not meet the path's."""
    path = straight_drive(20)
    path[7:, 2, 3] += 50.0
    for times_s in (None, torch.arange(20, dtype=torch.float64)):
        with torch.device("meta"):
            found, none = paths.jumps(path, times_s), paths.jumps(path[:1])
        assert found.tolist() == [6]
        assert none.device == path.device


def test_resampling_to_no_frame_is_refused(highway: Tensor) -> None:
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        paths.resample(highway, torch.arange(len(highway), dtype=torch.float64), 1.0, most=0)


def test_resampling_is_bounded() -> None:
    """Times in nanoseconds, taken for seconds, must not fill the memory."""
    times = 5e7 * torch.arange(5, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"times_s must be of at most 1,000,000 frames at 12 Hz, got 2.4e\+09; .*seconds"
    ):
        paths.resample(straight_drive(5), times, 12.0)
    resampled, new_times = paths.resample(straight_drive(5), times, 12.0, most=7)
    assert resampled.shape == (7, 4, 4)
    torch.testing.assert_close(new_times, torch.arange(7, dtype=torch.float64) / 12.0, rtol=0, atol=1e-12)
