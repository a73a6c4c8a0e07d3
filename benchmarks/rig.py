"""Six views that agree: a camera branch that attends over all views of a rig, beside one that sees each view alone.

    python benchmarks/rig.py [--config world-rig] [--set KEY=VALUE ...] [--worlds 24] [--seeds 0]
        [--runs outputs/rig] [--out benchmarks/results/rig.json]

Trains configs/world-rig.toml twice, with branch.across_views true and false, then a third model on the front camera
alone, which is driven as a rig like the others. Each generates all views of unseen worlds from their first frames, or
from noise where the config gives none. What is printed: the PSNR of what two views show of the same surface point,
found by the true depth, and the PSNR against the true frames. The first row is that of the true frames themselves,
which differ where points fall between pixels. Stopped runs go on, finished ones are not trained again.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.bench.generated import load_trained
from merope.draw.progress import ProgressLine
from merope.evaluate.overlap import Overlap, view_overlap
from merope.formats.video import as_bytes
from merope.formats.writing import replace_text
from merope.geometry.cameras import Cameras
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.train.provenance import commit, device_name, steps_done
from merope.train.samples import only_clip
from merope.train.toml_config import read_config
from merope.world.clips import WorldClips, by_view
from merope.world.scene import World

MODELS: dict[str, tuple[str, ...]] = {
    "all views see each other": (),
    "each view sees itself": ("branch.across_views=false",),
    "trained on the front view alone": ("data.rig_yaw_deg=[0]", "data.rig_fov_deg=[]", "data.rig_offset_m=0.0"),
}


def trained(name: str, config: str, changes: list[str], seed: int, runs: Path) -> TrainConfig:
    """Train a model, or go on. A run that is stopped ends the program."""
    out = runs / f"{name.replace(' ', '-')}-seed{seed}"
    settings = [*changes, *MODELS[name], f'run.out="{out}"', f"run.seed={seed}"]
    run = read_config(TrainConfig, Path(config), settings)
    if steps_done(run) < run.run.steps:
        train(run)
    if steps_done(run) < run.run.steps:
        sys.exit(1)
    return run


def true_clip(clips: WorldClips, seed: int, device: torch.device) -> tuple[Tensor, Cameras, World]:
    """All views of a world [views, T, H, W, 3], their cameras and the world as it was rendered."""
    cameras = clips.cameras([seed], device)
    frames = by_view(clips.pictures([seed], cameras), clips.views)
    alone = only_clip(cameras)
    return frames, alone, World(seed, device).cleared(alone.world_from_camera)


def psnr_db(made: Tensor, true: Tensor) -> float:  # uint8 [views, T, H, W, 3] each
    error = float((made.float() / 255.0 - true.float() / 255.0).square().mean())
    return math.inf if error == 0 else -10.0 * math.log10(error)


def measured(config: TrainConfig, clips: WorldClips, worlds: int, steps: int, device: torch.device) -> dict[str, Any]:
    """What a trained model makes of unseen worlds, generated from their first frames."""
    pipeline, prefix = load_trained(config, device), config.objective.prefix_frames
    pipeline.set_progress_bar_config(disable=True)
    overlap, against_truth = Overlap(0.0, 0), list[float]()
    progress = ProgressLine("generating", worlds)
    for seed in range(worlds):
        true, cameras, world = true_clip(clips, seed, device)
        video = pipeline(
            cameras=cameras,
            prefix=true[:, :prefix] if prefix else None,
            height=clips.height,
            width=clips.width,
            num_frames=clips.frames,
            num_inference_steps=steps,
            guidance_scale=1.0,
            generator=torch.Generator(device).manual_seed(seed),
            output_type="pt",
            return_dict=False,
        )[0]
        made = as_bytes(video.movedim(2, -1)).to(device)
        overlap += view_overlap(made, cameras, world, first=prefix)
        against_truth.append(psnr_db(made[:, prefix:], true[:, prefix:]))
        progress.show(seed + 1)
    row: dict[str, Any] = {"overlap_psnr_db": round(overlap.psnr_db, 3), "pixels": overlap.pixels}
    if prefix:  # without a past, what is made is another world than the true one
        row["psnr_db"] = round(sum(against_truth) / worlds, 3)
    return row


def main() -> None:
    """Train, generate, print and write."""
    parser = argparse.ArgumentParser(description="do the generated views of a rig agree where they overlap?")
    parser.add_argument("--config", default="world-rig", help="(%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--worlds", type=int, default=24)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--denoising-steps", type=int, default=8)
    parser.add_argument("--runs", type=Path, default=Path("outputs/rig"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rig.json"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        runs = {name: trained(name, options.config, options.set, seed, options.runs) for name in MODELS}
        rig_run = next(iter(runs.values()))
        clips = world_clips(rig_run)
        for name, config in runs.items():
            row = measured(config, clips, options.worlds, options.denoising_steps, device)
            rows.append({"model": name, "seed": seed, "steps": config.run.steps, **row})
    overlap = Overlap(0.0, 0)
    for seed in range(options.worlds):
        true, cameras, world = true_clip(clips, seed, device)
        overlap += view_overlap(true, cameras, world, first=rig_run.objective.prefix_frames)
    rows.insert(0, {"model": "true frames", "overlap_psnr_db": round(overlap.psnr_db, 3), "pixels": overlap.pixels})
    for row in rows:
        print(f"{row['model']:34}{row['overlap_psnr_db']:8.2f} dB between views {row.get('psnr_db', math.nan):8.2f} dB")
    about = {"worlds": options.worlds, "device": device_name(device), "torch": torch.__version__, "commit": commit()}
    replace_text(options.out, json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
