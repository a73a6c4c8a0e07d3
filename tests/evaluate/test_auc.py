"""Pairwise AUC: a straightforward implementation, strictness, vanishing translations, failed frames, pooling."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scenes import curved_drive, random_poses, straight_drive
from torch import Tensor

from merope.evaluate.auc import PairErrors, pair_errors, pose_auc
from merope.geometry.poses import rigid

SEEDS = st.integers(0, 2**31)


def clamped_arccos_deg(x: float, low: float) -> float:
    return math.degrees(math.acos(min(1.0, max(low, x))))


def straightforward(clips: list[tuple[NDArray, NDArray]], tau: int) -> float:
    """The paper's formulas pair by pair."""
    errors = []
    for commanded, estimated in clips:
        for i, j in combinations(range(len(commanded)), 2):
            a = np.linalg.inv(commanded[i]) @ commanded[j]
            b = np.linalg.inv(estimated[i]) @ estimated[j]
            rotation = clamped_arccos_deg((np.trace(a[:3, :3].T @ b[:3, :3]) - 1) / 2, -1.0)
            cosine = a[:3, 3] @ b[:3, 3] / np.linalg.norm(a[:3, 3]) / np.linalg.norm(b[:3, 3])
            errors.append(max(rotation, clamped_arccos_deg(abs(cosine), 0.0)))
    return 100 * sum(sum(e < k for e in errors) / len(errors) for k in range(1, tau + 1)) / tau


def wobbly(path: Tensor, seed: int, size: float = 0.03) -> Tensor:  # [T, 4, 4] twice
    """A copy with errors of a few degrees."""
    generator = torch.Generator().manual_seed(seed)
    rotation, centres = path[:, :3, :3], path[:, :3, 3]
    skew = size * torch.randn(len(path), 3, 3, dtype=torch.float64, generator=generator)
    turn = torch.linalg.matrix_exp(skew - skew.mT)
    return rigid(rotation @ turn, centres + size * torch.randn(centres.shape, dtype=torch.float64, generator=generator))


def errors_of(*joint_deg: float) -> PairErrors:
    joint = torch.tensor(joint_deg, dtype=torch.float64)
    return PairErrors(joint, torch.zeros_like(joint))


@given(SEEDS, st.sampled_from([1, 3, 10, 30]))
def test_equals_a_straightforward_implementation(seed: int, tau: int) -> None:
    paths = [curved_drive(count, yaw_step_rad=0.02) for count in (5, 9)]
    clips = [(path, wobbly(path, seed + k)) for k, path in enumerate(paths)]
    expected = straightforward([(a.numpy(), b.numpy()) for a, b in clips], tau)
    assert pose_auc(clips, tau) == pytest.approx(expected, abs=1e-9)


@given(SEEDS, st.floats(1e-3, 1e3))
def test_world_frames_and_scale_do_not_matter(seed: int, scale: float) -> None:
    path = curved_drive(8)
    estimate = wobbly(path, seed)
    a, b = random_poses(2, seed=seed, spread_m=100.0)
    errors, moved = (
        pair_errors(path, estimate),
        pair_errors(a @ path, b @ rigid(estimate[:, :3, :3], scale * estimate[:, :3, 3])),
    )
    assert torch.allclose(moved.joint_deg, errors.joint_deg, atol=1e-8, rtol=0)


def test_thresholds_are_strict() -> None:
    assert pose_auc([errors_of(1.0)], tau=1) == 0.0
    assert pose_auc([errors_of(math.nextafter(1.0, 0.0))], tau=1) == 100.0
    assert pose_auc([errors_of(1.0, 2.5)], tau=3) == pytest.approx(100 * (0 + 1 + 2) / 6)


def test_pooled_pairs_or_equal_clips() -> None:
    clips = [errors_of(0.5), errors_of(0.5, 5.0, 5.0)]
    assert pose_auc(clips, tau=1) == pytest.approx(100 * 2 / 4)
    assert pose_auc(clips, tau=1, per_clip=True) == pytest.approx(100 * (1 + 1 / 3) / 2)


def test_pair_errors_serve_every_threshold() -> None:
    path = curved_drive(9, yaw_step_rad=0.02)
    clip = (path, wobbly(path, 3))
    errors = pair_errors(*clip)
    for tau in (3, 10):
        assert pose_auc([errors], tau) == pose_auc([clip], tau)
    assert 0 < pose_auc([errors], 3) < pose_auc([errors], 10) < 100


