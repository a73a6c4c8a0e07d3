"""What the given frames had shown of a later frame's surfaces."""

import math

import pytest
import torch
from torch import Tensor

from merope.evaluate.seen_before import seen_before, shown_by_references_alone
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import picked
from merope.geometry.lenses import Lens, Pinhole
from merope.geometry.trajectories import turn_by
from merope.world.render import render
from merope.world.scene import World

LENS, SIZE, GIVEN = Pinhole(90.0, 90.0, 64.0, 36.0, 128, 72), (72, 128), 2


def shares(path: Tensor) -> list[float]:
    """Of a path through a street in which nothing stands in the way."""
    cameras = Cameras(path, LENS)
    world = World(100_004).cleared(path[None])
    return seen_before(render(world, cameras, *SIZE), cameras, GIVEN).tolist()


def ahead(metres: list[float]) -> Tensor:  # [T, 4, 4]
    path = torch.eye(4, dtype=torch.float64).repeat(len(metres), 1, 1)
    path[:, 2, 3] = torch.tensor(metres, dtype=torch.float64)
    return path


def test_who_stands_still_sees_what_was_given() -> None:
    assert min(shares(ahead([0.0] * 4))) > 0.99


def test_who_turns_away_sees_nothing_of_it() -> None:
    path = turn_by(ahead([0.0] * 5), math.radians(120.0), GIVEN)
    found = shares(path)
    assert found[0] > 0.99
    assert found[-1] == 0.0
    assert sorted(found, reverse=True) == pytest.approx(found)


def test_what_was_far_away_was_not_seen_well() -> None:
    """Whoever goes ahead sees nothing that was hidden, but the road before the wheels was small in the given frames."""
    near, far = shares(ahead([0.0, 0.0, 0.5]))[-1], shares(ahead([0.0, 0.0, 12.0]))[-1]
    assert near > 0.9
    assert far < 0.6


def test_references_alone_show_what_comes_after_a_turn() -> None:
    path = turn_by(ahead([0.0] * 5), math.radians(120.0), GIVEN)
    cameras, world = Cameras(path, LENS), World(100_004).cleared(path[None])
    renders = render(world, cameras, *SIZE)

    def alone(there: int) -> Tensor:  # bool [T, H, W]
        """With the one reference that was taken where a frame is."""
        of_reference = cameras.at(slice(there, there + 1))
        return shown_by_references_alone(renders, cameras, GIVEN, render(world, of_reference, *SIZE), of_reference)

    is_surface = renders.depth_m.isfinite()[:, 1::2, 1::2]
    turned = alone(4)
    assert not turned[:GIVEN].any()
    assert not turned[renders.depth_m.isinf()].any()
    assert turned[4, 1::2, 1::2][is_surface[4]].double().mean() > 0.99
    assert turned[2].sum() < turned[3].sum() < turned[4].sum()
    assert not alone(0).any()  # it shows what the given frames show


@pytest.mark.parametrize("is_zoom", [False, True])
def test_several_frames_show_what_each_of_them_shows(is_zoom: bool) -> None:
    """All frames are asked at once: with several references a pixel counts that counts with any of them."""
    focal = torch.tensor([90.0, 100.0, 110.0, 80.0, 70.0], dtype=torch.float64)
    lens: Lens = Pinhole(focal, focal, 64.0, 36.0, 128, 72) if is_zoom else LENS
    path = turn_by(ahead([0.0, 1.0, 2.0, 3.0, 4.0]), math.radians(120.0), GIVEN)
    cameras, world = Cameras(path, lens), World(100_004).cleared(path[None])
    renders = render(world, cameras, *SIZE)

    def alone(there: list[int]) -> Tensor:  # bool [T, H, W]
        taken = Cameras(path[there], picked(lens, torch.tensor(there)))
        return shown_by_references_alone(renders, cameras, GIVEN, render(world, taken, *SIZE), taken)

    def differ(a: Tensor, b: Tensor) -> float:
        return float((a != b).double().mean())

    both, first, last = alone([2, 4]), alone([2]), alone([4])
    assert differ(both, first | last) < 1e-4  # a pixel on a threshold may fall to either side
    assert min(differ(both, first), differ(both, last)) > 1e-2
    assert not seen_before(renders, cameras, 0).any()
