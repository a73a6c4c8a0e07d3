"""Paths from above: where points land, in SVG and in pixels, and what the picture says in words."""

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import curved_drive, random_rotations, straight_drive
from torch import Tensor

from merope.draw.birdseye import GRID_SPACING_PX, PATH_COLOURS, _dashes, birdseye_image, birdseye_svg
from merope.geometry.poses import rigid
from merope.geometry.trajectories import turn_by

SVG = "{http://www.w3.org/2000/svg}"


def lines_of(svg: str, css_class: str) -> list[list[list[tuple[float, float]]]]:
    """The points of every <path> of a class, line by line."""
    found = []
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        if path.get("class") == css_class:
            lines = [line for line in path.attrib["d"].split("M") if line]
            found.append([[tuple(map(float, point.split())) for point in line.split("L")] for line in lines])
    return found


def drawn_path(svg: str, index: int) -> Tensor:  # [T, 2] px
    return torch.tensor(lines_of(svg, f"path-{index}")[0][0], dtype=torch.float64)


def right_and_ahead(*places_m: tuple[float, float]) -> Tensor:  # [T, 4, 4]
    centres = torch.tensor([(right, 0.0, ahead) for right, ahead in places_m], dtype=torch.float64)
    return rigid(torch.eye(3, dtype=torch.float64).expand(len(places_m), 3, 3), centres)


def test_forward_is_up_right_is_right_and_both_have_one_scale() -> None:
    path = drawn_path(birdseye_svg({"a": right_and_ahead((0, 0), (0, 8), (6, 8))}), 0)
    (ahead_x, ahead_y), (right_x, right_y) = path.diff(dim=0).tolist()
    assert ahead_x == pytest.approx(0.0)
    assert ahead_y < -50
    assert right_y == pytest.approx(0.0)
    assert right_x / -ahead_y == pytest.approx(6 / 8, rel=0.01)


@pytest.mark.parametrize(("yaw_rad", "side"), [(0.6, 1.0), (-0.6, -1.0)])
def test_a_right_turn_is_drawn_to_the_right(yaw_rad: float, side: float) -> None:
    path = drawn_path(birdseye_svg({"a": turn_by(straight_drive(20), yaw_rad, 5)}), 0)
    assert side * float(path[-1, 0] - path[0, 0]) > 10


@given(seed=st.integers(0, 1000), far_m=st.sampled_from([0.0, 1e3, 6.4e6]))
def test_the_picture_does_not_depend_on_the_world_frame(seed: int, far_m: float) -> None:
    paths = {"a": curved_drive(9), "b": straight_drive(9)}
    moved_world = rigid(random_rotations(seed=seed), torch.full((3,), far_m, dtype=torch.float64))
    here = birdseye_svg(paths)
    there = birdseye_svg({name: moved_world @ poses for name, poses in paths.items()})
    for index in (0, 1):
        assert (drawn_path(here, index) - drawn_path(there, index)).abs().max() < 0.15


@given(
    extent_m=st.floats(1e-4, 1e5),
    angle_rad=st.floats(-math.pi, math.pi),
    size_px=st.integers(120, 600),
)
def test_everything_is_inside_and_the_scale_bar_is_true(extent_m: float, angle_rad: float, size_px: int) -> None:
    end = (extent_m * math.sin(angle_rad), extent_m * math.cos(angle_rad))
    svg = birdseye_svg({"a": right_and_ahead((0, 0), end)}, size_px)
    path = drawn_path(svg, 0)
    assert path.min() >= 0
    assert path.max() <= size_px
    px_per_m = float((path[1] - path[0]).norm()) / extent_m
    bar = lines_of(svg, "ink")[-1][0]
    label = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")][-1]
    length_m = float(label.removesuffix(" m"))
    assert bar[2][0] - bar[1][0] == pytest.approx(length_m * px_per_m, abs=0.4, rel=0.01)
    assert re.fullmatch(r"[125]", f"{length_m:e}"[0])
    assert GRID_SPACING_PX - 0.4 < bar[2][0] - bar[1][0] < 2.5 * GRID_SPACING_PX + 0.4  # 5 is 2.5 times 2
    columns = sorted({round(line[0][0], 1) for line in lines_of(svg, "grid")[0] if line[0][0] == line[1][0]})
    for a, b in pairwise(columns):
        assert b - a == pytest.approx(length_m * px_per_m, abs=0.4, rel=0.01)


def test_first_path_is_solid_and_the_others_are_dashed() -> None:
    root = ElementTree.fromstring(birdseye_svg({"a": straight_drive(3), "b": curved_drive(3)}))
    paths = {name: [p for p in root.iter(f"{SVG}path") if p.get("class") == name] for name in ("path-0", "path-1")}
    assert paths["path-0"][0].get("stroke-dasharray") is None
    assert paths["path-1"][0].get("stroke-dasharray") is not None


