"""What the tests of `merope generate` start from."""

from pathlib import Path
from typing import Any

import torch
from tiny_pipelines import HEIGHT, WIDTH

from merope.formats.trajectory import Trajectory

FRAMES = 17
WEIGHTS = "diffusion_pytorch_model.safetensors"


def path_of(poses: torch.Tensor, rate_hz: float | None = None, **changes: Any) -> Trajectory:
    times_s = None if rate_hz is None else torch.arange(len(poses), dtype=torch.float64) / rate_hz
    return Trajectory(poses, is_metric=True, convention="a test", timestamps_s=times_s, **changes)


def arguments(files: Path, out: Path, **changes: object) -> list[str]:
    """The command line for a short clip; None leaves an option out, True gives it without a value."""
    options = {
        "model": files / "model",
        "branch": files / "branch",
        "trajectory": files / "bend.json",
        "prefix": files / "street.mp4",
        "prompt": "a street at night",
        "frames": FRAMES,
        "steps": 2,
        "size": (HEIGHT, WIDTH),
        "out": out,
        **changes,
    }
    line = ["generate"]
    for name, value in options.items():
        if value is not None:
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            line += [f"--{name.replace('_', '-')}", *map(str, values)]
    return line
