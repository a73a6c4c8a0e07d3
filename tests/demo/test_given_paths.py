"""Paths from files on the demo's street, and what is said of those that no model has seen."""

from dataclasses import replace
from pathlib import Path

import torch

from merope import formats
from merope.demo.given_paths import beyond_training, given_path, seen_through
from merope.formats.trajectory import Trajectory
from merope.geometry.trajectories import unicycle_path
from merope.world.clips import WorldClips

TRAINED = WorldClips()


def test_paths_with_times_are_resampled_and_start_at_the_street(tmp_path: Path) -> None:
    speed, rate = torch.full((40,), 6.0), torch.full((40,), 0.2)
    path = unicycle_path(speed, rate, 10.0)
    elsewhere = torch.eye(4, dtype=torch.float64)
    elsewhere[:3, 3] = torch.tensor([1000.0, -20.0, 50.0])
    times_s = torch.arange(41, dtype=torch.float64) / 10.0
    formats.write(Trajectory(elsewhere @ path, True, "test", times_s), tmp_path / "path.json")
    poses = given_path(tmp_path / "path.json", TRAINED, assume_metric=False)
    assert poses.shape == (13, 4, 4)
    assert (poses[0] - torch.eye(4)).abs().max() < 1e-9
    assert (poses[::2] - path[0:31:5]).abs().max() < 1e-6  # every half second both have a pose


def test_what_the_model_has_not_seen_is_said() -> None:
    drive = unicycle_path(torch.full((12,), 8.0), torch.full((12,), 0.3), 4.0)
    tilted = drive.clone()
    tilted[6:, :3, :3] = tilted[6:, :3, :3] @ torch.linalg.matrix_exp(
        torch.tensor([[0.0, 0, 0], [0, 0, -0.1], [0, 0.1, 0]], dtype=torch.float64)
    )
    fast = unicycle_path(torch.full((12,), 30.0), torch.full((12,), 1.0), 4.0)
    lifted, backwards = drive.clone(), drive.clone()
    lifted[:, 1, 3] -= 0.4 * torch.arange(13)
    backwards[:, :3, 3] *= -1.0
    slow, *near_the_limits = (
        unicycle_path(torch.full((12,), speed), torch.zeros(12), 4.0) for speed in (1.0, 1.9, 16.0)
    )
    fisheye = seen_through(TRAINED, "fisheye")
    said = {
        "nothing": beyond_training(drive, TRAINED, TRAINED),
        "three": beyond_training(None, TRAINED, TRAINED),
        "lens": beyond_training(None, fisheye, TRAINED),
        "tilt": beyond_training(tilted, TRAINED, TRAINED),
        "fast": beyond_training(fast, TRAINED, TRAINED),
        "slow": beyond_training(slow, TRAINED, TRAINED),
        "climb": beyond_training(lifted, TRAINED, TRAINED),
        "reverse": beyond_training(backwards, TRAINED, TRAINED),
    }
    assert beyond_training(None, fisheye, replace(TRAINED, fov_deg=(60.0, 150.0), xi=(0.0, 1.5))) == []
    assert ["+4.8 m" in note for note in said["climb"]] == [True]
    assert ["backwards" in note for note in said["reverse"]] == [True]
    assert said["nothing"] == said["three"] == []
    assert [beyond_training(path, TRAINED, TRAINED) for path in near_the_limits] == [[], []]
    assert ["1.0 to 1.0 m/s; the model has seen 2 to 15" in note for note in said["slow"]] == [True]
    assert [
        note.endswith("a 140° fisheye (xi = 1); the model has seen a 70° pinhole only") for note in said["lens"]
    ] == [True]
    assert ["tilts by 6°" in note for note in said["tilt"]] == [True]
    assert ["29.9 m/s" in said["fast"][0], "57°/s" in said["fast"][1]] == [True, True]  # chords of the arcs
