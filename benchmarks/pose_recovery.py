"""What the weight-free pose estimators get wrong on videos whose poses are known: the floors of docs/estimators.md.

    python benchmarks/pose_recovery.py [--seeds 4] [--out benchmarks/results/pose_recovery.json]

A clip is 49 frames of 288×512 (focal length 405, as a nuScenes front camera of that size) over 24 m of a procedural
street: straight, then a right turn of 30°. It is seen clean, with noise of 5 grey levels, and blurred by scaling to a
quarter and back. The last rows show every sixth frame from somewhere else than commanded, by a known turn and shift:
how far the recovered poses are from the true ones, as a share of what was injected. COLMAP takes all cores here, with
which its third digit changes from run to run.

`--trust` measures something else, on six true clips of the world benchmark (13 frames at 4 Hz, so long steps) at each
of three sizes: how wrong COLMAP and the tracker are, and how far they are from each other. The limits of
merope/evaluate/trust.py come from these rows.
"""

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from merope.evaluate.estimators import PoseEstimate, PoseEstimator, estimator
from merope.evaluate.estimators.render_anchored import RenderAnchoredEstimator
from merope.evaluate.metrics import pose_metrics
from merope.evaluate.trust import difference
from merope.formats.video import as_bytes
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Lens, Pinhole
from merope.geometry.poses import relative, rigid
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_axis_angle
from merope.geometry.trajectories import unicycle_path
from merope.world.clips import WorldClips
from merope.world.commanded import FIRST_TEST_SEED, WorldTest, commanded_clips
from merope.world.render import Render, render
from merope.world.scene import World

FRAMES, FRAME_RATE_HZ, SPEED_M_S, TURN_DEG = 49, 12.0, 6.0, 30.0
INJECTED = ((0.5, 0.1), (2.0, 0.3), (8.0, 1.0))  # degrees, metres
Row = dict[str, object]


@dataclass(frozen=True, eq=False)
class Drive:
    """One clip of the benchmark: what was commanded, and what it looks like."""

    seed: int
    world: World
    cameras: Cameras
    seen: Render
    noise: torch.Generator


