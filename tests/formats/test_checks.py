"""`validate`: wrong conventions, units and times are found with a hint, and good files are left alone."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import random_rotations, straight_drive
from torch import Tensor

from merope import formats
from merope.formats import Finding, validate
from merope.formats.checks import Travel, travel, turning_radius
from merope.formats.trajectory import Trajectory
from merope.geometry.poses import inverse, relative, rigid, rotation_angle
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle
from merope.geometry.trajectories import driving_path, lateral_shift, turn, unicycle_path

DATA = Path(__file__).parents[1] / "data"
OPENGL = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64))
seeds = st.integers(0, 2**31)


def as_trajectory(poses: Tensor, frame_rate_hz: float | None = 12.0, is_metric: bool = True) -> Trajectory:
    times = None if frame_rate_hz is None else torch.arange(len(poses), dtype=torch.float64) / frame_rate_hz
    return Trajectory(poses, is_metric, "made for a test", timestamps_s=times)


def drive(seed: int) -> Tensor:  # [49, 4, 4] in some world far from the origin of its frame
    path = driving_path(49, 12.0, torch.Generator().manual_seed(seed), prefix=9)
    world = rigid(random_rotations(seed=seed % 1000), torch.tensor([300.0, -20.0, 90.0], dtype=torch.float64))
    return world @ path


def centimetres(poses: Tensor) -> Tensor:
    return rigid(poses[:, :3, :3], 100.0 * poses[:, :3, 3])


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.fixture(scope="module")
def comma() -> Trajectory:
    """A minute of real highway, 1,200 poses in Earth-centred coordinates."""
    load = {
        n: torch.from_numpy(np.load(DATA / "comma2k19" / f"frame_{n}.npy"))
        for n in ("positions", "orientations", "times")
    }
    rotation = matrix_from_quaternion(torch.nn.functional.normalize(load["orientations"], dim=-1))
    return Trajectory(rigid(rotation[..., [1, 2, 0]], load["positions"]), True, "comma2k19", load["times"].double())


def clips(trajectory: Trajectory) -> list[Trajectory]:
    """The whole minute, and five-second pieces of it relative to their first camera."""
    pieces = [trajectory]
    assert trajectory.timestamps_s is not None
    for k in range(0, trajectory.count - 100, 100):
        poses = trajectory.world_from_camera[k : k + 100]
        pieces.append(Trajectory(relative(poses[:1], poses), True, "clip", trajectory.timestamps_s[k : k + 100]))
    return pieces


def test_real_files_are_left_alone(comma: Trajectory) -> None:
    for path in sorted((DATA / "re10k").glob("*.txt")):
        assert validate(formats.read(path)) == []
    for clip in clips(comma):
        assert validate(clip) == []
        assert validate(replace(clip, timestamps_s=None)) == []


@given(seeds)
def test_good_drives_are_left_alone(seed: int) -> None:
    path = drive(seed)
    for variant in (path, turn(path, -0.3, 9, 12.0), lateral_shift(path, 3.0, 9), path[:2], path[:1]):
        assert validate(as_trajectory(variant)) == []
    aside = matrix_from_quaternion(quaternion_from_axis_angle(path.new_tensor([0.0, 1.0, 0.0]), path.new_tensor(1.2)))
    assert validate(as_trajectory(path @ rigid(aside, path.new_tensor([0.5, 0.0, -1.0])))) == []


def test_inverted_poses_are_found_on_real_roads(comma: Trajectory) -> None:
    for clip in clips(comma):
        finding = only(validate(replace(clip, world_from_camera=inverse(clip.world_from_camera))))
        assert "world-to-camera" in finding.message + finding.hint
        assert "invert" in finding.hint


@given(seeds)
def test_inverted_poses_are_found_and_told_apart_from_opengl(seed: int) -> None:
    path = drive(seed)
    finding = only(validate(as_trajectory(inverse(path))))
    assert finding.severity == "error"
    assert "look like world-to-camera" in finding.message
    assert "OpenGL" not in finding.hint
    both = only(validate(as_trajectory(inverse(path @ OPENGL))))
    assert "look like world-to-camera" in both.message
    assert "OpenGL" in both.hint


@given(seeds)
def test_opengl_axes_are_found(seed: int) -> None:
    path = drive(seed)
    for metric in (True, False):
        finding = only(validate(as_trajectory(path @ OPENGL, is_metric=metric)))
        assert finding.severity == "warning"
        assert "against its optical axis" in finding.message
        assert "OpenGL" in finding.hint


def test_opengl_axes_are_found_on_real_roads(comma: Trajectory) -> None:
    for clip in clips(comma):
        assert "OpenGL" in only(validate(replace(clip, world_from_camera=clip.world_from_camera @ OPENGL))).hint


def test_a_straight_drive_backwards_may_be_either_and_says_so() -> None:
    for poses in (inverse(straight_drive(20)), straight_drive(20) @ OPENGL):
        finding = only(validate(as_trajectory(poses)))
        assert "OpenGL" in finding.hint
        assert "world-to-camera" in finding.hint
    curve = driving_path(49, 12.0, torch.Generator().manual_seed(4), prefix=9) @ OPENGL
    assert "world-to-camera" not in only(validate(as_trajectory(curve))).hint


def test_a_camera_that_looks_back_is_mentioned_and_one_that_looks_aside_is_not() -> None:
    path = drive(4)
    upright = path.new_tensor([0.0, 1.0, 0.0])
    for yaw_rad, is_found in ((2.6, True), (2.1, False)):  # cosines −0.86 and −0.50
        turned = matrix_from_quaternion(quaternion_from_axis_angle(upright, path.new_tensor(yaw_rad)))
        findings = validate(as_trajectory(path @ rigid(turned, path.new_zeros(3))))
        assert ["against its optical axis" in finding.message for finding in findings] == [True] * is_found


def test_an_upside_down_camera_in_a_world_with_z_up_is_mentioned() -> None:
    z_up_from_y_down = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1]], dtype=torch.float64)
    path = z_up_from_y_down @ driving_path(49, 12.0, torch.Generator().manual_seed(4), prefix=9)
    assert validate(as_trajectory(path)) == []
    assert "points along the world's z axis" in only(validate(as_trajectory(path @ OPENGL))).message
    reversing = path.flip(0)
    assert "points along the world's z axis" not in only(validate(as_trajectory(reversing))).message


@given(seeds, st.sampled_from([12.0, None]))
def test_centimetres_are_found_where_metres_are_claimed(seed: int, rate: float | None) -> None:
    path = driving_path(49, 12.0, torch.Generator().manual_seed(seed), prefix=9)
    path[:, :3, 3] *= 3.0  # 6 to 45 m/s, so that steps alone are telling
    finding = only(validate(as_trajectory(centimetres(path), rate)))
    assert finding.severity == "error"
    assert "not in metres" in finding.message
    assert "in centimetres, divide them by 100" in finding.hint
    assert validate(as_trajectory(centimetres(path), rate, is_metric=False)) == []


@given(seeds)
def test_centimetres_are_found_in_slow_drives_without_times(seed: int) -> None:
    """At 30 frames per second, 2 m/s are 7 cm per frame: as metres, a path of wide steps that hardly turns."""
    path = driving_path(49, 30.0, torch.Generator().manual_seed(seed), prefix=9)
    assert validate(as_trajectory(path, None)) == []
    finding = only(validate(as_trajectory(centimetres(path), None)))
    assert "not in metres" in finding.message or "may not be in metres" in finding.message
    assert "in centimetres, divide them by 100" in finding.hint


def test_key_frames_that_turn_like_a_street_are_left_alone() -> None:
    """Two frames per second around a corner of 20 m; straight on, only times can tell, and the hint asks for them."""
    heading = torch.cat((torch.zeros(5), torch.linspace(0.0, 1.5, 8), torch.full((5,), 1.5))).double()
    steps = 6.0 * torch.stack((heading.sin(), torch.zeros_like(heading), heading.cos()), dim=-1)
    upright = heading.new_tensor([0.0, 1.0, 0.0]).expand(len(heading), 3)
    corner = rigid(matrix_from_quaternion(quaternion_from_axis_angle(upright, heading)), steps.cumsum(dim=0))
    assert validate(as_trajectory(corner, None)) == []
    straight = straight_drive(20, step_m=7.0)
    finding = only(validate(as_trajectory(straight, None)))
    assert finding.severity == "warning"
    assert "does not turn" in finding.message
    assert "give the times" in finding.hint
    assert validate(as_trajectory(straight, 2.0)) == []
    assert validate(as_trajectory(straight_drive(20, step_m=3.5), None)) == []


def test_turning_radius_is_that_of_the_tighter_turns() -> None:
    heading = torch.arange(20, dtype=torch.float64) * 0.05
    upright = heading.new_tensor([0.0, 1.0, 0.0]).expand(20, 3)
    centres = 30.0 * torch.stack((1.0 - heading.cos(), torch.zeros(20), heading.sin()), dim=-1)
    circle = rigid(matrix_from_quaternion(quaternion_from_axis_angle(upright, heading)), centres)
    assert turning_radius(circle) == pytest.approx(30.0, rel=1e-3)
    assert turning_radius(centimetres(circle)) == pytest.approx(3000.0, rel=1e-3)
    assert turning_radius(straight_drive(20)) == math.inf
    assert turning_radius(circle[:1].expand(4, 4, 4)) == math.inf


@pytest.mark.parametrize(("frame_rate_hz", "fastest_m"), [(8.0, 7.5), (None, 20.0)], ids=["60 m/s", "20 m per frame"])
def test_the_fastest_drive_in_metres(frame_rate_hz: float | None, fastest_m: float) -> None:
    allowed = validate(as_trajectory(straight_drive(20, step_m=fastest_m), frame_rate_hz))
    assert all(finding.severity == "warning" for finding in allowed)
    faster = only(validate(as_trajectory(straight_drive(20, step_m=1.01 * fastest_m), frame_rate_hz)))
    assert faster.severity == "error"
    assert "not in metres" in faster.message


def test_millimetres_and_nonsense_are_told_from_centimetres() -> None:
    assert "in millimetres, divide them by 1000" in only(validate(as_trajectory(straight_drive(9, step_m=2.5e3)))).hint
    assert "is_metric=False" in only(validate(as_trajectory(straight_drive(9, step_m=1e6)))).hint


def test_a_slow_drive_in_millimetres_is_not_called_one_in_centimetres() -> None:
    """3.6 m/s: divided by 100 it would be a plausible 36 m/s, ten times too fast and without any further finding."""
    hint = only(validate(as_trajectory(straight_drive(13, step_m=300.0), 12.0))).hint
    assert "in centimetres, divide them by 100 (36 m/s)" in hint
    assert "in millimetres, divide them by 1000 (3.6 m/s)" in hint


def test_centimetres_are_found_on_real_roads(comma: Trajectory) -> None:
    for clip in clips(comma):
        finding = only(validate(replace(clip, world_from_camera=centimetres(clip.world_from_camera))))
        assert "in centimetres" in finding.hint


@given(seeds)
def test_pans_and_orbits_are_no_reason_to_invert(seed: int) -> None:
    """A tripod far from the origin, and an orbit about something that creeps: their inverses move more steadily."""
    noise = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    yaw = torch.linspace(0, 1.5, 60, dtype=torch.float64)
    turns = matrix_from_quaternion(quaternion_from_axis_angle(yaw.new_tensor([0.0, 1.0, 0.0]).expand(60, 3), yaw))
    tripod = rigid(turns, yaw.new_tensor([500.0, 0.0, 80.0]) + 1e-3 * noise)
    assert validate(as_trajectory(tripod)) == []
    pitch = 0.05 * torch.sin(4 * yaw)
    rotation = matrix_from_quaternion(quaternion_from_axis_angle(yaw.new_tensor([1.0, 0.0, 0.0]).expand(60, 3), pitch))
    creep = torch.linspace(0.0, 0.02, 60, dtype=torch.float64)[:, None] * yaw.new_tensor([0.0, 0.0, 1.0])
    orbit = rigid(rotation, creep - 40.0 * rotation[..., 2])
    assert validate(as_trajectory(orbit, is_metric=False)) == []


def far_away(path: Tensor, distance_m: float) -> Tensor:  # [T, 4, 4]
    """The path at the far end of a map whose origin lies aside."""
    return rigid(random_rotations(seed=3), path.new_tensor([distance_m, 0.2 * distance_m, 0.1 * distance_m])) @ path


@pytest.mark.parametrize("distance_m", [1e4, 1e5, 6.4e6])
@pytest.mark.parametrize("is_metric", [True, False])
def test_inverted_poses_far_from_the_origin_are_found(distance_m: float, is_metric: bool) -> None:
    """75 m, straight on but for one bend: far away, inversion makes a leap of the bend and leaves the rest alone."""
    yaw_rate_rad_s = torch.zeros(119)
    yaw_rate_rad_s[100:110] = 0.6
    path = far_away(unicycle_path(torch.full((119,), 7.5), yaw_rate_rad_s, 12.0), distance_m)
    assert validate(as_trajectory(path, is_metric=is_metric)) == []
    finding = only(validate(as_trajectory(inverse(path), is_metric=is_metric)))
    assert "look like world-to-camera" in finding.message


def test_inverted_pieces_of_a_real_road_far_away_are_found(comma: Trajectory) -> None:
    for clip in clips(comma)[1:]:
        path = far_away(clip.world_from_camera, 1e5)
        assert validate(replace(clip, world_from_camera=path)) == []
        finding = only(validate(replace(clip, world_from_camera=inverse(path))))
        assert "world-to-camera" in finding.message + finding.hint


BODIES = {  # camera-from-body columns: where the vehicle's x, y and z axes point in the camera
    "x forward, y left, z up": [[0, -1, 0], [0, 0, -1], [1, 0, 0]],
    "x forward, y right, z down": [[0, 1, 0], [0, 0, 1], [1, 0, 0]],
}


@pytest.mark.parametrize("axes", BODIES)
@given(seed=seeds, is_metric=st.booleans())
def test_axes_of_a_vehicle_are_found_where_it_turns(axes: str, seed: int, is_metric: bool) -> None:
    bend = turn(drive(seed), 0.3 if seed % 2 else -0.3, 9, 12.0)
    camera_from_body = rigid(torch.tensor(BODIES[axes], dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    body = bend @ camera_from_body
    heading = rotation_angle(bend[:1, :3, :3], bend[:, :3, :3]).max()
    findings = validate(as_trajectory(body, is_metric=is_metric))
    if heading > 0.11:
        assert "travels along its x axis" in only(findings).message
        assert "body_from_camera" in only(findings).hint
    elif heading < 0.09:
        assert findings == []


def test_axes_of_a_vehicle_on_a_real_road(comma: Trajectory) -> None:
    """A highway is straight, which a camera that looks aside may follow as well; a bend of it tells."""
    camera_from_body = rigid(torch.tensor(BODIES["x forward, y right, z down"]).double(), torch.zeros(3).double())
    for clip in clips(comma):
        assert validate(replace(clip, world_from_camera=clip.world_from_camera @ camera_from_body)) == []
        bend = turn(clip.world_from_camera, 0.1, 20, 20.0)
        assert validate(replace(clip, world_from_camera=bend)) == []
        finding = only(validate(replace(clip, world_from_camera=bend @ camera_from_body)))
        assert "turns about its z axis" in finding.message


@given(seeds, st.sampled_from([-1.0, 1.0]))
def test_cameras_that_look_exactly_aside_are_left_alone(seed: int, side: float) -> None:
    path = drive(seed)
    yaw = path.new_tensor(side * math.pi / 2)
    aside = matrix_from_quaternion(quaternion_from_axis_angle(path.new_tensor([0.0, 1.0, 0.0]), yaw))
    assert validate(as_trajectory(path @ rigid(aside, path.new_zeros(3)))) == []


@pytest.mark.parametrize(
    ("unit", "factor"), [("milliseconds", 1e3), ("microseconds", 1e6), ("nanoseconds", 1e9)], ids=str
)
def test_times_that_are_not_seconds_are_found(comma: Trajectory, unit: str, factor: float) -> None:
    city = as_trajectory(turn(straight_drive(49, step_m=0.7), 0.3, 9, 12.0))
    stop_and_go = as_trajectory(straight_drive(90, step_m=0.3)[torch.arange(90).clamp(30, 60)], 30.0)
    for path in (*clips(comma), city, stop_and_go):
        assert path.timestamps_s is not None
        assert validate(path) == []
        finding = only(validate(replace(path, timestamps_s=factor * path.timestamps_s)))
        assert finding.severity == "error"
        assert "times are not in seconds" in finding.message
        assert f"in {unit}, divide them by {factor:g}" in finding.hint
        assert finding.hint.count("divide them") == 1
        finding = only(validate(replace(path, timestamps_s=path.timestamps_s / factor)))
        assert "times are not in seconds" in finding.message
        assert "multiply them" in finding.hint


def test_sparse_times_of_things_that_move_are_seconds() -> None:
    for path in (straight_drive(2, step_m=20.0), straight_drive(7, step_m=30.0)):  # corners of a hand-made path
        assert validate(as_trajectory(path, 0.1)) == []
    parked = straight_drive(600, step_m=0.0)
    parked[:, :3, 3] += 0.01 * torch.randn(600, 3, generator=torch.Generator().manual_seed(0)).double()
    assert validate(as_trajectory(parked, 1.0)) == []
    assert validate(as_trajectory(straight_drive(9, step_m=0.01), 0.1, is_metric=False)) == []
    counted = only(validate(as_trajectory(straight_drive(90, step_m=0.02), 1.0)))
    assert "if they count frames" in counted.hint


def test_bad_times_are_named() -> None:
    good = as_trajectory(straight_drive(10))
    assert good.timestamps_s is not None
    for value, words in ((2 / 12.0, "duplicate timestamp at index 3"), (0.0, "backwards"), (math.nan, "NaN or inf")):
        times = good.timestamps_s.clone()
        times[3] = value
        finding = only(validate(replace(good, timestamps_s=times)))
        assert finding.severity == "error"
        assert words in finding.message


@given(seeds, st.integers(1, 47))
def test_jumps_are_named(seed: int, frame: int) -> None:
    path = drive(seed)
    for jump_m, severity in ((40.0, "warning"), (1e5, "error")):  # a tracker that lost its way, a damaged file
        torn = path.clone()
        torn[frame:, :3, 3] += jump_m
        finding = validate(as_trajectory(torn))[-1]
        assert f"{frame - 1}→{frame}" in finding.message
        assert finding.severity == severity


def test_the_statistic_is_what_its_description_says() -> None:
    ahead = travel(straight_drive(10, step_m=2.0))
    assert ahead is not None
    assert (ahead.length, ahead.spread, ahead.along_axis) == pytest.approx((32.0, 0.0, 1.0))
    assert travel(torch.eye(4, dtype=torch.float64).repeat(5, 1, 1)) is None
    assert Travel(1.0, 1.0 - math.cos(0.2), 1.0).scatter_deg == pytest.approx(math.degrees(0.2))
    zigzag = straight_drive(9)
    zigzag[:, 0, 3] = zigzag[:, 2, 3] * 0 + torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 0]) * 1.7
    seen = travel(zigzag)
    assert seen is not None
    assert 0.05 < seen.spread < 0.5
