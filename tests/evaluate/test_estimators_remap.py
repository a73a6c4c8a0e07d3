"""Pinhole views of any lens: pixels come from where the lens sees their rays, and poses go back to the camera."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import LENSES, ZOOM, random_poses
from torch import Tensor

from merope.evaluate.estimators.estimator import PoseEstimate
from merope.evaluate.estimators.remap import MAX_FOV_DEG, pinhole_view, widest_pinhole
from merope.geometry.lenses import Lens, Pinhole
from merope.geometry.poses import inverse, rigid
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle
from merope.geometry.rays import patch_rays


def painted(rays: Tensor) -> Tensor:  # [..., 3] unit -> uint8 [..., 3]
    """A smooth colour for every direction."""
    return (127.5 + 100.0 * torch.sin(2.0 * rays)).round().to(torch.uint8)


def panorama(lens: Lens, count: int = 1) -> Tensor:  # uint8 [count, H, W, 3]
    """What a lens sees of a world that is painted on the sky."""
    rays, valid = patch_rays(lens, (lens.height, lens.width))
    image = painted(rays) * valid[..., None]
    return image.unflatten(-2, (lens.height, lens.width)).expand(count, -1, -1, -1)


def turn(axis: list[float], angle_rad: float) -> Tensor:  # [3, 3]
    direction = torch.nn.functional.normalize(torch.tensor(axis, dtype=torch.float64), dim=-1)
    return matrix_from_quaternion(quaternion_from_axis_angle(direction, torch.tensor(angle_rad, dtype=torch.float64)))


@pytest.mark.parametrize("name", LENSES)
def test_the_widest_view_is_wholly_seen_and_shows_the_sky_where_it_is(name: str) -> None:
    lens = LENSES[name]
    view = pinhole_view(panorama(lens), lens)
    rays, _ = patch_rays(view.lens, (view.lens.height, view.lens.width))
    expected = painted(rays).unflatten(0, (view.lens.height, view.lens.width))
    assert (view.frames[0].int() - expected.int()).abs().max() <= 3


@given(st.sampled_from(sorted(LENSES)), st.floats(-0.25, 0.25), st.floats(-0.2, 0.2), st.floats(-0.5, 0.5))
def test_a_turned_view_shows_what_lies_there(name: str, yaw: float, pitch: float, roll: float) -> None:
    lens = LENSES[name]
    camera_from_view = turn([0, 1, 0], yaw) @ turn([1, 0, 0], pitch) @ turn([0, 0, 1], roll)
    view = pinhole_view(panorama(lens), lens, Pinhole(80, 80, 20, 12, 40, 24), camera_from_view)
    rays, _ = patch_rays(view.lens, (24, 40))
    expected = painted(rays @ camera_from_view.mT).unflatten(0, (24, 40))
    black = (view.frames[0] == 0).all(dim=-1)
    assert (view.frames[0].int() - expected.int()).abs()[~black].max() <= 4
    assert not black[12, 20]


def test_a_zoom_becomes_one_pinhole() -> None:
    view = pinhole_view(panorama(ZOOM, 3), ZOOM)
    assert len(view.lens.batch_shape) == 0
    rays, _ = patch_rays(view.lens, (view.lens.height, view.lens.width))
    expected = painted(rays).unflatten(0, (view.lens.height, view.lens.width)).int()
    assert (view.frames.int() - expected).abs().max() <= 3


def test_frames_of_one_pinhole_stay_as_they_are() -> None:
    frames, lens = panorama(LENSES["pinhole"]), LENSES["pinhole"]
    view = pinhole_view(frames, lens)
    assert view.frames is frames
    assert view.lens is lens


def test_pixels_outside_the_lens_are_black() -> None:
    lens = Pinhole(100, 100, 40, 24, 80, 48)
    view = pinhole_view(panorama(lens), lens, Pinhole(100, 100, 80, 24, 160, 48))
    assert (view.frames[0, :, :40] == 0).all()
    assert (view.frames[0, :, -40:] == 0).all()
    assert (view.frames[0, :, 45:-45] > 0).all()


def test_a_view_is_no_wider_than_it_should_be_and_no_narrower_than_it_could_be() -> None:
    fisheye = widest_pinhole(LENSES["fisheye"], torch.eye(3, dtype=torch.float64))
    assert math.isclose(2 * math.degrees(math.atan(fisheye.width / 2 / float(fisheye.fx))), MAX_FOV_DEG, abs_tol=1.0)
    centred = Pinhole(120.0, 120.0, 128.0, 72.0, 256, 144)
    same = widest_pinhole(centred, torch.eye(3, dtype=torch.float64))
    assert 0.95 < same.width / float(same.fx) / (256 / 120) <= 1.0
    near_right = widest_pinhole(replace(centred, cx=156.0), torch.eye(3, dtype=torch.float64))
    assert 0.95 < near_right.width / 2 / float(near_right.fx) / (100 / 120) <= 1.0
    near_bottom = widest_pinhole(replace(centred, cy=100.0), torch.eye(3, dtype=torch.float64))
    assert 0.95 < near_bottom.height / 2 / float(near_bottom.fy) / (44 / 120) <= 1.0


@pytest.mark.parametrize(
    ("lens_px", "view_px"), [([100.0], 200.0), ([200.0], 300.0), ([400.0], 400.0), ([500.0, 400.0], 400.0)]
)
def test_a_view_is_as_fine_as_the_coarsest_lens_or_up_to_twice_as_fine(lens_px: list[float], view_px: float) -> None:
    focal_px = torch.tensor(lens_px, dtype=torch.float64)
    view = widest_pinhole(Pinhole(focal_px, focal_px, 128.0, 72.0, 256, 144), torch.eye(3, dtype=torch.float64))
    assert float(view.fx) == float(view.fy) == pytest.approx(view_px)


def test_poses_of_a_turned_view_become_poses_of_the_camera() -> None:
    lens = LENSES["fisheye"]
    camera_from_view = turn([1, 2, 3], 0.3)
    view = pinhole_view(panorama(lens, 4), lens, camera_from_view=camera_from_view)
    world_from_camera = random_poses(4)
    world_from_view = world_from_camera @ rigid(camera_from_view, torch.zeros(3, dtype=torch.float64))
    valid = torch.tensor([True, True, False, True])
    restored = view.restored(PoseEstimate(world_from_view, valid, False, "a view"))
    error = inverse(restored.world_from_camera) @ world_from_camera - torch.eye(4, dtype=torch.float64)
    assert error[valid].abs().max() < 1e-12
    assert torch.equal(restored.world_from_camera[2], torch.eye(4, dtype=torch.float64))


def test_a_view_into_the_void_is_refused() -> None:
    lens = LENSES["pinhole"]
    with pytest.raises(ValueError, match="camera_from_view"):
        pinhole_view(panorama(lens), lens, camera_from_view=turn([0, 1, 0], math.pi))