def drive(seed: int, height: int, width: int) -> Drive:
    """Render a clip."""
    steps = FRAMES - 1
    yaw_rate_rad_s = torch.zeros(steps, dtype=torch.float64)
    yaw_rate_rad_s[steps // 2 :] = math.radians(TURN_DEG) * FRAME_RATE_HZ / (steps - steps // 2)
    path = unicycle_path(torch.full((steps,), SPEED_M_S, dtype=torch.float64), yaw_rate_rad_s, FRAME_RATE_HZ)
    lens = Pinhole(405.0 / 512 * width, 405.0 / 512 * width, width / 2, height / 2, width, height)
    world, cameras = World(seed).cleared(path), Cameras(path, lens)
    print(f"rendering {FRAMES} frames of world {seed}", flush=True)
    seen = render(world, cameras, height, width)
    return Drive(seed, world, cameras, seen, torch.Generator().manual_seed(seed))


def noisy(image: Tensor, generator: torch.Generator) -> Tensor:
    return image + torch.randn(image.shape, generator=generator) * (5.0 / 255.0)


def blurred(image: Tensor) -> Tensor:
    small = interpolate(image.permute(0, 3, 1, 2), scale_factor=0.25, mode="area")
    return interpolate(small, image.shape[1:3], mode="bicubic", align_corners=False).permute(0, 2, 3, 1)


def floor(what: str, clip: Drive, how: str, estimate: PoseEstimator, image: Tensor, lens: Lens | None) -> Row:
    """One estimator on one clip."""
    start = time.perf_counter()
    found = estimate(as_bytes(image), lens)
    seconds = time.perf_counter() - start
    errors = pose_metrics(clip.cameras.world_from_camera, found.world_from_camera, found.valid, found.is_metric)
    row: Row = {
        "estimator": what, "world": clip.seed, "frames": how, "registered": f"{int(found.valid.sum())}/{FRAMES}",
        "rot_deg": errors.rot_deg, "tr_percent": errors.tr_percent, "scale": errors.scale,
        "metric_tr_percent": errors.metric_tr_percent, "cammc": errors.cammc, "seconds": seconds,
    }  # fmt: skip
    shown = f"rot {errors.rot_deg:.4f}° tr {errors.tr_percent:.4f} %"
    print(f"{what:24} world {clip.seed} {how:8} {row['registered']} {shown} {seconds:.0f} s", flush=True)
    return row


def floors(clip: Drive) -> list[Row]:
    """All estimators on a clip, on what it looks like in different conditions."""
    lens = clip.cameras.lens
    looks = {"clean": clip.seen.image, "noisy": noisy(clip.seen.image, clip.noise), "blurred": blurred(clip.seen.image)}
    rows = []
    for how, image in looks.items():
        rows.append(floor("colmap", clip, how, estimator("colmap", threads=-1), image, lens))
        rows.append(floor("opencv", clip, how, estimator("opencv"), image, lens))
        anchored = RenderAnchoredEstimator(clip.world, clip.cameras, clip.seen)
        rows.append(floor("render-anchored", clip, how, anchored, image, lens))
    rows.append(floor("colmap, lens unknown", clip, "clean", estimator("colmap", threads=-1), clip.seen.image, None))
    return rows


def injected(clip: Drive, turn_deg: float, shift_m: float, rounds: int) -> Row:
    """Frames from beside the commanded poses, with noise: how far the recovered poses are from the true ones."""
    few = torch.arange(0, FRAMES, 6)
    commanded = Cameras(clip.cameras.world_from_camera[few], clip.cameras.lens)
    draws = torch.randn(2, len(few), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    axes, directions = normalize(draws, dim=-1)
    angles = torch.full((len(few),), math.radians(turn_deg), dtype=torch.float64)
    error = rigid(matrix_from_quaternion(quaternion_from_axis_angle(axes, angles)), shift_m * directions)
    true = commanded.world_from_camera @ error
    height, width = clip.seen.depth_m.shape[-2:]
    image = render(clip.world, Cameras(true, commanded.lens), height, width).image
    found = RenderAnchoredEstimator(clip.world, commanded, rounds=rounds)(as_bytes(noisy(image, clip.noise)), None)
    off_deg, off_m = _distance(true, found)
    row: Row = {
        "estimator": "render-anchored", "world": clip.seed, "rounds": rounds, "turn_deg": turn_deg, "shift_m": shift_m,
        "valid": int(found.valid.sum()), "of": len(few),
        "turn_error_deg": float(off_deg.mean()), "shift_error_m": float(off_m.mean()),
        "worst_turn_error_percent": 100.0 * float(off_deg.max()) / turn_deg,
        "worst_shift_error_percent": 100.0 * float(off_m.max()) / shift_m,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def _distance(true: Tensor, found: PoseEstimate) -> tuple[Tensor, Tensor]:  # [n] degrees, [n] metres
    off = relative(true, found.world_from_camera)[found.valid]
    chord = (off[:, :3, :3] - torch.eye(3, dtype=torch.float64)).flatten(1).norm(dim=-1)
    return torch.rad2deg(2.0 * torch.asin(chord / math.sqrt(8.0))), off[:, :3, 3].norm(dim=-1)


def trust(height: int) -> list[Row]:
    """COLMAP and the tracker on true clips of one size: their errors, and their difference."""
    size, rows = WorldClips(height=height, width=height * 16 // 9), []
    for clip in commanded_clips(WorldTest(worlds=2), size, torch.device("cpu")):
        row: Row = {"height": height, "world": clip.seed - FIRST_TEST_SEED, "manoeuvre": clip.manoeuvre}
        found = {name: estimator(name)(clip.true, clip.cameras.lens) for name in ("colmap", "opencv")}
        for name, one in found.items():
            errors = pose_metrics(clip.cameras.world_from_camera, one.world_from_camera, one.valid)
            row |= {f"{name}_{key}": errors.as_dict()[key] for key in ("valid_frames", "rot_deg", "tr_percent")}
        apart = difference(found["colmap"], found["opencv"])
        row["apart"] = None if apart is None else [apart.turn_deg, apart.shift_percent]
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Print the rows and write them, after every clip."""
    parser = argparse.ArgumentParser(description="pose recovery on videos with known poses")
    parser.add_argument("--seeds", type=int, nargs="+", default=[4])
    parser.add_argument("--height", type=int, default=288)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pose_recovery.json"))
    parser.add_argument("--trust", type=Path, metavar="FILE", help="measure only when to trust, and write it there")
    arguments = parser.parse_args()
    report: dict[str, object] = {
        "size": [FRAMES, arguments.height, arguments.width], "device": f"CPU, {torch.get_num_threads()} threads",
        "load_1min": os.getloadavg()[0], "torch": torch.__version__, "pycolmap": version("pycolmap"),
        "opencv": version("opencv-python-headless"),
    }  # fmt: skip
    if arguments.trust is not None:
        sizes = {str(height): trust(height) for height in (72, 144, 288)}
        arguments.trust.write_text(json.dumps({**report, "size": None, "trust": sizes}, indent=1) + "\n")
        return
    rows: list[Row] = []
    offsets: list[Row] = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        clip = drive(seed, arguments.height, arguments.width)
        rows += floors(clip)
        offsets += [injected(clip, *size, rounds) for size in INJECTED for rounds in (1, 2)]
        arguments.out.write_text(json.dumps({**report, "floors": rows, "injected": offsets}, indent=1) + "\n")


if __name__ == "__main__":
    main()
