"""How often `validate` finds a wrong convention: the numbers of docs/formats.md.

    python benchmarks/pose_checks.py [--drives 300]

Random drives of 49 frames at 12 and 30 Hz, with and without times: as they are, inverted, with OpenGL axes, and in
centimetres. A good path should draw no finding, a harmed one at least one. Then the limits of what can be told without
times: drives at 60 Hz in centimetres, key frames at 2 Hz; and a minute of real highway (comma2k19) in pieces.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from merope.formats import validate
from merope.formats.trajectory import Trajectory
from merope.geometry.poses import inverse, relative, rigid
from merope.geometry.quaternions import matrix_from_quaternion
from merope.geometry.trajectories import driving_path

HIGHWAY = Path(__file__).parents[1] / "tests" / "data" / "comma2k19"
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


def highway() -> Tensor:  # [1200, 4, 4]
    """A minute of comma2k19 at 20 Hz."""
    positions, quaternions = (
        torch.from_numpy(np.load(HIGHWAY / f"frame_{name}.npy")) for name in ("positions", "orientations")
    )
    rotation = matrix_from_quaternion(torch.nn.functional.normalize(quaternions, dim=-1))
    return rigid(rotation[..., [1, 2, 0]], positions)


def found_on_highway(harm: str, every: int, count: int) -> tuple[int, int]:
    """Pieces of `count` frames without times, one frame in `every`: how many have a finding, and how many there are."""
    pieces = [piece for piece in highway()[::every].split(count) if len(piece) == count]
    local = [HARMS[harm](relative(piece[:1], piece)) for piece in pieces]
    return sum(bool(validate(Trajectory(poses, True, harm))) for poses in local), len(pieces)


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
    print(f"60 Hz, without times: centimetres {found('centimetres', drives, 60.0, with_times=False)}")
    print(f"2 Hz, without times: as it is {found('as it is', drives, 2.0, with_times=False)}")
    for every, count in ((1, 100), (10, 20)):
        counts = ", ".join("{} {} of {}".format(harm, *found_on_highway(harm, every, count)) for harm in HARMS)
        print(f"real highway at {20 / every:g} Hz, {count} frames, without times: {counts}")


if __name__ == "__main__":
    main()
