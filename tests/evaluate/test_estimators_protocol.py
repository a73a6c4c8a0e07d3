"""What every estimator takes and gives, and how one is made by name."""

import pytest
import torch
from scenes import PINHOLE, random_poses

from merope.evaluate.estimators import estimator
from merope.evaluate.estimators.estimator import PoseEstimate, check_frames, failed
from merope.evaluate.estimators.structure_from_motion import ColmapEstimator


def test_invalid_frames_hold_the_identity_whatever_came() -> None:
    poses = random_poses(3)
    poses[1] = float("nan")
    estimate = PoseEstimate(poses, torch.tensor([True, False, True]), True, "some")
    assert torch.equal(estimate.world_from_camera[1], torch.eye(4, dtype=torch.float64))
    assert (estimate.world_from_camera[[0, 2]] - poses[[0, 2]]).abs().max() < 1e-12


def test_a_valid_frame_must_be_a_pose() -> None:
    poses = random_poses(2)
    poses[1] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        PoseEstimate(poses, torch.tensor([True, True]), True, "some")
    with pytest.raises(ValueError, match="valid"):
        PoseEstimate(random_poses(2), torch.tensor([True]), True, "some")


def test_a_failure_is_an_estimate() -> None:
    estimate = failed(5, "some", "because")
    assert not estimate.valid.any()
    assert estimate.note == "because"
    assert torch.equal(estimate.world_from_camera, torch.eye(4, dtype=torch.float64).expand(5, 4, 4))


@pytest.mark.parametrize(
    "frames",
    [torch.zeros(2, 144, 256, 3), torch.zeros(144, 256, 3, dtype=torch.uint8), torch.zeros(0, 9, 9, 3).byte(), "video"],
)
def test_what_is_not_a_clip_is_refused(frames: object) -> None:
    with pytest.raises(ValueError, match="frames"):
        check_frames(frames, None)  # type: ignore[arg-type]


def test_a_lens_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="resized"):
        check_frames(torch.zeros(2, 72, 128, 3, dtype=torch.uint8), PINHOLE)


def test_estimators_by_name() -> None:
    assert estimator("colmap", seed=3) == ColmapEstimator(seed=3)
    with pytest.raises(ValueError, match="one of colmap"):
        estimator("slam")
    with pytest.raises(ValueError, match="'speed'"):
        estimator("colmap", speed=3)
    with pytest.raises(ValueError, match="to include checkpoint"):
        estimator("vggt")