@pytest.mark.parametrize("side", [0, 1])
def test_a_vanishing_translation_is_below_no_threshold(side: int) -> None:
    """Frames 0 and 1 at one place: one pair of three has no direction, on either side."""
    clip = [straight_drive(3), straight_drive(3)]
    clip[side] = clip[side].clone()
    clip[side][1, 2, 3] = 1e-9
    errors = pair_errors(*clip)
    assert errors.direction_deg.tolist()[0] == math.inf
    assert errors.rotation_deg.tolist() == [0.0, 0.0, 0.0]
    assert pose_auc([errors], 180) == pytest.approx(100 * 2 / 3)


@pytest.mark.parametrize("side", [0, 1])
def test_a_short_translation_has_a_direction(side: int) -> None:
    """A tenth of a millimetre on a path of metres: slow, but not standing."""
    clip = [straight_drive(3), straight_drive(3)]
    clip[side] = clip[side].clone()
    clip[side][1, 2, 3] = 1e-4
    assert pair_errors(*clip).direction_deg.tolist() == [0.0, 0.0, 0.0]


def test_a_static_estimate_scores_zero() -> None:
    path = curved_drive(6)
    assert pose_auc([(path, rigid(path[:, :3, :3], 0 * path[:, :3, 3]))]) == 0.0


def test_pairs_with_a_failed_frame_count_as_missed() -> None:
    path = curved_drive(6)
    valid = torch.tensor([False, True, True, True, True, False])
    estimate = path.masked_fill(~valid[:, None, None], math.nan)
    errors = pair_errors(path, estimate, valid)
    assert len(errors.joint_deg) == 15
    assert int(errors.rotation_deg.isinf().sum()) == 9
    assert pose_auc([(path, estimate, valid)]) == pytest.approx(100 * 6 / 15)
    assert pose_auc([(path, path * math.nan, torch.zeros(6, dtype=torch.bool))]) == 0.0


def test_failed_frames_are_no_part_of_the_extent() -> None:
    """The extent says which translations are too short to have a direction; far from the origin it must not explode."""
    path = straight_drive(4, step_m=1.0)
    estimate = rigid(path[:, :3, :3], path[:, :3, 3] + 1e7)
    valid = torch.tensor([True, True, True, False])
    assert pose_auc([(path, estimate, valid)]) == pytest.approx(50.0)


@pytest.mark.parametrize("tau", [0, -1, 2.5, True])
def test_thresholds_are_whole_degrees(tau: float) -> None:
    with pytest.raises(ValueError, match="tau must be a whole number"):
        pose_auc([errors_of(1.0)], tau)  # type: ignore[arg-type]


@pytest.mark.parametrize("tau", [[3, 10], torch.zeros(3, 4, 4)])
def test_thresholds_that_are_no_numbers_are_named_by_their_type(tau: object) -> None:
    with pytest.raises(ValueError, match=rf"tau must be .* got {type(tau).__name__}; .*one in each call"):
        pose_auc([errors_of(1.0)], tau)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 3, 9])
def test_paths_as_pose_metrics_takes_them_are_refused(count: int) -> None:
    path = curved_drive(count)
    expected = r"pairs must be a list of \(commanded, estimated\), one for each clip, got a"
    for bare, kind in ((path, "Tensor"), ([path], "Tensor"), ((path, path), "Tensor"), (path.numpy(), "ndarray")):
        with pytest.raises(ValueError, match=rf"{expected} {kind} for a clip; pass \[\(commanded, estimated\)\]"):
            pose_auc(bare, path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=expected):
        pose_auc([[path], [path]])  # type: ignore[list-item]


def test_no_clips_and_single_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs must be at least one clip"):
        pose_auc([])
    with pytest.raises(ValueError, match="at least two frames"):
        pair_errors(random_poses(1), random_poses(1))


def test_pairs_of_frames_that_were_given_are_left_out() -> None:
    path = curved_drive(6)
    estimated = wobbly(path, seed=3)
    estimated[:3] = path[:3]
    some = pair_errors(path, estimated, given_frames=3)
    everything = pair_errors(path, estimated)
    assert len(everything.rotation_deg) == 15
    assert len(some.rotation_deg) == 12
    assert some.hits(10) == everything.hits(10) - 3 * 10
    none_recovered = torch.tensor([True] * 3 + [False] * 3)
    assert pair_errors(path, path, none_recovered, given_frames=3).hits(10) == 0
    for count in (-1, 6):
        with pytest.raises(ValueError, match="given_frames"):
            pair_errors(path, path, given_frames=count)
