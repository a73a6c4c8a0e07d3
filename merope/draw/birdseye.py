"""Camera paths seen from above, as inline SVG for pages and as pixels beside video frames.

Both pictures are drawn from one list of marks. The plane is the first camera's x (right) and z (forward); forward is
up, and both axes have one scale. The first path is solid, the others are dashed, as in the paper's figures of commanded
and recovered paths.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.poses import check_rigid, relative

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

PATH_COLOURS = ("#c87800", "#008fb3", "#b5479b", "#3f8f3f", "#7462cf", "#b0492f")
INK, GRID, PAPER = "#4a5560", "#dde2e7", "#ffffff"
MARGIN_PX = 14
LINE_PX = 15  # a line of the legend
FOOT_PX = 20  # below the plot, for the scale bar
FONT_PX = 11
GRID_SPACING_PX = 34  # at least
HEADINGS = 7  # arrowheads per path
ARROW_PX, ARROW_HALF_RAD = 7.0, math.radians(30.0)
SMOOTHING = 3  # supersampling of the pixels

Point = tuple[float, float]  # px, x right, y down


@dataclass(frozen=True)
class Stroke:
    """Lines through points, drawn alike."""

    lines: Sequence[Sequence[Point]]
    colour: str
    width_px: float
    dash_px: float = 0.0  # length of dashes and gaps; 0: solid


@dataclass(frozen=True)
class Dot:
    """A disc, or a ring around the colour of the paper."""

    centre: Point
    radius_px: float
    colour: str
    filled: bool


@dataclass(frozen=True)
class Label:
    """A line of text that begins at a point and is centred on it vertically."""

    start: Point
    text: str


Mark = Stroke | Dot | Label


@dataclass(frozen=True)
class View:
    """Where a point of the ground lies in the picture, and the part of the picture that shows ground."""

    left: float
    top: float
    right: float
    bottom: float
    middle_m: Point  # x right, z forward; in the middle of the plot
    px_per_m: float

    def pixel(self, right_m: float, ahead_m: float) -> Point:
        x = (self.left + self.right) / 2 + (right_m - self.middle_m[0]) * self.px_per_m
        y = (self.top + self.bottom) / 2 - (ahead_m - self.middle_m[1]) * self.px_per_m
        return x, y

    @property
    def grid_m(self) -> float:
        """1, 2 or 5 times a power of ten."""
        least = GRID_SPACING_PX / self.px_per_m
        power = 10.0 ** math.floor(math.log10(least))
        return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


def birdseye_svg(
    paths: Mapping[str, Tensor],  # name -> [T, 4, 4] world_from_camera, each with its own T
    size_px: int = 240,
    unit: str = "m",
) -> str:
    """Paths from above as one SVG element to put into a page.

    All paths are shown relative to the first camera of the first one, so they must share a world. Colours are
    attributes, and classes (`path-0`, `path-1`, …, `grid`, `ink`) let a page's style overrule them.
    """
    ground = _on_the_ground(paths)
    view = _fit(ground, size_px, size_px)
    body = "".join(_svg(mark) for mark in _marks(ground, view, None, unit))
    words = escape(_words(ground, unit))
    return (
        f'<svg class="birdseye" role="img" aria-label="{words}" viewBox="0 0 {size_px} {size_px}" '
        f'width="{size_px}" height="{size_px}" xmlns="http://www.w3.org/2000/svg" '
        f'fill="none" stroke-linejoin="round" font-family="system-ui, sans-serif" font-size="{FONT_PX}">{body}</svg>'
    )


def birdseye_image(
    paths: Mapping[str, Tensor],  # name -> [T, 4, 4] world_from_camera, each with its own T
    height: int,
    width: int,
    frame: int | None = None,
    unit: str = "m",
) -> Tensor:  # uint8 [H, W, 3]
    """The same picture as pixels; with `frame` a dot shows where each path is at that frame (or where it ended)."""
    from PIL import Image, ImageDraw

    ground = _on_the_ground(paths)
    view = _fit(ground, height, width)
    large = Image.new("RGB", (width * SMOOTHING, height * SMOOTHING), PAPER)
    draw = ImageDraw.Draw(large)
    for mark in _marks(ground, view, frame, unit):
        _paint(draw, mark)
    small = large.resize((width, height), Image.Resampling.BOX)
    return torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).reshape(height, width, 3)


def _on_the_ground(paths: Mapping[str, Tensor]) -> dict[str, Tensor]:  # [T, 4]: x, z in metres, heading x, z (unit)
    if not paths:
        raise invalid("paths", "at least one path", "none", "pass a name and its poses")
    checked = {name: check_rigid(poses, f"paths[{name!r}]") for name, poses in paths.items()}
    for name, poses in checked.items():
        if poses.ndim != 3 or poses.shape[0] == 0:
            raise invalid(f"paths[{name!r}]", "[T, 4, 4] with T ≥ 1", list(poses.shape), "pass one path per name")
    first = next(iter(checked.values()))[0]
    local = {name: relative(first.to(poses.device), poses).cpu() for name, poses in checked.items()}
    return {name: torch.cat((poses[:, [0, 2], 3], poses[:, [0, 2], 2]), dim=-1) for name, poses in local.items()}


def _fit(ground: Mapping[str, Tensor], height: int, width: int) -> View:
    """The largest view that holds every path between legend and scale bar."""
    left, right = float(MARGIN_PX), float(width - MARGIN_PX)
    top, bottom = MARGIN_PX / 2 + LINE_PX * len(ground) + ARROW_PX, float(height - FOOT_PX - MARGIN_PX)
    if right - left < GRID_SPACING_PX or bottom - top < GRID_SPACING_PX:
        needed = f"at least {height - bottom + top + GRID_SPACING_PX:.0f} × {2 * MARGIN_PX + GRID_SPACING_PX} px"
        raise invalid("size", f"{needed} for {len(ground)} paths", f"{height} × {width}", "draw it larger")
    centres = torch.cat([points[:, :2] for points in ground.values()])
    low, high = centres.amin(0), centres.amax(0)
    extent_x, extent_z = (high - low).tolist()
    scales = [px / m for px, m in ((right - left, extent_x), (bottom - top, extent_z)) if m > 0]
    px_per_m = min(scales, default=float(GRID_SPACING_PX))  # nothing moves: a grid of one metre
    middle_x, middle_z = ((low + high) / 2).tolist()
    return View(left, top, right, bottom, (middle_x, middle_z), px_per_m)


def _marks(ground: Mapping[str, Tensor], view: View, frame: int | None, unit: str) -> Iterator[Mark]:
    """Everything in the picture, back to front."""
    yield from _grid(view)
    for index, points in enumerate(ground.values()):
        yield from _path(points.tolist(), view, index)
    yield Dot(view.pixel(0.0, 0.0), 4.0, INK, filled=False)
    if frame is not None:
        for index, points in enumerate(ground.values()):
            right_m, ahead_m = points[min(frame, len(points) - 1), :2].tolist()
            yield Dot(view.pixel(right_m, ahead_m), 4.5, _colour(index), filled=True)
    for index, name in enumerate(ground):
        y = MARGIN_PX / 2 + LINE_PX * (index + 0.5)
        yield Stroke([[(view.left, y), (view.left + 24, y)]], _colour(index), 2.5, _dash(index))
        yield Label((view.left + 31, y), name)
    yield from _scale_bar(view, unit)


def _grid(view: View) -> Iterator[Mark]:
    half_x, half_z = (view.right - view.left) / view.px_per_m / 2, (view.bottom - view.top) / view.px_per_m / 2
    rights_m = _multiples(view.grid_m, view.middle_m[0] - half_x, view.middle_m[0] + half_x)
    aheads_m = _multiples(view.grid_m, view.middle_m[1] - half_z, view.middle_m[1] + half_z)
    columns = [view.pixel(right_m, 0.0)[0] for right_m in rights_m]
    rows = [view.pixel(0.0, ahead_m)[1] for ahead_m in aheads_m]
    upright = [[(x, view.top), (x, view.bottom)] for x in columns]
    level = [[(view.left, y), (view.right, y)] for y in rows]
    yield Stroke(upright + level, GRID, 1.0)


def _multiples(step: float, low: float, high: float) -> list[float]:
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _path(points: list[list[float]], view: View, index: int) -> Iterator[Mark]:
    """The line and a few arrowheads that point where the camera looks."""
    centres = [view.pixel(right_m, ahead_m) for right_m, ahead_m, _, _ in points]
    yield Stroke([centres], _colour(index), 2.5, _dash(index))
    arrows = []
    for k in sorted({round(i * (len(points) - 1) / (HEADINGS - 1)) for i in range(HEADINGS)}):
        _, _, look_right, look_ahead = points[k]
        if math.hypot(look_right, look_ahead) > 1e-3:  # looking straight up or down has no heading
            back_rad = math.atan2(look_right, look_ahead) + math.pi
            x, y = centres[k]
            sides = (back_rad - ARROW_HALF_RAD, back_rad + ARROW_HALF_RAD)
            a, b = ((x + ARROW_PX * math.sin(side), y - ARROW_PX * math.cos(side)) for side in sides)
            arrows.append([a, (x, y), b])
    yield Stroke(arrows, _colour(index), 1.6)


def _scale_bar(view: View, unit: str) -> Iterator[Mark]:
    y, end = view.bottom + FOOT_PX, view.left + view.grid_m * view.px_per_m
    yield Stroke([[(view.left, y - 3), (view.left, y), (end, y), (end, y - 3)]], INK, 1.5)
    yield Label((end + 6, y - 2), f"{view.grid_m:g} {unit}")


def _colour(index: int) -> str:
    return PATH_COLOURS[index % len(PATH_COLOURS)]


def _dash(index: int) -> float:
    return 0.0 if index == 0 else 5.0


def _words(ground: Mapping[str, Tensor], unit: str) -> str:
    """The picture for those who cannot see it."""
    parts = []
    for name, points in ground.items():
        right_m, ahead_m, look_right, look_ahead = points[-1].tolist()
        heading_deg = math.degrees(math.atan2(look_right, look_ahead))
        parts.append(
            f"{name}: {len(points)} frames, ends {abs(ahead_m):.3g} {unit} {'ahead' if ahead_m >= 0 else 'behind'} and "
            f"{abs(right_m):.3g} {unit} to the {'right' if right_m >= 0 else 'left'}, heading "
            f"{abs(heading_deg):.0f}° {'right' if heading_deg >= 0 else 'left'}"
        )
    return f"Paths seen from above. {'; '.join(parts)}."


def _css_class(colour: str) -> str:
    names = {INK: "ink", GRID: "grid"}
    return names[colour] if colour in names else f"path-{PATH_COLOURS.index(colour)}"


def _svg(mark: Mark) -> str:
    if isinstance(mark, Label):
        x, y = mark.start
        return f'<text class="ink" x="{x:.1f}" y="{y:.1f}" dy=".35em" fill="{INK}">{escape(mark.text)}</text>'
    look = f'class="{_css_class(mark.colour)}" stroke="{mark.colour}"'
    if isinstance(mark, Dot):
        x, y = mark.centre
        fill = mark.colour if mark.filled else PAPER
        return f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="{mark.radius_px:g}" fill="{fill}" stroke-width="2"/>'
    d = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line) for line in mark.lines)
    dashes = f' stroke-dasharray="{mark.dash_px:g}"' if mark.dash_px else ""
    return f'<path {look} d="{d}" stroke-width="{mark.width_px:g}"{dashes}/>'


def _paint(draw: "ImageDraw", mark: Mark) -> None:
    from PIL import ImageFont

    if isinstance(mark, Label):
        x, y = mark.start
        font = ImageFont.load_default(FONT_PX * SMOOTHING)
        draw.text((x * SMOOTHING, y * SMOOTHING), mark.text, fill=INK, font=font, anchor="lm")
    elif isinstance(mark, Dot):
        centre = (mark.centre[0] * SMOOTHING, mark.centre[1] * SMOOTHING)
        fill = mark.colour if mark.filled else PAPER
        draw.circle(centre, mark.radius_px * SMOOTHING, fill=fill, outline=mark.colour, width=2 * SMOOTHING)
    else:
        width = max(round(mark.width_px * SMOOTHING), 1)
        for line in mark.lines:
            for piece in _dashes(line, mark.dash_px) if mark.dash_px else [line]:
                pixels = [(x * SMOOTHING, y * SMOOTHING) for x, y in piece]
                draw.line(pixels, fill=mark.colour, width=width, joint="curve")


def _dashes(line: Sequence[Point], dash_px: float) -> Iterator[list[Point]]:
    """The drawn pieces of a dashed line; Pillow has no dashes of its own."""
    line = [line[0], *(b for a, b in pairwise(line) if a != b)]
    steps = [math.dist(a, b) for a, b in pairwise(line)]
    along = [0.0, *accumulate(steps)]

    def at(distance: float) -> Point:
        k = min(bisect_right(along, distance), len(steps)) - 1
        share = (distance - along[k]) / steps[k]
        (x0, y0), (x1, y1) = line[k], line[k + 1]
        return x0 + (x1 - x0) * share, y0 + (y1 - y0) * share

    for k in range(math.ceil(along[-1] / (2 * dash_px))):
        start, end = 2 * k * dash_px, min((2 * k + 1) * dash_px, along[-1])
        corners = [point for point, distance in zip(line, along, strict=True) if start < distance < end]
        yield [at(start), *corners, at(end)]
