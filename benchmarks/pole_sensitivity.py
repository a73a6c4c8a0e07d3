"""How much MeRoPE's operators turn when a direction moves, near MinRot's pole: the plot of docs/conventions.md.

    python benchmarks/pole_sensitivity.py [--out docs/images/pole-sensitivity.png]

Left: a camera looks back at one that it has just passed, so that the epipole lies a small angle away from −z. The
epipole is moved by a little, and the turn of the ρ = 1 anchor is divided by it. 1 means: the anchor's frame follows the
epipole and no more. Anchors may have phases in place of frames. Right: the same for a key's own ray and the block that
relates rays: the paper's rotation block, or phases of directions in its place. Only lenses that see backwards have rays
there.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import merope
from merope.encodings.protocol import Encoding

RAY_ANGLES_DEG = (5.0, 20.0)
NUDGE = 1e-3  # of the angle to the pole
AHEAD = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
ANCHOR: dict[str, Any] = {"head_dim": 3, "partition": (3, 0, 0, 0), "fractions": (1.0,)}
RAYS: dict[str, Any] = {"head_dim": 36, "partition": (0, 36, 0, 0)}
STYLES = (("#c44e52", "-"), ("#55a868", "--"), ("#8da0cb", "-"), ("#4c72b0", "-"), ("#dd8452", "-."))  # of the curves
PHASES: dict[str, Any] = {"head_dim": 6, "partition": (6, 0, 0, 0), "anchor_scale": 12.5}


def operators(encoding: Encoding, rays: Tensor, centres_m: Tensor) -> Tensor:  # [n, 3], [n, 3] -> [n, d, d]
    """U between a camera at the origin that looks along its axis and keys' rays elsewhere, oriented like it."""
    poses = torch.eye(4, dtype=torch.float64).repeat(len(rays), 1, 1)
    angles_rad = torch.atan2(rays[:, :2].norm(dim=-1, keepdim=True), rays[:, 2:])
    places = angles_rad * torch.nn.functional.normalize(rays[:, :2], dim=-1)  # an equidistant lens sees all around
    lens = merope.KannalaBrandt(1.0, 1.0, *(0.5 - places).unbind(-1), 1, 1)
    query = merope.Cameras(poses[:1], merope.KannalaBrandt(1.0, 1.0, 0.5, 0.5, 1, 1))
    poses[:, :3, 3] = centres_m
    return encoding.plan(query, (1, 1), key=merope.Cameras(poses, lens)).operators(0)


def direction(angle_rad: float, azimuth_rad: Tensor, backward: bool) -> Tensor:  # [n] -> [n, 3]
    """Unit vectors at an angle from ±z."""
    sine, z = math.sin(angle_rad), -math.cos(angle_rad) if backward else math.cos(angle_rad)
    return torch.stack((sine * azimuth_rad.cos(), sine * azimuth_rad.sin(), torch.full_like(azimuth_rad, z)), dim=-1)


def worst_near_pole(
    pole_angle_deg: float,
    operators_of: Callable[[Tensor], Tensor],  # [n, 3] -> [n, d, d]
) -> float:
    """Largest turn of U per turn of a direction, over where that stands around −z and which way it moves."""
    angle, azimuth = math.radians(pole_angle_deg), torch.linspace(0, 2 * math.pi, 24, dtype=torch.float64)
    step = NUDGE * math.sin(angle)
    before = operators_of(direction(angle, azimuth, backward=True))
    moved = (direction(angle, azimuth + NUDGE, True), direction(angle + step, azimuth, True))
    changes = torch.stack([torch.linalg.matrix_norm(operators_of(there) - before, 2) for there in moved])
    return 2 * math.asin(min(1.0, float(changes.max()) / 2)) / step


def anchor_sensitivity(encoding: Encoding, pole_angle_deg: float, ray_angle_deg: float) -> float:
    """Of the anchor at the epipole, which moves, for a key's ray so far off the axis."""
    ray = direction(math.radians(ray_angle_deg), torch.zeros(1, dtype=torch.float64), backward=False)
    return worst_near_pole(
        pole_angle_deg, lambda epipoles: operators(encoding, ray.expand_as(epipoles), centres_m=epipoles)
    )


def ray_sensitivity(encoding: Encoding, pole_angle_deg: float) -> float:
    """Of the block that relates rays, when the key's ray moves."""
    return worst_near_pole(pole_angle_deg, lambda rays: operators(encoding, rays, AHEAD.expand_as(rays)))


def anchor_curves(angles_deg: list[float]) -> dict[str, list[float]]:
    """By what the legend says; but for transported frames they are the same for any ray."""
    paper = merope.encoding("merope", **ANCHOR)
    cases = {"merope, any ray": (paper, RAY_ANGLES_DEG[1])}
    cases["merope_phases, any ray"] = (merope.encoding("merope_phases", **ANCHOR), RAY_ANGLES_DEG[1])
    carried = merope.encoding("merope", **ANCHOR, anchor_frame="transport")
    cases |= {f"merope, transport, ray {a:g}° off the axis": (carried, a) for a in RAY_ANGLES_DEG}
    phases = merope.encoding("merope_phases", **(ANCHOR | PHASES))
    cases[f"merope_phases, anchor_scale {PHASES['anchor_scale']}, any ray"] = (phases, RAY_ANGLES_DEG[1])
    return {
        label: [anchor_sensitivity(encoding, angle_deg, ray_deg) for angle_deg in angles_deg]
        for label, (encoding, ray_deg) in cases.items()
    }


def ray_curves(angles_deg: list[float]) -> dict[str, list[float]]:
    encodings = {name: merope.encoding(name, **RAYS) for name in ("merope", "merope_phases")}
    return {name: [ray_sensitivity(encoding, a) for a in angles_deg] for name, encoding in encodings.items()}


def main() -> None:
    """Print the tables and draw the plots."""
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description="sensitivity of MeRoPE's operators near MinRot's pole")
    parser.add_argument("--out", type=Path, default=Path("docs/images/pole-sensitivity.png"))
    options = parser.parse_args()
    angles_deg = torch.logspace(-3, 1.6, 24, dtype=torch.float64).tolist()
    figure, axes = plt.subplots(1, 2, figsize=(12, 3.8), layout="constrained")
    panels = (
        ("Anchor of a camera that was just passed (ρ = 1)", "epipole", anchor_curves(angles_deg)),
        ("Block of rays, of a lens that sees backwards", "ray", ray_curves(angles_deg)),
    )
    for axis, (title, moved, curves) in zip(axes, panels, strict=True):
        print(title)
        for (label, values), style in zip(curves.items(), STYLES, strict=False):
            axis.loglog(angles_deg, values, style[1], color=style[0], label=label)
            some = list(zip(angles_deg, values, strict=True))[::5]
            print(f"  {label:<40}", " ".join(f"{a:.3g}°:{v:.3g}" for a, v in some))
        axis.set(title=title, xlabel=f"angle between the {moved} and MinRot's pole (degrees)")
        axis.set_ylabel(f"turn of U / turn of the {moved}")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(options.out, dpi=130)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
