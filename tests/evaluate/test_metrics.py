"""Pose metrics: hand-computed vectors, an independent implementation, evo's numbers, invariances, undefined cases."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scenes import curved_drive, random_poses, random_rotations, straight_drive
from scipy.spatial.transform import Rotation
from torch import Tensor

from merope.evaluate.metrics import (
    CLOSED_COMMAND,
    STATIC_COMMAND,
    TOO_FEW_FRAMES,
    PoseMetrics,
    looks_inverted,
    pose_metrics,
)
from merope.geometry.poses import inverse, rigid, rotation_angle
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle

SCALE_FREE = ("rot_deg", "tr_percent", "cammc", "rot_err", "trans_err")
SEEDS = st.integers(0, 2**31)


def straightforward(commanded: NDArray, estimated: NDArray) -> dict[str, float]:  # [T, 4, 4] twice
    """The paper's formulas frame by frame: general inverses, scipy's angles, numpy's least squares."""
    a = [np.linalg.inv(commanded[0]) @ pose for pose in commanded]
    b = [np.linalg.inv(estimated[0]) @ pose for pose in estimated]
    frames = len(a)
    angles = [Rotation.from_matrix(x[:3, :3].T @ y[:3, :3]).magnitude() for x, y in zip(a, b, strict=True)]
    here, there = np.stack([x[:3, 3] for x in a]), np.stack([y[:3, 3] for y in b])
    scale = np.linalg.lstsq(there.reshape(-1, 1), here.reshape(-1), rcond=None)[0][0]
    chord = np.linalg.norm(here[-1])
    largest = [max(np.linalg.norm(o) for o in path) + 1e-9 for path in (here, there)]
    cammc = trans_err = 0.0
    for x, y in zip(a, b, strict=True):
        p = np.concatenate((x[:3, :3], x[:3, 3:] / largest[0]), axis=1)
        q = np.concatenate((y[:3, :3], y[:3, 3:] / largest[1]), axis=1)
        cammc += math.sqrt(((p - q) ** 2).sum())
        trans_err += np.linalg.norm(p[:, 3] - q[:, 3])
    return {
        "rot_deg": math.degrees(sum(angles[1:])) / (frames - 1),
        "tr_percent": 100 * sum(np.linalg.norm(here - scale * there, axis=1)[1:]) / (frames - 1) / chord,
        "scale": scale,
        "cammc": cammc,
        "rot_err": sum(angles),
        "trans_err": trans_err,
        "chord_m": chord,
        "ate_m": math.sqrt((np.linalg.norm(here - there, axis=1) ** 2).mean()),
        "metric_tr_percent": 100 * sum(np.linalg.norm(here - there, axis=1)[1:]) / (frames - 1) / chord,
    }


def yawed(path: Tensor, angle_deg: float) -> Tensor:  # [T, 4, 4] twice
    """Every camera but the first turned about its own vertical."""
    axis = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    angle = torch.tensor(math.radians(angle_deg), dtype=torch.float64)
    turned = path[:, :3, :3] @ matrix_from_quaternion(quaternion_from_axis_angle(axis, angle))
    return torch.cat((path[:1], rigid(turned, path[:, :3, 3])[1:]))


def scaled(path: Tensor, factor: float) -> Tensor:  # [T, 4, 4] twice
    return rigid(path[:, :3, :3], factor * path[:, :3, 3])


def sideways(path: Tensor) -> Tensor:  # [T, 4, 4] twice
    return rigid(path[:, :3, :3], path[:, [2, 1, 0], 3])


def assert_same(a: PoseMetrics, b: PoseMetrics, names: tuple[str, ...], tolerance: float) -> None:
    for name in names:
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize(
    ("estimate", "rot_err", "trans_err", "cammc"),
    [
        (lambda path: scaled(path, 3.0), 0.0, 2.7e-8, 2.7e-8),
        (lambda path: yawed(path, 1.0), 1.39626, 0.0, 1.97459),
        (sideways, 0.0, 57.2756, 57.2756),
        (lambda path: scaled(path, 0.0), 0.0, 40.5, 40.5),
    ],
    ids=["three times as far", "one degree of yaw", "right instead of ahead", "static"],
)
def test_hand_computed_vectors(estimate, rot_err: float, trans_err: float, cammc: float) -> None:
    path = straight_drive(81, step_m=1 / 80)
    metrics = pose_metrics(path, estimate(path))
    assert metrics.rot_err == pytest.approx(rot_err, abs=1e-5)
    assert metrics.trans_err == pytest.approx(trans_err, rel=1e-5, abs=2e-9)
    assert metrics.cammc == pytest.approx(cammc, rel=1e-5, abs=2e-9)


