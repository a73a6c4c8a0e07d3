"""Quaternions, MinRot frames and epipolar arcs: properties everywhere, also at the poles."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import random_rotations
from torch import Tensor
from torch.nn.functional import normalize

from merope.geometry.epipolar import anchor_directions, arc_turns, epipolar_arc
from merope.geometry.minrot import minrot, minrot_quaternion
from merope.geometry.quaternions import (
    matrix_from_quaternion,
    multiply,
    quaternion_from_axis_angle,
    quaternion_from_matrix,
)

UNIT = torch.eye(3, dtype=torch.float64)
FRACTIONS = torch.tensor([0.0, 0.05, 0.15, 0.4, 0.7, 1.0], dtype=torch.float64)

unit_vectors = st.tuples(*[st.floats(-1, 1)] * 3).filter(lambda v: math.hypot(*v) > 1e-3)


def unit(v: tuple[float, ...]) -> Tensor:  # [3]
    return normalize(torch.tensor(v, dtype=torch.float64), dim=0)


def near_pole(distance: float, azimuth: float) -> Tensor:  # [3]
    return unit((distance * math.cos(azimuth), distance * math.sin(azimuth), -math.sqrt(1 - min(distance, 1.0) ** 2)))


def test_quaternion_round_trips_and_products() -> None:
    a, b = random_rotations(50), random_rotations(50, seed=1)
    assert (matrix_from_quaternion(quaternion_from_matrix(a)) - a).abs().max() < 1e-14
    product = multiply(quaternion_from_matrix(a), quaternion_from_matrix(b))
    assert (matrix_from_quaternion(product) - a @ b).abs().max() < 1e-14


@pytest.mark.parametrize("axis", [(1.0, 0, 0), (0, 1.0, 0), (0, 0, 1.0), (0.6, 0.8, 0)])
@pytest.mark.parametrize("angle", [0.0, 1e-9, 1.0, math.pi - 1e-9, math.pi])
def test_quaternion_from_matrix_has_no_special_angle(axis: tuple[float, ...], angle: float) -> None:
    turn = quaternion_from_axis_angle(unit(axis), torch.tensor(angle, dtype=torch.float64))
    rotation = matrix_from_quaternion(turn).requires_grad_()
    back = quaternion_from_matrix(rotation)
    assert (matrix_from_quaternion(back) - rotation).abs().max() < 1e-15
    back.sum().backward()
    assert rotation.grad is not None
    assert rotation.grad.isfinite().all()


def test_axis_angle_turns_right_handed() -> None:
    quarter = quaternion_from_axis_angle(UNIT[2], torch.tensor(math.pi / 2, dtype=torch.float64))
    assert (matrix_from_quaternion(quarter) @ UNIT[0] - UNIT[1]).abs().max() < 1e-15


@given(v=unit_vectors)
def test_minrot_carries_the_axis_by_the_smallest_turn(v: tuple[float, ...]) -> None:
    direction = unit(v)
    frame = minrot(direction)
    assert (frame @ UNIT[2] - direction).abs().max() < 1e-14
    assert (frame.mT @ frame - UNIT).abs().max() < 1e-14
    cosine = (frame.trace() - 1) / 2  # of the turn: the smallest one has the angle between e_z and the direction
    assert abs(float(cosine - direction[2])) < 1e-14


@given(exponent=st.floats(-9, 0), azimuth=st.floats(0, 2 * math.pi))
def test_minrot_near_its_pole_is_orthogonal_and_equals_the_formula(exponent: float, azimuth: float) -> None:
    direction = near_pole(10**exponent, azimuth)
    frame = minrot(direction)
    assert (frame.mT @ frame - UNIT).abs().max() < 1e-14
    if 10**exponent < 0.99e-6:
        assert torch.equal(frame, torch.diag(torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)))
    elif 10**exponent > 1.01e-6:
        half = normalize(
            torch.stack((direction[0], direction[1], direction[:2].square().sum() / (1 - direction[2]))), dim=0
        )
        expected = (2 * torch.outer(half, half) - UNIT) @ torch.diag(
            torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
        )
        assert (frame - expected).abs().max() < 1e-13


@pytest.mark.parametrize("direction", [(0.0, 0.0, -1.0), (1e-9, 0.0, -1.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)])
def test_minrot_gradients_are_finite(direction: tuple[float, ...]) -> None:
    value = torch.tensor(direction, dtype=torch.float64, requires_grad=True)
    minrot_quaternion(value).sum().backward()
    assert value.grad is not None
    assert value.grad.isfinite().all()


@given(u=unit_vectors, displacement=unit_vectors, exponent=st.floats(-4, 7))
def test_anchors_run_from_infinity_to_the_epipole(
    u: tuple[float, ...], displacement: tuple[float, ...], exponent: float
) -> None:
    far, epipole = unit(u), unit(displacement)
    arc = epipolar_arc(far, 10**exponent * epipole)
    anchors = anchor_directions(arc, FRACTIONS)
    assert (anchors.norm(dim=-1) - 1).abs().max() < 1e-15
    assert (anchors[0] - far).abs().max() < 1e-14
    if not bool(arc.defined):
        assert (anchors - far).abs().max() < 1e-15
        return
    assert (anchors[-1] - epipole).abs().max() < 1e-9
    angles = torch.atan2(torch.linalg.cross(far.expand_as(anchors), anchors).norm(dim=-1), anchors @ far)
    assert (angles - FRACTIONS * arc.angle_rad).abs().max() < 1e-9
    turned = matrix_from_quaternion(arc_turns(arc, FRACTIONS)) @ far
    assert (turned - anchors).abs().max() < 1e-9


def test_an_anchor_is_where_a_point_at_some_depth_is_seen() -> None:
    """Points along the key ray, seen from the query camera, lie on the arc: the geometric meaning of Eq. 9."""
    rotation, displacement = random_rotations(seed=4), torch.tensor([1.0, -0.3, 2.0], dtype=torch.float64)
    ray = unit((0.2, -0.1, 1.0))
    arc = epipolar_arc(rotation @ ray, displacement)
    for depth_m in (0.01, 0.5, 3.0, 40.0, 1e5):
        seen = normalize(displacement + depth_m * (rotation @ ray), dim=0)
        angle = torch.atan2(seen @ arc.tangent, seen @ arc.far_direction)
        assert 0 <= angle <= arc.angle_rad
        assert (anchor_directions(arc, angle[None] / arc.angle_rad)[0] - seen).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("u", "displacement"),
    [((0, 0, 1.0), (0, 0, 0)), ((0, 0, 1.0), (0, 0, 2.0)), ((0, 0, 1.0), (0, 0, -2.0)), ((0.6, 0, 0.8), (1e-7, 0, 0))],
)
def test_degenerate_arcs_collapse_with_finite_gradients(u: tuple[float, ...], displacement: tuple[float, ...]) -> None:
    far = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    move = torch.tensor(displacement, dtype=torch.float64, requires_grad=True)
    arc = epipolar_arc(far, move)
    assert not bool(arc.defined)
    anchors = anchor_directions(arc, FRACTIONS)
    assert torch.equal(anchors, far.expand_as(anchors))
    assert torch.equal(arc_turns(arc, FRACTIONS), torch.tensor([1.0, 0, 0, 0]).double().expand(6, 4))
    (anchors.sum() + arc_turns(arc, FRACTIONS).sum() + arc.angle_rad).backward()
    for value in (far, move):
        assert value.grad is not None
        assert value.grad.isfinite().all()


@pytest.mark.parametrize(
    ("baseline_m", "rounding_m", "defined"),
    [(2e-6, 0.0, True), (5e-7, 0.0, False), (5e-5, 1e-5, True), (3e-5, 1e-5, False)],
)
def test_an_arc_is_defined_from_a_micrometre_and_four_roundings_on(
    baseline_m: float, rounding_m: float, defined: bool
) -> None:
    far, epipole = torch.eye(3, dtype=torch.float64)[:2]
    arc = epipolar_arc(far, baseline_m * epipole, torch.tensor(rounding_m, dtype=torch.float64))
    assert bool(arc.defined) is defined
    assert float(arc.angle_rad) == pytest.approx(math.pi / 2 if defined else 0.0)
    assert defined or float(arc.zone) < 1e-4  # a collapsed arc stands at u∞, which no rounding of centres moves


@pytest.mark.parametrize(
    ("angle_rad", "rounding_m", "defined"),
    [(2e-6, 0.0, True), (5e-7, 0.0, False), (5e-3, 1e-2, True), (3e-3, 1e-2, False)],
)
@pytest.mark.parametrize("towards", [1.0, -1.0])
def test_an_arc_has_a_direction_where_rounding_does_not_pick_it(
    angle_rad: float, rounding_m: float, defined: bool, towards: float
) -> None:
    """10 m away, a centimetre of rounding makes 4 · 1 mrad."""
    far = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    move = 10.0 * far.new_tensor([math.sin(angle_rad), 0.0, towards * math.cos(angle_rad)])
    arc = epipolar_arc(far, move, torch.tensor(rounding_m, dtype=torch.float64))
    assert bool(arc.defined) is defined
    expected_rad = angle_rad if towards > 0.0 else math.pi - angle_rad
    assert float(arc.angle_rad) == pytest.approx(expected_rad if defined else 0.0)
