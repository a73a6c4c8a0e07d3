"""Key strings: what each word does, in metres and degrees, and which paths they can hold."""

import math
from pathlib import Path

import pytest
import torch
from paths import largest
from scenes import random_poses

from merope import formats
from merope.formats.key_strings import keys_from_poses, poses_from_keys
from merope.geometry.drives import straight_drive, turning_drive
from merope.geometry.trajectories import step_sizes


def test_forward_then_left_is_the_drive_that_geometry_makes() -> None:
    path = poses_from_keys("w*12 a*24", 12.0, speed_m_s=6.0, yaw_rate_deg_s=30.0)
    expected = turning_drive(6.0, -math.radians(30.0), 1.0, 3.0, 12.0)
    assert largest(path - expected) < 1e-12
    assert path[-1, 0, 3] < 0  # left is −x
    assert largest(poses_from_keys("w*5", 10.0, 4.0) - straight_drive(4.0, 0.5, 10.0)) < 1e-12


@pytest.mark.parametrize(
    ("keys", "along_m", "turn_deg"),
    [
        *[("w", 2.0, 0.0), ("s", -2.0, 0.0), ("d", 2.0, 5.0), ("wd", 2.0, 5.0), ("sa", -2.0, -5.0), (".", 0.0, 0.0)],
        *[("speed=1 w", 0.25, 0.0), ("yaw=40 aw", 2.0, -10.0), ("speed=0 d", 0.0, 5.0)],
    ],
)
def test_each_word_is_one_step(keys: str, along_m: float, turn_deg: float) -> None:
    path = poses_from_keys(keys, 4.0, speed_m_s=8.0, yaw_rate_deg_s=20.0)
    assert len(path) == 2
    turn_rad = math.radians(turn_deg)
    chord_m = along_m * (math.sin(turn_rad / 2) / (turn_rad / 2) if turn_rad else 1.0)
    expected_m = (chord_m * math.sin(turn_rad / 2), 0.0, chord_m * math.cos(turn_rad / 2))
    assert path[1, :3, 3].tolist() == pytest.approx(expected_m, abs=1e-12)
    assert math.atan2(path[1, 0, 2], path[1, 2, 2]) == pytest.approx(turn_rad, abs=1e-12)


def test_settings_hold_until_the_next_one() -> None:
    lengths_m, _ = step_sizes(poses_from_keys("w*2 speed=3 w .*2 s speed=1 w", 1.0, speed_m_s=2.0))
    assert lengths_m.tolist() == pytest.approx([2, 2, 3, 0, 0, 3, 1])


@pytest.mark.parametrize("keys", ["w*40 wa*10 w*40", "s*3 .*2 wd*4", "speed=2.5 w*2 yaw=7.0 sa*3", ".*0"])
def test_a_path_gives_its_keys_back(keys: str) -> None:
    moved = random_poses(1, seed=3) @ poses_from_keys(keys, 12.0)  # wherever it begins
    text = keys_from_poses(moved, 12.0)
    assert text == keys
    assert largest(poses_from_keys(text, 12.0) - poses_from_keys(keys, 12.0)) < 1e-12


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("", "keys must be at least one key"),
        ("speed=3", "keys must be at least one key"),
        ("w*40 up*3", "keys must be w, a, s, d or a full stop.*got 'up\\*3'"),
        ("ws", "got 'ws'"),
        ("aa", "got 'aa'"),
        ("w*-3", "got 'w\\*-3'"),
        ("w*999999 w*999999", "keys must be fewer than 1,000,000 steps"),
        ("speed=-3 w", "speed must be a number of metres per second, not below 0, got -3"),
        ("yaw=fast a", "yaw must be a number of degrees per second, not below 0, got fast"),
    ],
)
def test_other_words_are_refused(keys: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        poses_from_keys(keys, 12.0)
    (tmp_path / "keys.txt").write_text(f"# a drive\n{keys or 'speed=1'}\n")
    with pytest.raises(ValueError, match=r"keys.txt"):
        formats.read(tmp_path / "keys.txt", "keys")


def test_a_file_of_keys_has_times_and_draws_no_finding(tmp_path: Path) -> None:
    (tmp_path / "drive").write_text("# through the village\nspeed=8 w*40\na*20   w*40\n")
    assert formats.detect(tmp_path / "drive") == "keys"
    trajectory = formats.read(tmp_path / "drive", fps=10)
    assert trajectory.timestamps_s is not None
    assert float(trajectory.timestamps_s[-1]) == pytest.approx(10.0)
    assert formats.validate(trajectory) == []
    formats.write(trajectory, tmp_path / "again", "keys", fps=10)
    back = formats.read(tmp_path / "again", fps=10)
    assert largest(back.world_from_camera - trajectory.world_from_camera) < 1e-12


def test_a_path_that_leaves_the_plane_or_slips_is_not_written(tmp_path: Path) -> None:
    path = straight_drive(5.0, 1.0, 12.0)
    for axis in (0, 1):
        off = path.clone()
        off[:, axis, 3] = torch.linspace(0, 0.1, len(off))
        with pytest.raises(ValueError, match=r"level drive along the optical axis for keys, got one that slips"):
            keys_from_poses(off, 12.0)
