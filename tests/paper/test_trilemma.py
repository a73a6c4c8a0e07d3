"""The impossibility experiment: its measure, its floor, and what training finds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merope.geometry.poses import rigid
from merope.paper import trilemma
from merope.paper.trilemma import (
    DirectionRow,
    PerTokenOperator,
    Row,
    direction_phases,
    residual,
    spectral_floor,
    target_phases,
)


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """A reduced experiment, by rotations."""
    return {row.rotations: row for row in trilemma.run(dims=(12,), steps=200)}


def test_merope_is_exact_with_and_without_rotations(rows: dict[str, Row]) -> None:
    assert rows["none"].merope < 1e-24
    assert rows["all"].merope < 1e-24


def test_without_rotations_training_finds_the_exact_plane_waves(rows: dict[str, Row]) -> None:
    row = rows["none"]
    assert row.floor < 1e-12
    assert row.plane_waves < 1e-6
    assert row.any_map < 1e-3
    assert row.blind > 1.3


def test_with_rotations_nothing_per_token_comes_near(rows: dict[str, Row]) -> None:
    row = rows["all"]
    assert row.floor > 1.0
    assert row.floor <= row.any_map < row.plane_waves < row.blind
    assert row.any_map < 0.95 * row.blind  # training did find what there is to find


def test_direction_phases_are_exact_and_out_of_reach_per_token_once_cameras_turn() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    rows = trilemma.direction_rows(dims=(12, 36))
    assert torch.equal(torch.rand(3), expected)
    assert [(row.dim, row.rotations) for row in rows] == [(12, "none"), (12, "all"), (36, "none"), (36, "all")]
    for row in rows:
        assert row.merope_phases < 1e-24
        assert (row.floor > 1.0) == (row.rotations == "all")
        assert row.floor < row.blind
    assert rows[0].floor < 1e-12  # plane waves of the rays themselves


def test_direction_phases_are_those_of_the_definition() -> None:
    poses = trilemma.random_poses(4, "all")
    rays = torch.nn.functional.normalize(torch.randn(4, 3, dtype=torch.float64), dim=-1)
    phases = direction_phases(poses[:, :3, :3], rays, 12)
    for i, j in ((0, 1), (3, 2), (2, 2)):
        change = poses[i, :3, :3].mT @ poses[j, :3, :3] @ rays[j] - rays[i]
        wanted = torch.tensor([50.0 * 0.1**m * float(along) for along in change for m in range(2)], dtype=torch.float64)
        torch.testing.assert_close(phases[i, j], wanted, rtol=0, atol=1e-12)


def test_rows_are_repeatable_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = trilemma.run(dims=(12,), steps=3, seed=5)
    assert torch.equal(torch.rand(3), expected)
    assert first == trilemma.run(dims=(12,), steps=3, seed=5)
    assert first != trilemma.run(dims=(12,), steps=3, seed=6)


def dense_residual(operators: Tensor, poses: Tensor) -> float:
    """The definition, pair by pair, every τ written out."""
    count, dim = operators.shape[:2]
    total = 0.0
    for i in range(count):
        for j in range(count):
            displacement = poses[i, :3, :3].mT @ (poses[j, :3, 3] - poses[i, :3, 3])
            blocks = []
            for axis in range(3):
                for wavelength_m in trilemma.WAVELENGTHS_M:
                    angle = 2 * math.pi / wavelength_m * float(displacement[axis])
                    c, s = math.cos(angle), math.sin(angle)
                    blocks += [torch.tensor([[c, -s], [s, c]], dtype=torch.float64)] * (dim // 12)
            difference = operators[i].mT @ operators[j] - torch.block_diag(*blocks)
            total += float(difference.square().sum()) if i != j else 0.0
    return total / (count * (count - 1) * dim)


@pytest.mark.parametrize("dim", [12, 24])
def test_residual_is_the_mean_squared_frobenius_distance(dim: int) -> None:
    poses = trilemma.random_poses(5, "all")
    operators = torch.linalg.qr(torch.randn(5, dim, dim, dtype=torch.float64)).Q
    ours = float(residual(operators, target_phases(poses, dim)))
    assert ours == pytest.approx(dense_residual(operators, poses), abs=1e-12)


@given(seed=st.integers(0, 10**6), count=st.integers(2, 12), closeness=st.floats(0, 1))
def test_no_orthogonal_operators_are_below_the_floor(seed: int, count: int, closeness: float) -> None:
    """Neither random ones nor those nearest to the eigenvectors in which the floor is attained."""
    torch.manual_seed(seed)
    phases = target_phases(trilemma.random_poses(count, "all"), 12)
    waves = torch.polar(torch.ones_like(phases), phases)
    real = torch.zeros(count, 12, count, 12, dtype=torch.float64)  # every τ_ij
    for pair in range(6):
        even, odd = 2 * pair, 2 * pair + 1
        real[:, even, :, even] = real[:, odd, :, odd] = waves[..., pair].real
        real[:, odd, :, even], real[:, even, :, odd] = waves[..., pair].imag, -waves[..., pair].imag
    matrix = real.reshape(12 * count, 12 * count)
    eigenvalues, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    best = vectors[:, -12:].mT.unflatten(1, (count, 12)).transpose(0, 1) * math.sqrt(count)
    left, _, right = torch.linalg.svd(best + closeness * torch.randn_like(best))
    floor = spectral_floor(phases)
    assert floor <= float(residual(left @ right, phases)) + 1e-9
    assert floor == pytest.approx(max(0, 2 - 2 * (float(eigenvalues[-12:].sum()) - 12) / ((count - 1) * 12)), abs=1e-9)


def test_the_floor_does_not_depend_on_the_number_of_channels() -> None:
    poses = trilemma.random_poses(40, "all")
    floors = [spectral_floor(target_phases(poses, dim)) for dim in (12, 24, 96)]
    assert floors == pytest.approx([floors[0]] * 3, abs=1e-9)


def test_targets_depend_on_relative_poses_only() -> None:
    poses = trilemma.random_poses(4, "all")
    world = rigid(trilemma.random_poses(1, "all")[0, :3, :3], torch.tensor([9.0, -4.0, 2.0], dtype=torch.float64))
    assert (target_phases(world @ poses, 12) - target_phases(poses, 12)).abs().max() < 1e-12


def test_no_per_token_pair_is_exact_because_its_reverse_is_its_transpose() -> None:
    """The shortest reason: U_iᵀU_j and U_jᵀU_i are transposes, τ_ij and τ_ji are not once the cameras are turned."""
    for rotations, smallest, largest in (("none", 0.0, 1e-12), ("all", 0.1, math.inf)):
        phases = target_phases(trilemma.random_poses(8, rotations), 12)
        assert smallest <= float((phases + phases.transpose(0, 1)).abs().max()) < largest


@pytest.mark.parametrize("sees_centre", [False, True])
def test_candidates_are_orthogonal_and_blind_ones_see_no_centre(sees_centre: bool) -> None:
    model = PerTokenOperator(12, sees_centre, frequency_scale=0.0).double()
    poses = trilemma.random_poses(6, "all")
    operators = model(poses)
    assert (operators.mT @ operators - torch.eye(12)).abs().max() < 1e-12
    moved = poses.clone()
    moved[:, :3, 3] += 1.0
    assert bool((model(moved) - operators).abs().max() > 1e-6) == sees_centre


def test_table_and_errors() -> None:
    row = Row(dim=12, rotations="all", merope=1e-30, any_map=1.25, plane_waves=1.375, floor=1.0625, blind=1.4)
    header, line = trilemma.table([row]).splitlines()
    assert header.split() == ["d", "rotations", "MeRoPE", "any", "U(T)", "plane", "waves", "floor", "blind"]
    assert line.split() == ["12", "all", "1.0e-30", "1.250", "1.375", "1.062", "1.400"]
    header, line = trilemma.table([DirectionRow(24, "none", 1e-30, 1.0625, 1.5)]).splitlines()
    assert header.split() == ["d", "rotations", "with", "phases", "floor", "blind"]
    assert line.split() == ["24", "none", "1.0e-30", "1.062", "1.500"]
    for measured in (trilemma.run, trilemma.direction_rows):
        with pytest.raises(ValueError, match=r"dims must be multiples of 12 .*, got \(12, 20\); the default is"):
            measured(dims=(12, 20))