@given(SEEDS, st.integers(2, 20))
def test_equals_a_straightforward_implementation(seed: int, frames: int) -> None:
    commanded, estimated = random_poses(2, frames, seed=seed)
    expected = straightforward(commanded.numpy(), estimated.numpy())
    metrics = pose_metrics(commanded, estimated, is_metric=True)
    for name, value in expected.items():
        assert getattr(metrics, name) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert (metrics.frames, metrics.valid_frames, metrics.gauge_frame, metrics.undefined) == (frames, frames, 0, ())


@given(SEEDS)
def test_no_metric_depends_on_either_world_frame(seed: int) -> None:
    commanded, estimated = curved_drive(9), random_poses(9, seed=seed)
    a, b = random_poses(2, seed=seed + 1, spread_m=1000.0)
    moved = pose_metrics(a @ commanded, b @ estimated, is_metric=True)
    names = (*SCALE_FREE, "scale", "ate_m", "metric_tr_percent", "chord_m")
    assert_same(moved, pose_metrics(commanded, estimated, is_metric=True), names, 1e-9)


@given(SEEDS, st.floats(0.1, 1000.0), st.floats(0.1, 1000.0))
def test_the_papers_metrics_are_scale_free(seed: int, of_commanded: float, of_estimated: float) -> None:
    commanded, estimated = random_poses(2, 8, seed=seed)
    before = pose_metrics(commanded, estimated)
    after = pose_metrics(scaled(commanded, of_commanded), scaled(estimated, of_estimated))
    assert_same(after, before, SCALE_FREE, 1e-7)  # ε₀ of the max-norm is absolute
    assert after.scale == pytest.approx(before.scale * of_commanded / of_estimated, rel=1e-9)


def test_earth_centred_coordinates_lose_nothing(highway: Tensor) -> None:
    local = rigid(highway[:, :3, :3], highway[:, :3, 3] - highway[0, :3, 3])
    assert pose_metrics(highway, local, is_metric=True).ate_m < 1e-8


def test_agrees_with_evo() -> None:
    """evo 1.38.1 on 49 highway poses against a drifting, shrunken copy: APE after align_origin, and after scale(s*)."""
    folder = Path(__file__).parents[1] / "data" / "comma2k19"
    quaternions = torch.from_numpy(np.load(folder / "frame_orientations.npy"))[:98:2]
    rotations = matrix_from_quaternion(torch.nn.functional.normalize(quaternions, dim=-1))[..., [1, 2, 0]]
    commanded = rigid(rotations, torch.from_numpy(np.load(folder / "frame_positions.npy"))[:98:2])
    t = torch.arange(49, dtype=torch.float64)
    drift = matrix_from_quaternion(torch.stack(((t / 2000).cos(), 0 * t, (t / 2000).sin(), 0 * t), dim=-1))
    first = rotations[0].mT
    centres = (commanded[:, :3, 3] - commanded[0, :3, 3]) @ rotations[0]
    wobble = torch.stack((0.3 * (0.2 * t).sin(), 0.1 * (0.5 * t).sin(), 0.4 * (0.1 * t).sin()), dim=-1)
    estimated = rigid(first @ rotations @ drift, 0.4 * (centres + wobble))

    metrics = pose_metrics(commanded, estimated, is_metric=True)
    without_first = 49 / 48  # evo's means include the first frame
    assert metrics.ate_m == pytest.approx(17.824772736277538, abs=1e-7)
    assert metrics.metric_tr_percent * metrics.chord_m / 100 == pytest.approx(
        14.90395908408214 * without_first, abs=1e-7
    )
    assert metrics.scale == pytest.approx(2.504888039087538, abs=1e-8)
    assert metrics.tr_percent * metrics.chord_m / 100 == pytest.approx(0.3339441810428451 * without_first, abs=1e-7)
    assert metrics.rot_deg == pytest.approx(1.375098708313976 * without_first, abs=1e-6)


def test_numpy_and_float32_are_taken_and_nearly_rotations_repaired() -> None:
    commanded, estimated = random_poses(2, 10)
    expected = pose_metrics(commanded, estimated)
    assert pose_metrics(commanded.numpy(), estimated.numpy(), np.ones(10, dtype=bool)) == expected
    single = pose_metrics(commanded.to(torch.float32), estimated.to(torch.float32))
    assert_same(single, expected, SCALE_FREE, 1e-5)
    sheared = commanded.clone()
    sheared[:, :3, :3] += 1e-5 * torch.randn(10, 3, 3, dtype=torch.float64)
    assert pose_metrics(commanded, sheared).rot_deg < 2e-3


