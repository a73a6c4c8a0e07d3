"""Poses from files: each frame gets its own, and nothing is guessed."""

from pathlib import Path

import pytest
import torch
from scenes import PINHOLE, random_poses

from merope.evaluate.estimators.precomputed import PrecomputedEstimator
from merope.formats import write
from merope.formats.trajectory import Trajectory
from merope.geometry.poses import inverse

FRAMES = torch.zeros(5, 8, 8, 3, dtype=torch.uint8)


@pytest.mark.parametrize(("format", "suffix"), [("merope", ".json"), ("tum", ".txt"), ("kitti", ".txt")])
def test_a_file_of_any_format_is_an_estimate(format: str, suffix: str, tmp_path: Path) -> None:
    poses = random_poses(5)
    path = tmp_path / f"clip{suffix}"
    write(Trajectory(poses, True, "", torch.arange(5.0, dtype=torch.float64), PINHOLE), path, format)
    estimate = PrecomputedEstimator(path)(FRAMES)
    assert (estimate.world_from_camera - poses).abs().max() < 1e-6
    assert bool(estimate.valid.all())
    assert estimate.is_metric
    assert not PrecomputedEstimator(path, is_metric=False)(FRAMES).is_metric


@pytest.mark.parametrize(("first", "kept"), [(0, [0, 1, 3]), (0, [0, 4]), (1, [1, 4])])
def test_a_partial_model_is_placed_by_its_image_numbers(first: int, kept: list[int], tmp_path: Path) -> None:
    poses = random_poses(5)
    names = tuple(f"{t + first:04d}.png" for t in kept)
    write(Trajectory(poses[kept], False, "", lens=PINHOLE, frame_names=names), tmp_path / "model", "colmap")
    estimate = PrecomputedEstimator(tmp_path / "model")(FRAMES)
    assert estimate.valid.nonzero()[:, 0].tolist() == kept
    error = inverse(estimate.world_from_camera[kept]) @ poses[kept] - torch.eye(4, dtype=torch.float64)
    assert error.abs().max() < 1e-6
    assert "not in the file" in estimate.note


@pytest.mark.parametrize("names", [("0001.png", "0002.png"), ("a.png", "b.png"), ("0000.png", "0005.png")])
def test_a_partial_model_that_could_lie_elsewhere_is_refused(names: tuple[str, str], tmp_path: Path) -> None:
    write(Trajectory(random_poses(2), False, "", lens=PINHOLE, frame_names=names), tmp_path / "model", "colmap")
    with pytest.raises(ValueError, match="2 poses for 5 frames"):
        PrecomputedEstimator(tmp_path / "model")(FRAMES)


def test_poses_that_are_not_in_order_are_refused(tmp_path: Path) -> None:
    times_s = torch.tensor([0.0, 0.2, 0.1, 0.3, 0.4], dtype=torch.float64)
    write(Trajectory(random_poses(5), True, "", times_s), tmp_path / "clip.txt", "tum")
    with pytest.raises(ValueError, match=r"clip.txt must be increasing, got time running backwards at index 2"):
        PrecomputedEstimator(tmp_path / "clip.txt")(FRAMES)


def test_more_poses_than_frames_are_refused(tmp_path: Path) -> None:
    write(Trajectory(random_poses(6), True, ""), tmp_path / "clip.json")
    with pytest.raises(ValueError, match="6 poses for 5 frames"):
        PrecomputedEstimator(tmp_path / "clip.json")(FRAMES)


def test_a_file_of_a_longer_video_serves_its_first_frames(tmp_path: Path) -> None:
    poses = random_poses(9)
    write(Trajectory(poses, True, ""), tmp_path / "clip.json")
    whole = PrecomputedEstimator(tmp_path / "clip.json", video_frames=9)(FRAMES)
    assert bool(whole.valid.all())
    assert (whole.world_from_camera - poses[:5]).abs().max() < 1e-12
    kept = [2, 4, 8]  # of frames 0 to 8, named from 1 on as the last one shows
    names = tuple(f"{t + 1:04d}.png" for t in kept)
    write(Trajectory(poses[kept], False, "", lens=PINHOLE, frame_names=names), tmp_path / "model", "colmap")
    partial = PrecomputedEstimator(tmp_path / "model", video_frames=9)(FRAMES)
    assert partial.valid.nonzero()[:, 0].tolist() == [2, 4]
    assert (partial.world_from_camera[[2, 4]] - poses[[2, 4]]).abs().max() < 1e-6
