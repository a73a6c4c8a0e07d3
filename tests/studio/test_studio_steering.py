"""Steering: cameras that go on from the last one, as a car would."""

import math
from pathlib import Path

import pytest
import torch
from scenes import random_poses
from torch.testing import assert_close

from merope.geometry.poses import relative
from merope.geometry.trajectories import unicycle_path
from merope.studio.lens_choice import LensChoice
from merope.studio.steering import Controls, controls_of, steered
from merope.studio.street_drive import StreetDrive
from merope.studio.street_view import StreetView
from merope.studio.studio_model import Sampling, StudioModel


def test_what_is_held_already_goes_on_in_an_exact_arc() -> None:
    last, held = random_poses(1)[0], Controls(8.0, 15.0)
    poses, controls = steered(last, held, held, 12, 16.0)
    whole = unicycle_path(torch.full((12,), 8.0), torch.full((12,), math.radians(15.0)), 16.0)
    assert_close(relative(last[None], poses), whole[1:])
    assert controls == [held] * 12


def test_speed_and_yaw_rate_change_as_in_training_and_arrive() -> None:
    _, controls = steered(torch.eye(4, dtype=torch.float64), Controls(2.0, 0.0), Controls(8.0, -15.0), 40, 16.0)
    speeds = torch.tensor([2.0] + [one.speed_m_s for one in controls])
    rates = torch.tensor([0.0] + [one.yaw_rate_deg_s for one in controls])
    assert float(speeds.diff().max() * 16.0) <= 3.0 + 1e-4
    assert float(rates.diff().abs().max() * 16.0) <= math.degrees(1.0) + 1e-4
    assert controls[-1] == Controls(8.0, -15.0)


def test_the_numbers_of_a_path_are_those_that_made_it() -> None:
    held = Controls(6.0, -20.0)
    poses, _ = steered(torch.eye(4, dtype=torch.float64), held, held, 30, 4.0)
    for found in controls_of(poses, 4.0):
        assert found.yaw_rate_deg_s == pytest.approx(-20.0)
        assert found.speed_m_s == pytest.approx(6.0, rel=0.01)  # along the chord
    assert controls_of(poses[:1], 4.0) == [Controls()]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 20.1, "8", None, True])
def test_what_no_car_does_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="speed_m_s must be a number from −20 to 20"):
        Controls(wrong)  # type: ignore[arg-type]


def test_a_place_is_recalled_where_a_gpu_makes_it_quick(
    model: StudioModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing is recalled: somebody waits for the first frame."""
    assert model.recall == 0
    monkeypatch.setattr(StudioModel, "recall", 3)
    drive = StreetDrive(model, StreetView(4, LensChoice("pinhole", 70.0), model.clips), Sampling(1), tmp_path)
    for _ in range(14):  # it comes to a stand, and its window forgets frames of that place
        drive.block(Controls(0.0), lambda step: None, lambda block: None)
    assert drive._stream.recalled
