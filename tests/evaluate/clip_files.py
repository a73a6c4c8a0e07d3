"""Small clips and their paths on disk, and what a run says of them."""

from pathlib import Path

import torch
from scenes import PINHOLE
from torch import Tensor

from merope import formats
from merope.evaluate.results import Results
from merope.formats.trajectory import Trajectory
from merope.formats.video import write_video

FRAMES = 7
GREY, BLACK, WHITE = 128, 0, 255


def write_path(file: Path, poses: Tensor) -> None:  # [T, 4, 4]
    file.parent.mkdir(parents=True, exist_ok=True)
    formats.write(Trajectory(poses, True, "made by a test", lens=PINHOLE), file)


def write_clip(file: Path, brightness: int = GREY, frames: int = FRAMES) -> None:
    write_video(torch.full((frames, 36, 64, 3), brightness, dtype=torch.uint8), file, 12.0)


def kinds(results: Results) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for problem in results.problems:
        found.setdefault(problem.clip, set()).add(problem.kind)
    return found


def outputs(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("results.json", "clips.csv", "report.html")}
