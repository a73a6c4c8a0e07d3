"""`merope data from-videos` on videos of the procedural world whose poses are known.

    python benchmarks/from_videos.py [--first-world 300] [--clips 3] [--frames 49] [--size 288 512]
        [--out benchmarks/results/from_videos.json]

Each clip is a drive through a world of its own, rendered to mp4. The command gets the videos, and the mean speed of
each as a log or the height of the camera; the lens is known or not. Printed are rot° and the error of the path in per
cent of its length, without any further scaling.

The command was made while looking at worlds 40 to 42, and the height above the road mended after 200 to 208. Report
others, and new ones after it was changed for their sake.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.cli import main as merope
from merope.evaluate.metrics import relative_to_first
from merope.formats import read
from merope.formats.video import as_bytes, write_video
from merope.formats.writing import replace_text
from merope.geometry.cameras import Cameras
from merope.geometry.poses import rotation_angle
from merope.geometry.trajectories import driving_path
from merope.train.provenance import commit
from merope.world.clips import DRIVE, dice
from merope.world.render import render
from merope.world.scene import World

FOV_DEG, CAMERA_HEIGHT_M, FPS = 65.0, 1.5, 12.0


def write_drives(folder: Path, worlds: range, frames: int, height: int, width: int) -> list[Tensor]:  # each [T, 4, 4]
    """Videos a.mp4, b.mp4, … and logs of their speed; returns their true poses."""
    from merope.generate.camera_path import lens_of_fov

    lens, paths = lens_of_fov(FOV_DEG, 0.0, width, height), []
    for number, seed in enumerate(worlds):
        path = driving_path(frames, FPS, dice(seed, DRIVE), prefix=1)
        seen = render(World(seed).cleared(path), Cameras(path, lens), height, width)
        name = chr(ord("a") + number)
        write_video(as_bytes(seen.image), folder / "videos" / f"{name}.mp4", FPS)
        speed_m_s = float(path[:, :3, 3].diff(dim=0).norm(dim=-1).sum()) / ((frames - 1) / FPS)
        replace_text(folder / "logs" / f"{name}.csv", f"time_s,speed_m_s\n0,{speed_m_s}\n{frames / FPS},{speed_m_s}\n")
        paths.append(path)
    return paths


def errors(true: Tensor, found: Tensor) -> dict[str, float]:  # [T, 4, 4] each
    """Mean turn in degrees, mean and largest distance in per cent of the way, all from the first camera."""
    here, there = relative_to_first(true), relative_to_first(found)
    way_m = float(true[:, :3, 3].diff(dim=0).norm(dim=-1).sum())
    apart = (here - there)[:, :3, 3].norm(dim=-1)
    return {
        "rot_deg": math.degrees(float(rotation_angle(here[1:, :3, :3], there[1:, :3, :3]).mean())),
        "path_percent": 100 * float(apart[1:].mean()) / way_m,
        "worst_percent": 100 * float(apart.max()) / way_m,
        "way_m": way_m,
    }


def measured(
    folder: Path, out: Path, paths: list[Tensor], frames: int, size: list[int], *options: str
) -> dict[str, Any]:
    began_s = time.perf_counter()
    clip = ["--frames", str(frames), "--piece-frames", str(frames), "--size", *map(str, size)]
    status = merope(["data", "from-videos", str(folder / "videos"), "--out", str(out), *clip, *options])
    rows = {}
    for number, true in enumerate(paths):
        file = out / "poses" / f"{chr(ord('a') + number)}-000.json"
        rows[file.stem] = errors(true, read(file).world_from_camera) if file.exists() else "left out"
    return {"options": list(options), "status": status, "clips": rows, "seconds": time.perf_counter() - began_s}


def main() -> None:
    parser = argparse.ArgumentParser(description="poses of videos of the procedural world, recovered by from-videos")
    parser.add_argument("--first-world", type=int, default=300, help="its seed (%(default)s)")
    parser.add_argument("--clips", type=int, default=3)
    parser.add_argument("--frames", type=int, default=49)
    parser.add_argument("--size", type=int, nargs=2, default=[288, 512])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/from_videos.json"))
    options = parser.parse_args()
    worlds, rows = range(options.first_world, options.first_world + options.clips), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_drives(folder, worlds, options.frames, *options.size)
        for number, given in enumerate(
            (
                ["--fov", str(FOV_DEG), "--speed-logs", str(folder / "logs")],
                ["--speed-logs", str(folder / "logs")],
                ["--fov", str(FOV_DEG), "--camera-height", str(CAMERA_HEIGHT_M)],
            )
        ):
            row = measured(folder, folder / f"out{number}", paths, options.frames, options.size, *given)
            row["options"] = [word for word in row["options"] if not word.startswith(str(folder))]
            rows.append(row)
            print(json.dumps(row, indent=1), flush=True)
    about = {
        "worlds": list(worlds),
        "frames": options.frames,
        "size": options.size,
        "torch": torch.__version__,
        "commit": commit(),
    }
    replace_text(options.out, json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
