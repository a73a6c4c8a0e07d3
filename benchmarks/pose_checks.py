"""How often `validate` finds a wrong convention: the numbers of docs/formats.md.

    python benchmarks/pose_checks.py [--drives 300] [--formats [NAME ...]]

Random drives of 49 frames at 12 and 30 Hz, with and without times: as they are, inverted, with OpenGL axes, with axes
of a vehicle, and in centimetres. A good path should draw no finding, a harmed one at least one. Then the limits of what
can be told without times: drives at 60 Hz in centimetres, key frames at 2 Hz; and a minute of real highway (comma2k19)
in pieces. With --formats every drive at 12 Hz goes through a file of each of these formats, or of all, first.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from merope.formats import FORMATS, read, validate, write
from merope.formats.trajectory import Trajectory
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import VEHICLE_FROM_CAMERA, inverse, relative, rigid
from merope.geometry.quaternions import matrix_from_quaternion
from merope.geometry.trajectories import driving_path

HIGHWAY = Path(__file__).parents[1] / "tests" / "data" / "comma2k19"
FLIP = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64))
HARMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda poses: poses,
    "inverted": inverse,
    "OpenGL axes": lambda poses: poses @ FLIP,
    "axes of a vehicle": lambda poses: poses @ inverse(VEHICLE_FROM_CAMERA),
    "centimetres": lambda poses: rigid(poses[:, :3, :3], 100 * poses[:, :3, 3]),
}

LENS = Pinhole(500.0, 500.0, 416.0, 240.0, 832, 480)
SIZE: dict[str, Any] = {"image_size": (LENS.width, LENS.height)}
BODY: dict[str, Any] = {"body_from_camera": torch.eye(4)}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # to write, to read
    "euroc": (BODY, BODY),
    **dict.fromkeys(("re10k", "blender", "panshot"), ({}, SIZE)),
}
IN_FILES = tuple(name for name in FORMATS if name != "keys")  # keys hold drives that go straight ahead, and no others


def found(harm: str, drives: int, rate_hz: float, with_times: bool) -> int:
    """Drives with at least one finding."""
    times_s = torch.arange(49, dtype=torch.float64) / rate_hz if with_times else None
    count = 0
    for seed in range(drives):
        poses = HARMS[harm](driving_path(49, rate_hz, torch.Generator().manual_seed(seed), prefix=9))
        count += bool(validate(Trajectory(poses, True, harm, times_s)))
    return count


def found_in_files(format: str, harm: str, drives: int, folder: Path) -> int:
    """Drives with at least one finding, after a file of the format. The caller says that the unit is the metre."""
    count, names = 0, tuple(f"{frame:06d}.png" for frame in range(49))
    to_write, to_read = OPTIONS.get(format, ({}, {}))
    for seed in range(drives):
        poses = HARMS[harm](driving_path(49, 12.0, torch.Generator().manual_seed(seed), prefix=9))
        times_s = torch.arange(49, dtype=torch.float64) / 12.0
        write(Trajectory(poses, True, harm, times_s, LENS, names), folder / format, format, **to_write)
        count += bool(validate(read(folder / format, format, is_metric=True, **to_read)))
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
    parser.add_argument("--formats", nargs="*", choices=IN_FILES, help="through files of these formats, or of all")
    options = parser.parse_args()
    drives = options.drives
    print(f"drives with a finding, of {drives}")
    if options.formats is not None:
        with tempfile.TemporaryDirectory() as folder:
            for format in options.formats or IN_FILES:
                counts = (f"{harm} {found_in_files(format, harm, drives, Path(folder))}" for harm in HARMS)
                print(f"{format}: {', '.join(counts)}", flush=True)
        return
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
