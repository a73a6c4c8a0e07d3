"""Where a trained camera branch looks as the drive grows: attention of the last frame to every frame (paper, Figure 1).

    python benchmarks/world_attention.py [--models NAME=FOLDER ...] [--out benchmarks/results/world-attention.json]

Models are rows of the world benchmark (`outputs/miniature-rows/ucpe-seed0/trained`), whose clips.json says what they
are given and how long their clips are. Each continues the first frames of a straight drive through unseen worlds;
drives differ in their metres alone. What is measured is the branch's attention mass, mean over its blocks, heads,
denoising steps, worlds and the query tokens of the last latent frame. Rows of models that are in the file already and
are not named stay in it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from merope.demo.drive import loaded
from merope.formats.video import as_bytes
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.cameras import Cameras
from merope.paper.analysis import recording
from merope.train.provenance import commit, device_name
from merope.world.clips import WorldClips
from merope.world.clips_file import read_clips
from merope.world.commanded import FIRST_TEST_SEED
from merope.world.render import render
from merope.world.scene import World

LENGTHS_M = (3.0, 12.0, 48.0, 120.0)
"""Of the drive; training reaches about 45 m."""
FARTHEST = 3
"""Latent frames, from the first one on."""
PICTURE = Path("docs/images/world-attention.png")

Row = dict[str, Any]


def straight_cameras(clips: WorldClips, length_m: float) -> Cameras:  # [T]
    poses = torch.eye(4, dtype=torch.float64).repeat(clips.frames, 1, 1)
    poses[:, 2, 3] = torch.linspace(0.0, length_m, clips.frames, dtype=torch.float64)
    return Cameras(poses, clips.lens(0), plan_dtype=torch.float32)


def last_frame_mass(
    pipeline: CameraVideoPipeline, clips: WorldClips, length_m: float, seeds: range, steps: int
) -> tuple[Tensor, float]:  # [T'], sums to 1; and the amplitude of the branch, mean over its blocks
    """Mass on every latent frame, mean over worlds."""
    cameras, masses, amplitudes = straight_cameras(clips, length_m), [], []
    for seed in seeds:
        world = World(seed).cleared(cameras.world_from_camera)
        prefix = as_bytes(render(world, cameras, clips.height, clips.width).image)[: clips.prefix_frames]
        with recording(pipeline.transformer) as record:
            pipeline(
                cameras=cameras,
                prefix=prefix,
                height=clips.height,
                width=clips.width,
                num_frames=clips.frames,
                num_inference_steps=steps,
                guidance_scale=1.0,
                generator=torch.Generator(pipeline.transformer.device).manual_seed(seed),
                output_type="latent",
            )
        analysis = record.analysis()
        masses.append(analysis.branch_mass[:, -1].mean(0))
        amplitudes.append(float(analysis.amplitude.mean()))
    return torch.stack(masses).mean(0), sum(amplitudes) / len(amplitudes)


def measure(name: str, folder: Path, worlds: int, steps: int, device: torch.device) -> list[Row]:
    """A row per length of the drive."""
    pipeline, rows = loaded(folder, device), list[Row]()
    clips, _ = read_clips(folder)
    for length_m in LENGTHS_M:
        seeds = range(FIRST_TEST_SEED, FIRST_TEST_SEED + worlds)
        mass, amplitude = last_frame_mass(pipeline, clips, length_m, seeds, steps)
        row = {"model": name, "length_m": length_m, "worlds": worlds, "steps": steps, "amplitude": amplitude}
        about = {"commit": commit(), "device": device_name(device), "torch": torch.__version__}
        rows.append({**row, **about, "mass": mass.tolist(), "farthest": float(mass[:FARTHEST].sum())})
        share = f"{100 * rows[-1]['farthest']:.1f} %"
        print(f"{name}, {length_m:g} m: {share} on the {FARTHEST} farthest latent frames", flush=True)
    return rows


def draw(rows: list[Row], out: Path) -> None:
    """Mass on every frame, a panel per length of the drive."""
    figure, panels = plt.subplots(1, len(LENGTHS_M), figsize=(12, 3.2), sharey=True, constrained_layout=True)
    models = list(dict.fromkeys(row["model"] for row in rows))
    for panel, length_m in zip(panels, LENGTHS_M, strict=True):
        for number, model in enumerate(models):
            masses = [row["mass"] for row in rows if row["model"] == model and row["length_m"] == length_m]
            colour = "tab:blue" if model.startswith("merope") else plt.get_cmap("tab10")(1 + number % 9)
            for mass in masses:
                panel.plot(range(len(mass)), [100 * m for m in mass], marker="o", ms=3, color=colour, label=model)
        panel.set(title=f"{length_m:g} m driven", xlabel="key frame (latent)")
        panel.grid(lw=0.4)
    panels[0].set_ylabel("attention of the last frame, %")
    panels[0].legend(fontsize=8)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure the models that are named, and draw all that are in the file."""
    parser = argparse.ArgumentParser(description="where trained camera branches look as the drive grows")
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--worlds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of denoising")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/world-attention.json"))
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = dict(model.split("=", 1) for model in options.models)
    before = json.loads(options.out.read_text()) if options.out.exists() else []
    rows = [row for row in before if row["model"] not in named]
    for name, folder in named.items():
        rows += measure(name, Path(folder), options.worlds, options.steps, device)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, options.picture)
    print("wrote", options.out, "and", options.picture)


if __name__ == "__main__":
    main()