def test_dashes_go_to_the_end_and_around_corners() -> None:
    corner = [(0.0, 0.0), (12.0, 0.0), (12.0, 12.0)]
    assert list(_dashes(corner, 5.0)) == [
        [(0.0, 0.0), (5.0, 0.0)],
        [(10.0, 0.0), (12.0, 0.0), (12.0, 3.0)],
        [(12.0, 8.0), (12.0, 12.0)],
    ]


def test_arrowheads_point_where_the_camera_looks() -> None:
    """Driving ahead while looking right: barbs lie to the left of their tips."""
    c, s = 0.0, 1.0
    right = torch.tensor([[c, 0, s], [0, 1, 0], [-s, 0, c]], dtype=torch.float64)
    path = straight_drive(5)
    path[1:, :3, :3] = right
    arrows = lines_of(birdseye_svg({"a": path}), "path-0")[1]
    (left_barb, tip, right_barb) = arrows[-1]
    assert left_barb[0] < tip[0] - 3
    assert right_barb[0] < tip[0] - 3
    assert left_barb[1] + right_barb[1] == pytest.approx(2 * tip[1], abs=0.2)


def test_words_and_legend_are_escaped() -> None:
    name = '<b>"7" & more</b>'
    root = ElementTree.fromstring(birdseye_svg({name: right_and_ahead((0, 0), (-3, 12))}))
    assert root.get("role") == "img"
    assert "ends 12 m ahead and 3 m to the left" in root.attrib["aria-label"]
    assert name in root.attrib["aria-label"]
    assert name in [text.text for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(("yaw_rad", "words"), [(0.6, "heading 34° right"), (-0.6, "heading 34° left")])
def test_words_say_where_the_camera_looks_in_the_end(yaw_rad: float, words: str) -> None:
    root = ElementTree.fromstring(birdseye_svg({"a": turn_by(straight_drive(20), yaw_rad, 5)}))
    assert words in root.attrib["aria-label"]


@pytest.mark.parametrize("path", [straight_drive(1), straight_drive(4, step_m=0.0), straight_drive(3, step_m=1e-9)])
def test_paths_without_extent_are_drawn(path: Tensor) -> None:
    assert torch.isfinite(drawn_path(birdseye_svg({"a": path, "b": path}), 0)).all()
    assert birdseye_image({"a": path, "b": path}, 160, 160, frame=0).shape == (160, 160, 3)


def near(image: Tensor, colour: str) -> Tensor:  # uint8 [H, W, 3] -> bool [H, W]
    rgb = torch.tensor([int(colour[k : k + 2], 16) for k in (1, 3, 5)])
    return (image.to(torch.int64) - rgb).abs().amax(-1) < 12


def test_pixels_and_svg_agree() -> None:
    paths = {"a": curved_drive(12), "b": straight_drive(12)}
    image = birdseye_image(paths, 200, 200)
    assert image.dtype == torch.uint8
    for index in (0, 1):
        coloured = near(image, PATH_COLOURS[index]).nonzero().double()[:, [1, 0]] + 0.5
        path = drawn_path(birdseye_svg(paths, 200), index)
        distance = torch.cdist(path[2:], coloured).amin(1)
        assert distance.max() < (2.5 if index == 0 else 8.0)  # a point may fall into a gap between dashes


@pytest.mark.parametrize("frame", [0, 7, 11, 99])
def test_the_marker_is_at_the_frame_or_at_the_end(frame: int) -> None:
    paths = {"a": curved_drive(12)}
    changed = (birdseye_image(paths, 220, 220, frame) != birdseye_image(paths, 220, 220)).any(-1)
    expected = drawn_path(birdseye_svg(paths, 220), 0)[min(frame, 11)]
    rows, columns = changed.nonzero().double().unbind(1)
    assert columns.min() + 0.5 == pytest.approx(float(expected[0]), abs=6)
    assert rows.max() + 0.5 == pytest.approx(float(expected[1]), abs=6)
    assert changed.sum() < 150


def test_a_wide_image_is_filled_by_its_shorter_side() -> None:
    image = birdseye_image({"a": straight_drive(9)}, 150, 400)
    assert image.shape == (150, 400, 3)
    rows = near(image, PATH_COLOURS[0])[30:].nonzero()[:, 0]
    assert rows.max() - rows.min() > 60


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ({}, "at least one path"),
        ({"a": torch.eye(4, dtype=torch.float64)}, r"\[T, 4, 4\]"),
        ({"a": torch.full((2, 4, 4), math.nan, dtype=torch.float64)}, "finite"),
    ],
)
def test_what_is_no_path_is_refused(paths: dict[str, Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        birdseye_svg(paths)


def test_too_small_a_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="draw it larger"):
        birdseye_image({"a": straight_drive(3)}, 60, 60)
