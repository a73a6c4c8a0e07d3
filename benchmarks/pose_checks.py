"""How often `validate` finds a wrong convention: the numbers of docs/formats.md.

    python benchmarks/pose_checks.py [--drives 300]

Random drives of 49 frames at 12 and 30 Hz, with and without times: as they are, inverted, with OpenGL axes, and in
centimetres. A good path should draw no finding, a harmed one at least one.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from merope.data.formats import validate
from merope.data.trajectory import Trajectory
from merope.geometry.poses import inverse, rigid
from merope.geometry.trajectories import driving_path

FLIP = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64))
HARMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda poses: poses,
    "inverted": inverse,
    "OpenGL axes": lambda poses: poses @ FLIP,
    "centimetres": lambda poses: rigid(poses[:, :3, :3], 100 * poses[:, :3, 3]),
}


def found(harm: str, drives: int, rate_hz: float, with_times: bool) -> int:
    """Drives with at least one finding."""
    times_s = torch.arange(49, dtype=torch.float64) / rate_hz if with_times else None
    count = 0
    for seed in range(drives):
        poses = HARMS[harm](driving_path(49, rate_hz, torch.Generator().manual_seed(seed), prefix=9))
        count += bool(validate(Trajectory(poses, True, harm, times_s)))
    return count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="how often validate finds a wrong convention")
    parser.add_argument("--drives", type=int, default=300)
    drives = parser.parse_args().drives
    print(f"drives with a finding, of {drives}")
    for rate_hz in (12.0, 30.0):
        for with_times in (True, False):
            counts = ", ".join(f"{harm} {found(harm, drives, rate_hz, with_times)}" for harm in HARMS)
            print(f"{rate_hz:g} Hz, {'with' if with_times else 'without'} times: {counts}")


if __name__ == "__main__":
    main()
