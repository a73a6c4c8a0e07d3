"""Recovery against the world's own renders: floors on true frames, known pose errors found again, any lens."""

import math
from dataclasses import replace

import pytest
import torch
from scenes import random_poses
from torch import Tensor
from torch.nn.functional import normalize

from merope.evaluate.estimators import ray_pnp
from merope.evaluate.estimators.estimator import PoseEstimate
from merope.evaluate.estimators.ray_pnp import RayPairs, solve
from merope.evaluate.estimators.render_anchored import RenderAnchoredEstimator
from merope.evaluate.metrics import pose_metrics
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.poses import inverse, relative, rigid, transform
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle
from merope.geometry.trajectories import unicycle_path
from merope.world.render import Render, render
from merope.world.scene import World

COUNT = 5
PATH = unicycle_path(torch.full((COUNT - 1,), 6.0).double(), torch.full((COUNT - 1,), 0.15).double(), frame_rate_hz=1.0)
WORLD = World(4).cleared(PATH)
CAMERAS = Cameras(PATH, Pinhole(202.5, 202.5, 128, 72, 256, 144))
SMALL = (72, 128)  # rows, columns of frames that the same lens fills


@pytest.fixture(scope="module")
def anchors() -> Render:
    return render(WORLD, CAMERAS, 144, 256)


@pytest.fixture(scope="module")
def small_anchors() -> Render:
    return render(WORLD, CAMERAS, *SMALL)


def as_bytes(image: Tensor, noise: float = 5.0) -> Tensor:  # float in [0, 1] -> uint8
    return (255.0 * image + noise * torch.randn(image.shape)).round().clamp(0.0, 255.0).to(torch.uint8)


def small_motions(count: int, turn_deg: float, shift_m: float) -> Tensor:  # [count, 4, 4]
    axes, directions = normalize(torch.randn(2, count, 3, dtype=torch.float64), dim=-1)
    turns = quaternion_from_axis_angle(axes, torch.full((count,), math.radians(turn_deg), dtype=torch.float64))
    return rigid(matrix_from_quaternion(turns), shift_m * directions)


def distances(true: Tensor, found: PoseEstimate) -> tuple[Tensor, Tensor]:  # [T] degrees, [T] metres
    off = relative(true, found.world_from_camera)
    chord = (off[:, :3, :3] - torch.eye(3, dtype=torch.float64)).flatten(1).norm(dim=-1)
    return torch.rad2deg(2.0 * torch.asin(chord / math.sqrt(8.0))), off[:, :3, 3].norm(dim=-1)


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_the_floor_on_true_renders(noise: float, anchors: Render) -> None:
    found = RenderAnchoredEstimator(WORLD, CAMERAS, anchors)(as_bytes(anchors.image, noise))
    errors = pose_metrics(PATH, found.world_from_camera, found.valid, found.is_metric)
    assert errors.valid_frames == COUNT
    assert errors.rot_deg < 0.05
    assert errors.metric_tr_percent is not None
    assert errors.metric_tr_percent < 0.1  # metres: nothing was scaled
    assert found.is_metric


@pytest.mark.parametrize(("turn_deg", "shift_m"), [(1.0, 0.2), (4.0, 0.6)])
def test_pose_errors_of_known_size_are_found_again(turn_deg: float, shift_m: float, anchors: Render) -> None:
    true = PATH @ small_motions(COUNT, turn_deg, shift_m)
    frames = as_bytes(render(WORLD, Cameras(true, CAMERAS.lens), 144, 256).image)
    found = RenderAnchoredEstimator(WORLD, CAMERAS, anchors)(frames)
    assert bool(found.valid.all())
    off_deg, off_m = distances(true, found)
    assert off_deg.max() < 0.1 * turn_deg
    assert off_m.max() < 0.1 * shift_m


def test_a_second_anchor_at_the_first_answer_helps(small_anchors: Render) -> None:
    true = PATH @ small_motions(COUNT, 8.0, 1.0)
    frames = as_bytes(render(WORLD, Cameras(true, CAMERAS.lens), *SMALL).image)
    once, twice = (
        distances(true, RenderAnchoredEstimator(WORLD, CAMERAS, small_anchors, rounds=rounds)(frames))
        for rounds in (1, 2)
    )
    assert twice[0].mean() < 0.75 * once[0].mean()
    assert twice[1].mean() < 0.75 * once[1].mean()


@pytest.mark.parametrize(
    "lens",
    [
        UnifiedCamera.from_fov(173.0, 1.66, 256, 144),
        Pinhole(torch.linspace(150.0, 250.0, COUNT), 202.5, 128, 72, 256, 144),
    ],
    ids=["fisheye", "zoom"],
)
def test_any_lens(lens: Lens) -> None:
    true = PATH @ small_motions(COUNT, 2.0, 0.3)
    frames = as_bytes(render(WORLD, Cameras(true, lens), 144, 256).image)
    found = RenderAnchoredEstimator(WORLD, Cameras(PATH, lens))(frames)
    assert bool(found.valid.all())
    off_deg, off_m = distances(true, found)
    assert off_deg.max() < 0.2
    assert off_m.max() < 0.05


