"""How much an anchor frame turns when the epipole moves, near MinRot's pole: the plot of docs/conventions.md.

    python benchmarks/pole_sensitivity.py [--out docs/images/pole-sensitivity.png]

A camera looks back at one that it has just passed: the epipole lies a small angle away from −z. The epipole is moved by
a little, and the turn of the ρ = 1 anchor's frame is divided by it. 1 means: the frame follows the epipole and no more.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from merope.geometry.epipolar import anchor_directions, arc_turns, epipolar_arc
from merope.geometry.minrot import minrot, minrot_quaternion
from merope.geometry.quaternions import matrix_from_quaternion, multiply

RAY_ANGLES_DEG = (5.0, 20.0)
NUDGE = 1e-3  # of the angle to the pole


def anchor_frame(kind: str, ray: Tensor, epipole: Tensor) -> Tensor:  # [3, 3]
    """Frame of the ρ = 1 anchor of one key ray, cameras with equal orientation."""
    arc = epipolar_arc(ray, epipole)
    end = torch.ones(1, dtype=torch.float64)
    if kind == "minrot":
        return minrot(anchor_directions(arc, end))[0]
    return matrix_from_quaternion(multiply(arc_turns(arc, end), minrot_quaternion(ray)))[0]


def direction(angle_rad: float, azimuth_rad: float, backward: bool) -> Tensor:  # [3]
    """Unit vector at an angle from ±z."""
    sine = math.sin(angle_rad)
    z = -math.cos(angle_rad) if backward else math.cos(angle_rad)
    return torch.tensor([sine * math.cos(azimuth_rad), sine * math.sin(azimuth_rad), z], dtype=torch.float64)


def sensitivity(kind: str, pole_angle_deg: float, ray_angle_deg: float) -> float:
    """Largest turn of the frame per turn of the epipole, over where the epipole stands and which way it moves."""
    ray = direction(math.radians(ray_angle_deg), 0.0, backward=False)
    angle = math.radians(pole_angle_deg)
    step = NUDGE * math.sin(angle)
    ratios = []
    for azimuth in torch.linspace(0, 2 * math.pi, 24, dtype=torch.float64).tolist():
        before = anchor_frame(kind, ray, direction(angle, azimuth, backward=True))
        for moved in (direction(angle, azimuth + NUDGE, True), direction(angle + step, azimuth, True)):
            turn = before.mT @ anchor_frame(kind, ray, moved)
            skew = torch.stack((turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1])) / 2
            ratios.append(float(torch.asin(skew.norm().clamp(max=1))) / step)
    return max(ratios)


def main() -> None:
    """Print the table and draw the plot."""
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description="sensitivity of anchor frames near MinRot's pole")
    parser.add_argument("--out", type=Path, default=Path("docs/images/pole-sensitivity.png"))
    options = parser.parse_args()
    angles_deg = torch.logspace(-3, 1.6, 24, dtype=torch.float64).tolist()
    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    curves = [("minrot", RAY_ANGLES_DEG[1], "#c44e52", "MinRot, any ray")]
    curves += [
        ("transport", a, c, f"transport, ray {a:g}° off the axis")
        for a, c in zip(RAY_ANGLES_DEG, ("#8da0cb", "#4c72b0"), strict=True)
    ]
    for kind, ray_angle, colour, label in curves:
        values = [sensitivity(kind, angle, ray_angle) for angle in angles_deg]
        axis.loglog(angles_deg, values, color=colour, label=label)
        print(f"{label:<32}", " ".join(f"{a:.3g}°:{v:.3g}" for a, v in list(zip(angles_deg, values, strict=True))[::5]))
    axis.set(xlabel="angle between the epipole and MinRot's pole (degrees)", ylabel="frame turn / epipole turn")
    axis.set_title("Anchor frame of a camera that was just passed (ρ = 1)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(options.out, dpi=130)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
