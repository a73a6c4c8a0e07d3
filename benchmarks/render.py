"""Frames per second of the procedural world's renderer.

    python benchmarks/render.py [--device cpu|cuda] [--out benchmarks/results/render-cpu.json]

Each row renders fresh worlds, cleared along a 12 m drive, through a pinhole (FoV 64°) or a fisheye (FoV 173°, ξ 1.66);
the time covers lens rays, ray casting, shading and depth, not the making of the worlds, which has a row of its own.
Pixels that hold an edge take 9 rays (samples = 3, the default), or one like all others (samples = 1). On a CPU one
world and its clip are rendered at a time, on CUDA a batch of worlds at once.

Then the whole way to the training clips of a miniature, 49 frames of 144×256: drives, worlds, rendering, bytes. On CUDA
the kernels and the plain code that defines the images are timed one after the other, and their images are compared.

With --errors, instead, how far images are from 8 × 8 rays in every pixel, and how far the change from one frame to the
next is (flicker), for the default, for one ray per pixel, and for 2 × 2 rays in every pixel.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from merope.formats.video import as_bytes
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import UnifiedCamera
from merope.world.clips import WorldClips
from merope.world.render import Render, render
from merope.world.scene import World

LENSES = {"pinhole": (64.0, 0.0), "fisheye": (173.0, 1.66)}
SIZES = ((72, 128), (144, 256))
FRAMES = 13
MINIATURE = WorldClips(frames=49, height=144, width=256, frame_rate_hz=16, prefix_frames=9)
FIRST_SEED = 1 << 20
DIFFERENT = 2.0 / 255.0


def drive(worlds: int, device: str) -> Tensor:  # [worlds, FRAMES, 4, 4]
    poses = torch.eye(4, dtype=torch.float64, device=device).repeat(worlds, FRAMES, 1, 1)
    poses[..., 2, 3] = torch.linspace(0.0, 12.0, FRAMES, dtype=torch.float64, device=device)
    return poses


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Least time of a few repeats, after one to warm up: what the machine can do when nothing else runs."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure(device: str, repeats: int) -> list[dict[str, object]]:
    count = 48 if device == "cuda" else 1
    poses = drive(count, device)
    made_s = seconds(lambda: World(range(count), device).cleared(poses), device, repeats)
    worlds = World(range(count), device).cleared(poses)
    present, boxes = worlds.solids.present.double(), worlds.solids.boxes
    rows: list[dict[str, object]] = [{"what": "make and clear worlds", "worlds": count, "per_second": count / made_s}]
    for lens, (fov_deg, xi) in LENSES.items():
        for height, width in SIZES:
            cameras = Cameras(poses, UnifiedCamera.from_fov(fov_deg, xi, width, height).to(device))
            for samples in (1, 3):
                frames_s = seconds(
                    lambda c=cameras, s=samples: render(worlds, c, c.lens.height, c.lens.width, s), device, repeats
                )
                rows.append(
                    {
                        "what": "render", "worlds": count, "lens": lens, "height": height, "width": width,
                        "samples": samples, "boxes": round(float(present[:, :boxes].sum(-1).mean())),
                        "ellipsoids": round(float(present[:, boxes:].sum(-1).mean())),
                        "per_second": count * FRAMES / frames_s,
                    }
                )  # fmt: skip
    return rows


def drawn_clips(clips: WorldClips, seeds: range, device: str, by_kernels: bool) -> Render:
    """What `WorldClips.pictures` draws, by a way of choice."""
    cameras = clips.cameras(seeds, device)
    world = World(tuple(seeds), device).cleared(cameras.world_from_camera)
    return render(world, cameras, clips.height, clips.width, by_kernels=by_kernels)


def measure_clips(device: str, repeats: int) -> list[dict[str, object]]:
    """Frames per second of whole clips, from seeds to bytes."""
    rows: list[dict[str, object]] = []
    for count in (16, 64) if device == "cuda" else (1,):
        seeds = range(FIRST_SEED, FIRST_SEED + count)
        ours_s = seconds(lambda s=seeds: MINIATURE.pictures(s, MINIATURE.cameras(s, device)), device, repeats)
        row: dict[str, object] = {"what": "clips", "worlds": count, "per_second": count * MINIATURE.frames / ours_s}
        if device == "cuda":
            plain_s = seconds(lambda s=seeds: as_bytes(drawn_clips(MINIATURE, s, device, False).image), device, repeats)
            row |= {"plain_per_second": count * MINIATURE.frames / plain_s, "ratio": plain_s / ours_s}
            row |= differences(range(FIRST_SEED, FIRST_SEED + 4), device)
        rows.append(row)
    return rows


def differences(seeds: range, device: str) -> dict[str, object]:
    """Between what the kernels and the plain code draw."""
    ours, plain = (drawn_clips(MINIATURE, seeds, device, by_kernels) for by_kernels in (True, False))
    off = (ours.image - plain.image).abs().amax(dim=-1)
    both = ours.depth_m.isfinite() & plain.depth_m.isfinite()
    depth = ((ours.depth_m - plain.depth_m).abs() / plain.depth_m)[both]
    return {
        "different_pixels": float((off > DIFFERENT).double().mean()),
        "largest_difference": float(off.max()),
        "different_depths": float((depth > 1e-4).double().mean()),
        "largest_depth_ratio": float(depth.max()),
        "different_sky": float((ours.depth_m.isinf() != plain.depth_m.isinf()).double().mean()),
    }


def every_pixel(world: World, cameras: Cameras, rays: int) -> Tensor:  # [V, H, W, 3]
    """Brute force: the mean of rays × rays rays in every pixel."""
    height, width = cameras.lens.height, cameras.lens.width
    fine = render(world, cameras, height * rays, width * rays, samples=1).image
    return fine.unflatten(1, (height, rays)).unflatten(3, (width, rays)).mean(dim=(2, 4))


def print_errors(device: str) -> None:
    """A table of PSNR in dB, over three worlds, two frames 0.1 m apart, at 72×128."""
    print("| lens | way | image, dB | change between frames, dB |\n|---|---|---|---|")
    for name, (fov_deg, xi) in {**LENSES, "wide": (120.0, 0.6)}.items():
        errors: dict[str, list[Tensor]] = {}
        poses = drive(1, device)[0, :2]
        poses[1, 2, 3] = 0.1
        cameras = Cameras(poses, UnifiedCamera.from_fov(fov_deg, xi, 128, 72).to(device))
        for seed in (1, 4, 8):
            world = World(seed, device).cleared(poses)
            truth = every_pixel(world, cameras, 8)
            ways = {"default": render(world, cameras, 72, 128).image}
            ways |= {f"{n} × {n} in every pixel": every_pixel(world, cameras, n) for n in (1, 2)}
            for way, image in ways.items():
                off = image - truth
                squares = torch.stack((off.square().mean(), off.diff(dim=0).square().mean()))
                errors.setdefault(way, []).append(squares)
        for way, squares in errors.items():
            still, change = (-10.0 * torch.stack(squares).mean(dim=0).log10()).tolist()
            print(f"| {name} | {way} | {still:.1f} | {change:.1f} |")


def main() -> None:
    """Print the table and write the rows."""
    parser = argparse.ArgumentParser(description="frames per second of the procedural world")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--errors", action="store_true", help="image errors instead of speed")
    arguments = parser.parse_args()
    if arguments.errors:
        print_errors(arguments.device)
        return
    rows = measure(arguments.device, arguments.repeats)
    print("| size | lens | rays per edge pixel | boxes + ellipsoids | frames/s |\n|---|---|---|---|---|")
    for row in rows[1:]:
        solids = f"{row['boxes']} + {row['ellipsoids']}"
        rate = f"{row['per_second']:,.1f}"
        print(f"| {row['height']}×{row['width']} | {row['lens']} | {row['samples'] ** 2} | {solids} | {rate} |")
    print(f"worlds made and cleared per second: {rows[0]['per_second']:,.0f}")
    clips = measure_clips(arguments.device, arguments.repeats)
    for row in clips:
        print("clips of 49 × 144×256, " + ", ".join(f"{k} {v:.4g}" for k, v in row.items() if k != "what"), flush=True)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    report = {"device": name, "torch": torch.__version__, "load_1min": os.getloadavg()[0], "rows": rows + clips}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