def test_frames_keep_their_own_lens_when_others_need_no_second_anchor() -> None:
    zoom = Pinhole(torch.linspace(150.0, 250.0, COUNT), 202.5, 128, 72, 256, 144)
    true = PATH @ small_motions(COUNT, 2.0, 0.3)
    true[:3] = PATH[:3]
    frames = as_bytes(render(WORLD, Cameras(true, zoom), 144, 256).image, noise=0.0)
    off_deg, off_m = distances(true, RenderAnchoredEstimator(WORLD, Cameras(PATH, zoom))(frames))
    assert off_deg.max() < 0.2
    assert off_m.max() < 0.05


def test_the_answer_is_in_the_world_frame(small_anchors: Render) -> None:
    motion = random_poses(1, seed=8, spread_m=1000.0)[0]
    moved = Cameras(motion @ PATH, CAMERAS.lens)
    found = RenderAnchoredEstimator(WORLD.moved(motion), moved)(as_bytes(small_anchors.image))
    off_deg, off_m = distances(motion @ PATH, found)
    assert off_deg.max() < 0.15
    assert off_m.max() < 0.1


@pytest.mark.parametrize("kind", ["blank", "noise"])
def test_frames_that_show_nothing_are_invalid_and_the_others_stand(kind: str, small_anchors: Render) -> None:
    frames = as_bytes(small_anchors.image)
    frames[2] = 127 if kind == "blank" else torch.randint(0, 256, frames[2].shape, dtype=torch.uint8)
    found = RenderAnchoredEstimator(WORLD, CAMERAS, small_anchors)(frames)
    assert found.valid.tolist() == [True, True, False, True, True]
    assert "1 of 5" in found.note


def test_half_a_frame_is_enough_and_another_street_is_not(small_anchors: Render) -> None:
    frames = as_bytes(small_anchors.image)
    frames[1, :, SMALL[1] // 2 :] = 127
    frames[2] = as_bytes(render(World(1).cleared(PATH), CAMERAS, *SMALL).image)[2]
    found = RenderAnchoredEstimator(WORLD, CAMERAS, small_anchors)(frames)
    assert found.valid.tolist() == [True, True, False, True, True]


def test_a_shorter_video_is_measured_and_a_longer_one_refused(small_anchors: Render) -> None:
    estimate = RenderAnchoredEstimator(WORLD, CAMERAS, small_anchors)
    frames = as_bytes(small_anchors.image)
    assert estimate(frames[:2]).valid.tolist() == [True, True]
    with pytest.raises(ValueError, match="at most 5"):
        estimate(frames.repeat(2, 1, 1, 1))


def test_bad_arguments_are_refused(small_anchors: Render) -> None:
    with pytest.raises(ValueError, match="one clip"):
        RenderAnchoredEstimator(World([1, 2]), CAMERAS)
    with pytest.raises(ValueError, match="rounds"):
        RenderAnchoredEstimator(WORLD, CAMERAS, rounds=0)
    with pytest.raises(ValueError, match="anchors"):
        RenderAnchoredEstimator(WORLD, CAMERAS, replace(small_anchors, image=small_anchors.image[:2]))


def test_the_solver_is_exact_with_a_third_of_outliers_and_rays_behind_the_camera() -> None:
    points = normalize(torch.randn(600, 3, dtype=torch.float64), dim=-1) * (5.0 + 20.0 * torch.rand(600, 1).double())
    motion = small_motions(1, 3.0, 0.5)[0]
    rays = normalize(transform(motion, points), dim=-1)
    rays[::3] = normalize(torch.randn(200, 3, dtype=torch.float64), dim=-1)
    answer = solve(RayPairs(points, rays, pixel_rad=0.005), seed=0)
    assert answer is not None
    assert (answer.ray_camera_from_point_camera @ inverse(motion) - torch.eye(4).double()).abs().max() < 1e-9
    assert answer.inliers >= 400


def test_steps_of_the_solver_are_those_of_weighted_least_squares() -> None:
    rays, seen = normalize(torch.randn(2, 50, 3, dtype=torch.float64), dim=-1)
    distance_m, weight = 1.0 + 9.0 * torch.rand(50, dtype=torch.float64), torch.rand(50, dtype=torch.float64)
    axes = torch.eye(3, dtype=torch.float64)
    by_turn = torch.linalg.cross(axes.expand(50, 3, 3), rays[:, None]).mT
    by_shift = (axes - rays[:, :, None] * rays[:, None]) / distance_m[:, None, None]
    derivative = torch.cat((by_turn, by_shift), dim=-1)
    weighted = (derivative * weight[:, None, None]).flatten(0, 1)
    matrix, vector = ray_pnp._normal_equations(*(part.numpy() for part in (rays.T, seen.T, weight, distance_m)))
    torch.testing.assert_close(torch.from_numpy(matrix), weighted.mT @ derivative.flatten(0, 1))
    torch.testing.assert_close(torch.from_numpy(vector), weighted.mT @ (seen - rays).flatten())


def test_the_solver_gives_up_on_noise() -> None:
    points, rays = normalize(torch.randn(2, 200, 3, dtype=torch.float64), dim=-1)
    assert solve(RayPairs(10.0 * points, rays, pixel_rad=0.005), seed=0) is None
