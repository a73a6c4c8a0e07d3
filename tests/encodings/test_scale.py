"""The translation scale of a data set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import PINHOLE, random_poses, random_rotations, straight_drive
from torch import Tensor

from merope import GTA, Cameras
from merope.encodings.scale import translation_scale
from merope.geometry.poses import rigid


def test_known_trajectories() -> None:
    """8 m straight, 4 m there and half of it back, and a clip that stands: 1 / mean(8, 4, 0) = 1 / 4 m."""
    there_and_back = straight_drive(3, step_m=2.0)[[0, 1, 2, 1]]
    clips = [straight_drive(5, step_m=2.0), there_and_back, straight_drive(4, step_m=0.0)]
    assert translation_scale(clips) == pytest.approx(1 / 4, rel=1e-12)
    assert translation_scale(iter(clips)) == translation_scale(clips)
    assert translation_scale([clips[0].float(), *clips[1:]]) == pytest.approx(1 / 4, rel=1e-6)


@given(seed=st.integers(0, 10**6), factor=st.floats(1e-3, 1e3))
def test_scales_like_one_over_metres_and_ignores_the_world_frame(seed: int, factor: float) -> None:
    clips = random_poses(3, 4, seed=seed)
    scaled = rigid(clips[..., :3, :3], factor * clips[..., :3, 3])
    world = rigid(random_rotations(seed=seed + 1), random_poses(seed=seed + 2)[:3, 3])
    scale = translation_scale(clips)
    assert translation_scale(scaled) == pytest.approx(scale / factor, rel=1e-9)
    assert translation_scale(world @ clips) == pytest.approx(scale, rel=1e-9)


def test_with_it_a_lone_clip_reaches_exactly_1() -> None:
    clip = straight_drive(6, step_m=17.0)
    plan = GTA(translation_scale=translation_scale([clip])).plan(Cameras(clip, PINHOLE), (1, 1))
    assert float(plan.operators(0)[:, :3, 3].norm(dim=-1).max()) == pytest.approx(1, rel=1e-12)


def not_finite() -> list[Tensor]:
    clip = straight_drive(3)
    clip[1, 0, 3] = float("nan")
    return [straight_drive(3), clip]


@pytest.mark.parametrize(
    ("clips", "message"),
    [
        ([], "trajectories must be at least one clip"),
        ([straight_drive(3, step_m=0.0)] * 2, "trajectories must be clips of which some move, got .* 0 m over 2 clips"),
        (straight_drive(3), r"trajectories\[0\] must be \[T, 4, 4\].*got \[4, 4\]; .*\[poses\]"),
        ([straight_drive(3)[:0]], r"trajectories\[0\] must be .*T ≥ 1, got \[0, 4, 4\]"),
        (not_finite(), r"trajectories\[1\] must be finite"),
        ([straight_drive(3)[:, :3]], r"trajectories\[0\] must be .*append the row"),
    ],
)
def test_bad_trajectories_are_refused(clips: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translation_scale(clips)
