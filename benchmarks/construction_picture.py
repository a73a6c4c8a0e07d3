"""Draws how MeRoPE sees a key's ray from a query's camera (paper, Figure 2).

    python benchmarks/construction_picture.py [--out docs/images/construction.png]

Everything drawn is computed by the library: the arc, its anchors and their frames, and the phases of the metres between
the cameras.
"""

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from merope.encodings.merope import MeRoPE
from merope.geometry.epipolar import EpipolarArc, anchor_directions, epipolar_arc
from merope.geometry.minrot import minrot

KEY_CENTRE_M = torch.tensor([2.2, -0.4, 0.7], dtype=torch.float64)  # in the query camera's frame
KEY_RAY = torch.tensor([-0.45, -0.25, 1.0], dtype=torch.float64)  # the same, unnormalised
DEPTHS_M = torch.tensor([0.7, 1.5, 3.0], dtype=torch.float64)
LONGEST_M = 20.0
AXES = ("tab:red", "tab:green", "tab:blue")


def draw_plane(panel: plt.Axes, arc: EpipolarArc, fractions: Tensor) -> None:
    """The plane of both centres and the key's ray: depths become directions, from the epipole to u∞."""

    def flat(points: Tensor) -> list[Tensor]:  # [..., 3] -> two of [...], u∞ upwards
        return [(points * arc.tangent).sum(-1), (points * arc.far_direction).sum(-1)]

    points = KEY_CENTRE_M + DEPTHS_M[:, None] * arc.far_direction
    circle = torch.linspace(0, 2 * math.pi, 200)
    panel.plot(circle.cos(), circle.sin(), color="0.8", lw=0.8)
    ray = torch.stack((KEY_CENTRE_M, KEY_CENTRE_M + 3.4 * arc.far_direction))
    panel.plot(*flat(ray), color="tab:orange", lw=2)
    for point, depth_m in zip(points, DEPTHS_M.tolist(), strict=True):
        panel.plot(*flat(torch.stack((torch.zeros_like(point), point))), color="tab:orange", lw=0.8, ls=":")
        panel.plot(*flat(point), "o", color="tab:orange", ms=5)
        panel.annotate(f"{depth_m:g} m", flat(point), (6, -3), textcoords="offset points", fontsize=8)
    panel.plot(*flat(anchor_directions(arc, torch.linspace(0, 1, 60).double())), color="black", lw=2)
    for direction, fraction in zip(anchor_directions(arc, fractions), fractions.tolist(), strict=True):
        panel.plot(*flat(direction), "o", color="tab:blue", ms=6, zorder=3)
        name = {0.0: "0: infinity, u∞", 1.0: "1: epipole"}.get(fraction, f"{fraction:.2g}")
        place, side = flat((1.3 if fraction < 0.1 else 1.13) * direction), "left" if fraction > 0.0 else "right"
        panel.annotate(name, place, ha=side, va="center", fontsize=8, color="tab:blue")
    for centre, name in ((torch.zeros(3, dtype=torch.float64), "query camera"), (KEY_CENTRE_M, "key camera")):
        panel.plot(*flat(centre), "s", color="black", ms=7)
        panel.annotate(name, flat(centre), (0, -14), textcoords="offset points", ha="center", fontsize=9)
    panel.set_aspect("equal")
    panel.set(
        xlim=(-1.15, 2.9), ylim=(-1.15, 3.2), title="disparity: anchors on the arc from infinity to the key camera"
    )
    panel.set_axis_off()


def draw_frames(panel: plt.Axes, arc: EpipolarArc, fractions: Tensor) -> None:
    """The anchors' frames on the query camera's unit sphere: forward away from the reader, down is down."""

    def seen(points: Tensor) -> list[Tensor]:  # [..., 3] x right, y down, z forward
        return [points[..., 0], points[..., 2], -points[..., 1]]

    panel.plot(*seen(anchor_directions(arc, torch.linspace(0, 1, 60).double())), color="black", lw=2)
    for direction in anchor_directions(arc, fractions):
        for axis, colour in zip(minrot(direction).T, AXES, strict=True):
            start, step = seen(direction), seen(0.28 * axis)
            panel.quiver(*map(float, start), *map(float, step), color=colour, lw=1.6, arrow_length_ratio=0.2)
    panel.set(
        xlim=(-0.5, 1.2), ylim=(0.2, 1.4), zlim=(-0.5, 0.7), title="each anchor is a rotation: MinRot takes z to it"
    )
    panel.set_box_aspect((1.7, 1.2, 1.2), zoom=1.5)
    panel.view_init(elev=20, azim=-75)
    panel.set_axis_off()


def draw_phases(panel: plt.Axes, encoding: MeRoPE) -> None:
    """Cosines of the phases that metres along an axis turn pairs of channels by."""
    metres = torch.linspace(0, LONGEST_M, 2000, dtype=torch.float64)
    frequencies = encoding._angular_frequencies(metres)
    for number, frequency in enumerate(frequencies.tolist()):
        panel.plot(metres, (frequency * metres).cos() + 2.4 * number, color="tab:purple", lw=1.1)
        period = f"{2 * math.pi / frequency:.3g} m"
        panel.text(1.02 * LONGEST_M, 2.4 * number, period, fontsize=9, va="center")
    panel.set(xlabel="metres between the cameras, along one axis", yticks=[], xlim=(0, 1.2 * LONGEST_M))
    panel.set_title("translation: phases of four wavelengths")
    panel.spines[["top", "left", "right"]].set_visible(False)


def main() -> None:
    """Draw the three panels."""
    parser = argparse.ArgumentParser(description="draw how MeRoPE sees a key's ray")
    parser.add_argument("--out", type=Path, default=Path("docs/images/construction.png"))
    options = parser.parse_args()
    encoding = MeRoPE()
    arc = epipolar_arc(KEY_RAY / KEY_RAY.norm(), KEY_CENTRE_M)
    fractions = torch.tensor(encoding.fractions).double()
    plt.rcParams["axes.titlesize"] = 10
    figure = plt.figure(figsize=(14, 4.6), constrained_layout=True)
    draw_plane(figure.add_subplot(1, 3, 1), arc, fractions)
    draw_frames(figure.add_subplot(1, 3, 2, projection="3d"), arc, fractions)
    draw_phases(figure.add_subplot(1, 3, 3), encoding)
    figure.savefig(options.out, dpi=120)
    print("wrote", options.out)


if __name__ == "__main__":
    main()
