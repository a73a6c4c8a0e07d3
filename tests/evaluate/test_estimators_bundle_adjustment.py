"""Bundle adjustment against scenes that are known exactly."""

import numpy as np
import pytest
import torch
from scenes import curved_drive

from merope.evaluate.estimators.bundle_adjustment import Scene, _cost, _Normal, _residuals, adjusted
from merope.geometry.poses import inverse

PIXEL = 0.003


def known_scene(count: int = 7, number: int = 80) -> tuple[Scene, np.ndarray, np.ndarray]:
    """A drive past random points, exactly seen."""
    random = np.random.default_rng(0)
    camera_from_world = inverse(curved_drive(count)).numpy()
    points = random.uniform([-8, -3, 8], [8, 3, 30], (number, 3))
    scene = Scene(camera_from_world[:, :3, :3], camera_from_world[:, :3, 3], points)
    local = scene.in_cameras()
    seen = (local[..., 2] > 2.0) & (random.random((count, number)) < 0.8)
    return scene, local[..., :2] / local[..., 2:], seen


def disturbed(scene: Scene) -> Scene:
    """All views but the first and all points off by a little."""
    random = np.random.default_rng(1)
    shift = scene.shift + random.normal(0, 0.05, scene.shift.shape) * (np.arange(len(scene.shift)) > 0)[:, None]
    return Scene(scene.rotation, shift, scene.points + random.normal(0, 0.1, scene.points.shape))


def assert_same_up_to_scale(a: Scene, b: Scene, tolerance: float) -> None:
    scale = np.linalg.norm(a.points) / np.linalg.norm(b.points)
    assert np.abs(a.rotation - b.rotation).max() < tolerance
    assert np.abs(a.shift - scale * b.shift).max() < tolerance


def test_a_disturbed_scene_is_restored() -> None:
    scene, plane, seen = known_scene()
    found = adjusted(disturbed(scene), plane, seen, PIXEL)
    assert_same_up_to_scale(scene, found, 1e-4)
    assert np.array_equal(found.rotation[0], scene.rotation[0])


def test_a_few_wrong_sightings_hardly_matter() -> None:
    scene, plane, seen = known_scene()
    wrong = plane.copy()
    wrong[3, ::20] += 30 * PIXEL
    found = adjusted(disturbed(scene), wrong, seen, PIXEL)
    assert_same_up_to_scale(scene, found, 0.02)


def test_what_was_not_seen_is_not_read() -> None:
    scene, plane, seen = known_scene()
    hidden = np.where(seen[..., None], plane, np.nan)
    start = disturbed(scene)
    assert np.array_equal(adjusted(start, hidden, seen, PIXEL).points, adjusted(start, plane, seen, PIXEL).points)


def test_the_blocks_are_the_derivatives_of_the_residuals() -> None:
    """A tiny damped step lowers the cost at the rate that the gradient says; checked by differences along each view."""
    scene, plane, seen = known_scene(3, 20)
    start = disturbed(scene)
    error, weight, _ = _residuals(start, plane, seen, PIXEL)
    system = _Normal.of(start, plane, seen, PIXEL)
    for axis in range(3):
        step = 1e-6 * np.eye(3)[axis]
        moved = Scene(start.rotation, start.shift + step * (np.arange(3) == 1)[:, None], start.points)
        change = (_residuals(moved, plane, seen, PIXEL)[0] - error)[1] / 1e-6
        expected = -float((weight[1, :, None] * change * error[1]).sum())
        assert np.isclose(system.view_target[1, 3 + axis], expected, rtol=1e-4)
        shifted = start.points.copy()
        shifted[5] += step
        change = (_residuals(Scene(start.rotation, start.shift, shifted), plane, seen, PIXEL)[0] - error)[:, 5] / 1e-6
        expected = -float((weight[:, 5, None] * change * error[:, 5]).sum())
        assert np.isclose(system.point_target[5, axis], expected, rtol=1e-4)
    assert torch.from_numpy(system.views).isfinite().all()


@pytest.mark.parametrize(("error_px", "loss"), [(0.5, 0.125), (1.0, 0.5), (3.0, 2.5)])
def test_the_cost_is_hubers_and_a_point_behind_its_camera_costs_more(error_px: float, loss: float) -> None:
    plane, seen = np.array([[[error_px * PIXEL, 0.0]]]), np.ones((1, 1), dtype=bool)
    ahead, behind = (Scene(np.eye(3)[None], np.zeros((1, 3)), np.array([[0.0, 0.0, z]])) for z in (2.0, -2.0))
    assert _cost(ahead, plane, seen, PIXEL) == pytest.approx(loss)
    assert _cost(behind, plane, seen, PIXEL) >= 1e3