@pytest.mark.parametrize("angle_rad", [0.0, 1e-15, 1e-9, 1e-4, 1.0, 3.0, math.pi - 1e-9, math.pi])
def test_angles_keep_their_digits_at_both_ends(angle_rad: float) -> None:
    axis = torch.nn.functional.normalize(torch.tensor([1.0, 2.0, -2.0], dtype=torch.float64), dim=0)
    turn = matrix_from_quaternion(quaternion_from_axis_angle(axis, torch.tensor(angle_rad, dtype=torch.float64)))
    frame = random_rotations()
    assert float(rotation_angle(frame, frame @ turn)) == pytest.approx(angle_rad, abs=2e-15)


def test_failing_frames_does_not_shrink_the_sums() -> None:
    path = straight_drive(11)
    estimated = yawed(path, 5.0)
    estimated[:, :3, 3] *= 0.5
    whole = pose_metrics(path, estimated)
    valid = torch.ones(11, dtype=torch.bool)
    valid[[3, 4, 7]] = False
    estimated[~valid] = math.nan
    some = pose_metrics(path, estimated, valid)
    assert (some.frames, some.valid_frames, some.gauge_frame) == (11, 8, 0)
    assert_same(some, whole, (*SCALE_FREE, "scale", "chord_m"), 1e-9)


@given(SEEDS, st.integers(0, 4))
def test_with_a_failed_first_frame_the_first_valid_one_is_the_gauge(seed: int, gauge: int) -> None:
    commanded, estimated = random_poses(2, 9, seed=seed)
    valid = torch.arange(9) >= gauge
    metrics = pose_metrics(commanded, estimated, valid, is_metric=True)
    expected = straightforward(commanded[gauge:].numpy(), estimated[gauge:].numpy())
    sums = (9 - 1) / (9 - gauge - 1)
    chord_m = float((commanded[-1, :3, 3] - commanded[0, :3, 3]).norm())
    assert (metrics.gauge_frame, metrics.valid_frames) == (gauge, 9 - gauge)
    assert metrics.chord_m == pytest.approx(chord_m)
    assert metrics.rot_deg == pytest.approx(expected["rot_deg"], rel=1e-9)
    assert metrics.cammc == pytest.approx(expected["cammc"] * sums, rel=1e-9)
    assert metrics.rot_err == pytest.approx(expected["rot_err"] * sums, rel=1e-9)
    assert metrics.trans_err == pytest.approx(expected["trans_err"] * sums, rel=1e-9)
    assert metrics.tr_percent == pytest.approx(expected["tr_percent"] * expected["chord_m"] / chord_m, rel=1e-9)
    assert metrics.ate_m == pytest.approx(expected["ate_m"], rel=1e-9)


@pytest.mark.parametrize("seen", [[], [0], [4], [0, 1]])
def test_without_half_of_the_poses_nothing_is_defined_and_that_is_said(seen: list[int]) -> None:
    valid = torch.zeros(6, dtype=torch.bool)
    valid[seen] = True
    metrics = pose_metrics(
        curved_drive(6),
        torch.full((6, 4, 4), math.nan).masked_fill(valid[:, None, None], 0.0) + torch.eye(4),
        valid,
        is_metric=True,
    )
    assert metrics.undefined == (TOO_FEW_FRAMES,)
    assert all(math.isnan(getattr(metrics, name)) for name in (*SCALE_FREE, "scale", "ate_m", "metric_tr_percent"))
    assert (metrics.valid_frames, metrics.frames, metrics.reversed_motion) == (len(seen), 6, False)
    assert metrics.gauge_frame == (seen[0] if seen else None)


def test_half_of_the_poses_are_enough() -> None:
    path = curved_drive(6)
    assert pose_metrics(path, path, torch.arange(6) < 3).undefined == ()


def test_a_prefix_that_is_found_again_is_no_success() -> None:
    """A video model copies its clean frames: noise after them must not score zero."""
    path = curved_drive(49)
    metrics = pose_metrics(path, path, torch.arange(49) < 9)
    assert metrics.undefined == (TOO_FEW_FRAMES,)
    assert math.isnan(metrics.rot_deg)


def test_a_single_frame_has_no_metrics() -> None:
    assert pose_metrics(random_poses(1), random_poses(1)).undefined == (TOO_FEW_FRAMES,)


