"""Drives given by numbers do what the numbers say."""

import math

import pytest
import torch
from torch import Tensor

from merope.formats import validate
from merope.formats.trajectory import Trajectory
from merope.geometry.drives import motion, shifting_drive, stop_and_go_drive, straight_drive, turning_drive
from merope.geometry.poses import check_rigid

RATE_HZ = 12.0


def times_of(path: Tensor) -> Tensor:  # [T]
    return torch.arange(len(path), dtype=torch.float64) / RATE_HZ


def test_every_drive_begins_at_the_identity_and_looks_right() -> None:
    drives = (
        straight_drive(8.0, 4.0, RATE_HZ),
        turning_drive(8.0, 0.3, 0.75, 4.0, RATE_HZ),
        shifting_drive(8.0, 3.0, 0.75, 4.0, RATE_HZ),
        stop_and_go_drive(6.0, 1.0, 0.75, 10.0, RATE_HZ),
    )
    for path in drives:
        check_rigid(path)
        torch.testing.assert_close(path[0], torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-15)
        assert validate(Trajectory(path, True, "made", times_of(path))) == []
    assert [len(path) for path in drives] == [49, 49, 49, 121]


def test_a_turn_is_a_circle_of_its_radius() -> None:
    speed_m_s, radius_m, start_s = 9.0, 30.0, 0.75
    path = turning_drive(speed_m_s, speed_m_s / radius_m, start_s, 4.0, RATE_HZ)
    first = round(start_s * RATE_HZ)
    assert (path[:first, 0, 3] == 0.0).all()
    centre = path.new_tensor([radius_m, 0.0, speed_m_s * start_s])  # to the right of where the turn begins
    distances_m = (path[first:, :3, 3] - centre).norm(dim=-1)
    torch.testing.assert_close(distances_m, torch.full_like(distances_m, radius_m), rtol=0, atol=1e-9)
    left = turning_drive(speed_m_s, -speed_m_s / radius_m, start_s, 4.0, RATE_HZ)
    torch.testing.assert_close(left[:, 0, 3], -path[:, 0, 3], rtol=0, atol=1e-9)


def test_a_change_of_lanes_ends_beside_the_old_lane() -> None:
    path = shifting_drive(8.0, -3.5, 1.0, 4.0, RATE_HZ)
    assert float(path[-1, 0, 3]) == pytest.approx(-3.5, abs=1e-9)
    assert float(path[-1, 0, 2]) == pytest.approx(0.0, abs=1e-9)  # straight on again


def test_stop_and_go_brakes_stands_and_goes_on() -> None:
    path = stop_and_go_drive(6.0, 2.0, 1.0, 10.0, RATE_HZ)
    speeds_m_s = path[:, 2, 3].diff() * RATE_HZ
    torch.testing.assert_close(speeds_m_s[:12], torch.full_like(speeds_m_s[:12], 6.0), rtol=0, atol=1e-9)
    assert (speeds_m_s[48:72] == 0.0).all()  # from 4 s, 3 s of braking at 2 m/s², to 6 s
    assert float(speeds_m_s[-1]) == pytest.approx(6.0, abs=1e-9)
    assert float((speeds_m_s.diff().abs() * RATE_HZ).max()) == pytest.approx(2.0, abs=1e-9)
    assert float(path[-1, 2, 3]) == pytest.approx(6.0 * 1.0 + 9.0 + 9.0 + 6.0 * 1.0, abs=1e-9)
    assert motion(stop_and_go_drive(0.0, 1.0, 0.0, 4.0, RATE_HZ), torch.arange(49.0)).length_m == 0.0


def test_the_numbers_of_a_path() -> None:
    path = turning_drive(8.0, math.radians(15.0), 0.75, 4.0, RATE_HZ)
    moved = motion(path, times_of(path))
    assert moved.length_m == pytest.approx(32.0, rel=1e-4)  # chords
    assert moved.top_speed_m_s == pytest.approx(8.0, rel=1e-9)
    assert moved.top_turn_rad_s == pytest.approx(math.radians(15.0), rel=1e-9)
    assert motion(path[:1], times_of(path[:1])).length_m == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: straight_drive(8.0, 0.0, RATE_HZ), "seconds and fps must be of at least 2"),
        (lambda: straight_drive(8.0, 1e9, 1e9), "at most 1,000,000 frames"),
        (lambda: straight_drive(8.0, 4.0, math.nan), "seconds and fps"),
        (lambda: straight_drive(math.inf, 4.0, RATE_HZ), "speed must be a finite number"),
        (lambda: turning_drive(8.0, math.nan, 0.0, 4.0, RATE_HZ), "yaw rate must be a finite number"),
        (lambda: turning_drive(8.0, 0.1, 4.0, 4.0, RATE_HZ), "start must be from 0 to less than 4 s"),
        (lambda: turning_drive(8.0, 0.1, -1.0, 4.0, RATE_HZ), "start must be from 0"),
        (lambda: stop_and_go_drive(8.0, 1.0, 0.75, 4.0, RATE_HZ), "seconds must be at least 9.75"),
    ],
)
def test_numbers_that_make_no_drive_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
