"""Where a trained camera branch looks as a straight drive grows, and how strongly it moves every block.

Each drive continues the first frames of an unseen world; drives differ in their metres alone. Attention mass is the
branch's, mean over its blocks, heads, denoising steps, worlds and the query tokens of the last latent frame (paper,
Figure 1). The amplitude of a block is the mean over steps and worlds (Figure 7). A row of the benchmark leaves both in
`results/attention/merope-seed0.json`.
"""

import json
from pathlib import Path
from typing import Any

import torch

from merope.bench.generated import load_trained
from merope.bench.result_files import results_file
from merope.bench.run_facts import about_clips, weights_digest
from merope.errors import invalid
from merope.formats.video import as_bytes
from merope.formats.writing import replace_text
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.cameras import Cameras
from merope.paper.analysis import Analysis, recording
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.train.provenance import device_name, provenance
from merope.world.clips import WorldClips
from merope.world.commanded import FIRST_TEST_SEED
from merope.world.render import render
from merope.world.scene import World

LENGTHS_M = (3.0, 12.0, 48.0, 120.0)
"""Of the drive; training reaches about 45 m."""
WORLDS, STEPS = 2, 4
"""So few that a row takes seconds."""
FARTHEST = 3
"""Latent frames, from the first one on."""

Drive = dict[str, Any]


def straight_cameras(clips: WorldClips, length_m: float) -> Cameras:  # [T]
    """A drive along +z at an even pace."""
    poses = torch.eye(4, dtype=torch.float64).repeat(clips.frames, 1, 1)
    poses[:, 2, 3] = torch.linspace(0.0, length_m, clips.frames, dtype=torch.float64)
    return Cameras(poses, clips.lens(0), plan_dtype=torch.float32)


def straight_drives(pipeline: CameraVideoPipeline, clips: WorldClips, worlds: int, steps: int) -> list[Drive]:
    """Attention and amplitude for every length, as JSON has them. A model without a parallel branch is refused."""
    pipeline.set_progress_bar_config(disable=True)
    drives = []
    for length_m in LENGTHS_M:
        seeds = range(FIRST_TEST_SEED, FIRST_TEST_SEED + worlds)
        seen = [_watched(pipeline, clips, length_m, seed, steps) for seed in seeds]
        mass = torch.stack([analysis.branch_mass[:, -1].mean(0) for analysis in seen]).mean(0)  # [T'], sums to 1
        amplitude = torch.stack([analysis.amplitude for analysis in seen]).mean(0)  # [blocks]
        drives.append(
            {
                "length_m": length_m,
                "worlds": worlds,
                "steps": steps,
                "amplitude": float(amplitude.mean()),
                "layers": seen[0].layers,
                "amplitude_by_block": dict(zip(map(str, seen[0].blocks), amplitude.tolist(), strict=True)),
                "mass": mass.tolist(),
                "farthest": float(mass[:FARTHEST].sum()),
            }
        )
    return drives


def _watched(pipeline: CameraVideoPipeline, clips: WorldClips, length_m: float, seed: int, steps: int) -> Analysis:
    """One drive through one world, from noise to a clip."""
    cameras, device = straight_cameras(clips, length_m), pipeline.transformer.device
    world = World(seed, device).cleared(cameras.world_from_camera.to(device))
    given = cameras.at(slice(clips.prefix_frames)).to(device)
    prefix = as_bytes(render(world, given, clips.height, clips.width).image)
    with recording(pipeline.transformer) as record:
        pipeline(
            cameras=cameras,
            prefix=prefix.cpu(),
            height=clips.height,
            width=clips.width,
            num_frames=clips.frames,
            num_inference_steps=steps,
            guidance_scale=1.0,
            generator=torch.Generator(device).manual_seed(seed),
            output_type="latent",
        )
    return record.analysis()


def attention_file(config: TrainConfig, results: Path) -> Path:
    """Where the drives of a row lie in a results folder."""
    return results / "attention" / results_file(config, results).name


def has_parallel_branch(config: TrainConfig) -> bool:
    """Whether a row has what is measured here: attention of its own for cameras."""
    return config.branch != "none" and config.branch.integration == "parallel"


def keep_straight_drives(config: TrainConfig, results: Path, device: torch.device) -> Path:
    """Measure the trained branch of a row and keep the numbers."""
    drives = straight_drives(load_trained(config, device), world_clips(config), WORLDS, STEPS)
    about = provenance(config) | {
        "weights": weights_digest(config.run.out / "trained"),
        "data": about_clips(config),
        "measured_on": device_name(device),
    }
    file = attention_file(config, results)
    replace_text(file, json.dumps(about | {"drives": drives}, indent=1) + "\n")
    return file


def read_straight_drives(results: Path) -> dict[str, list[list[Drive]]]:
    """The drives of all rows of a results folder: by row, then a list for every seed."""
    rows: dict[str, list[list[Drive]]] = {}
    for file in sorted((results / "attention").glob("*-seed*.json")):
        kept = json.loads(file.read_text())
        rows.setdefault(kept["row"], []).append(kept["drives"])
    if not rows:
        fix = "make rows with a parallel branch: merope bench world … --results DIR"
        raise invalid(str(results / "attention"), "a folder with straight drives of rows", "none", fix)
    return rows