@pytest.mark.parametrize("noise_m", [0.0, 1e-3])
def test_a_static_command_leaves_rotation_and_metres(noise_m: float) -> None:
    """Max-norming noise of a millimetre would score a correctly parked car with a TransErr of about half its frames."""
    parked = straight_drive(30, step_m=0.0002)  # 6 mm: what poses of a parked car may wander
    jitter = torch.zeros(30, 3, dtype=torch.float64)
    jitter[1:] = noise_m * torch.randn(29, 3, dtype=torch.float64)
    metrics = pose_metrics(parked, yawed(rigid(parked[:, :3, :3], parked[:, :3, 3] + jitter), 3.0), is_metric=True)
    assert metrics.undefined == (STATIC_COMMAND,)
    assert all(math.isnan(value) for value in (metrics.tr_percent, metrics.scale, metrics.cammc, metrics.trans_err))
    assert metrics.rot_deg == pytest.approx(3.0)
    assert metrics.rot_err == pytest.approx(29 * math.radians(3.0))
    assert metrics.ate_m == pytest.approx(noise_m * math.sqrt(3), rel=0.3)
    assert math.isnan(metrics.metric_tr_percent)
    assert not metrics.reversed_motion


def test_a_command_that_creeps_is_not_static() -> None:
    creeping = straight_drive(30, step_m=0.0004)  # 11.6 mm
    metrics = pose_metrics(creeping, scaled(creeping, 0.5))
    assert metrics.undefined == ()
    assert metrics.scale == pytest.approx(2.0)
    assert metrics.tr_percent == pytest.approx(0.0, abs=1e-9)


def test_a_path_that_returns_has_no_chord() -> None:
    out = straight_drive(5)
    path = torch.cat((out, out[:-1].flip(0)))
    metrics = pose_metrics(path, scaled(path, 0.5), is_metric=True)
    assert metrics.undefined == (CLOSED_COMMAND,)
    assert math.isnan(metrics.tr_percent)
    assert math.isnan(metrics.metric_tr_percent)
    assert metrics.scale == pytest.approx(2.0)
    assert metrics.cammc == pytest.approx(0.0, abs=1e-8)


def test_rows_for_json_hold_no_nan() -> None:
    row = pose_metrics(straight_drive(3, step_m=0.0), straight_drive(3)).as_dict()
    assert row["tr_percent"] is None
    assert row["ate_m"] is None
    assert row["rot_deg"] == 0.0
    assert json.loads(json.dumps(row, allow_nan=False))["undefined"] == [STATIC_COMMAND]


def test_metres_are_only_reported_for_metric_estimates() -> None:
    path = curved_drive(6)
    assert pose_metrics(path, path).ate_m is None
    assert pose_metrics(path, path).metric_tr_percent is None
    assert replace(pose_metrics(path, path, is_metric=True), ate_m=None, metric_tr_percent=None) == pose_metrics(
        path, path
    )


def test_a_static_estimate_is_not_called_reversed() -> None:
    metrics = pose_metrics(curved_drive(6), scaled(curved_drive(6), 0.0))
    assert (metrics.scale, metrics.static_estimate, metrics.reversed_motion) == (0.0, True, False)


def test_inverted_poses_are_recognised() -> None:
    path, other = curved_drive(12), curved_drive(12, yaw_step_rad=0.05)
    assert looks_inverted(path, inverse(other))
    assert not looks_inverted(path, other)
    assert not looks_inverted(path, random_poses(12))
    assert not looks_inverted(straight_drive(12, step_m=0.0), path)


@pytest.mark.parametrize(
    ("commanded", "estimated", "valid", "message"),
    [
        (torch.eye(4), random_poses(1), None, r"commanded must be \[T, 4, 4\]"),
        (random_poses(3), random_poses(4), None, r"estimated must be \[3, 4, 4\] like commanded.*valid"),
        (random_poses(3), random_poses(3)[:, :3], None, r"estimated must be \[..., 4, 4\]"),
        (random_poses(3), random_poses(3).half(), None, "float32 or float64"),
        (random_poses(3), random_poses(3).tolist(), None, "estimated must be a torch.Tensor"),
        (random_poses(3), random_poses(3) * math.nan, None, "NaN or inf in frame 0; mark failed frames False in valid"),
        (random_poses(3) * math.nan, random_poses(3), None, "commanded must be finite"),
        (random_poses(3), random_poses(3), torch.ones(2, dtype=torch.bool), r"valid must be a bool array \[3\]"),
        (random_poses(3), random_poses(3), torch.ones(3), r"valid must be a bool array \[3\]"),
        (random_poses(3), random_poses(3) * 2, None, r"estimated\[..., 3, :\]"),
    ],
)
def test_bad_input_is_refused(commanded: Tensor, estimated: Tensor, valid: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pose_metrics(commanded, estimated, valid)
