"""How well the model in the package follows commanded paths: the numbers of its card.

    python benchmarks/world_model.py [--worlds 24] [--steps 25] [--out benchmarks/results/world-model.json]

Three paths in each of some worlds that it was not trained on; poses are recovered in metres, on CPU cores. Generation
takes a few seconds on a GPU and about a minute a world on two CPU cores.
"""

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.bench.generated import generate_clips
from merope.demo.drive import SHIPPED_MODEL, loaded
from merope.demo.given_paths import TRAINED
from merope.evaluate.world_scores import score_clip
from merope.train.provenance import commit
from merope.world.commanded import WorldTest, clips_of_world, commanded_clips

CPU = torch.device("cpu")


def scored(videos: dict[str, Tensor], test: WorldTest, seed: int) -> dict[str, dict[str, Any]]:
    """Scores of the clips of one world by name."""
    torch.set_num_threads(1)
    scores = [
        score_clip(clip, videos[clip.name], TRAINED.prefix_frames)
        for clip in clips_of_world(test.paths(TRAINED, seed), TRAINED, seed, CPU)
    ]
    return {score.name: score.metrics.as_dict() | {"psnr_db": score.psnr_db} for score in scores}


def means(clips: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Over the clips that have a number; a clip without one has too few recovered poses."""
    rows = list(clips.values())
    measured = [row for row in rows if row["rot_deg"] is not None]
    return {
        "clips": len(rows),
        "measured_clips": len(measured),
        "rot_deg": statistics.mean(row["rot_deg"] for row in measured),
        "metric_tr_percent": statistics.mean(row["metric_tr_percent"] for row in measured),
        "psnr_db": statistics.mean(row["psnr_db"] for row in rows),
        "generated_frames": len(rows) * (TRAINED.frames - TRAINED.prefix_frames),
        "frames_without_pose": sum(row["frames"] - row["valid_frames"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="how well the model in the package follows commanded paths")
    parser.add_argument("--worlds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=25, help="of denoising")
    parser.add_argument("--workers", type=int, default=2, help="processes that recover poses")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/world-model.json"))
    options = parser.parse_args()
    test = WorldTest(worlds=options.worlds, steps=options.steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    commanded = commanded_clips(test, TRAINED, device)
    videos = generate_clips(loaded(SHIPPED_MODEL, device), commanded, test, TRAINED.prefix_frames, cameras=True)
    with ProcessPoolExecutor(options.workers, torch.multiprocessing.get_context("spawn")) as pool:
        clips = {
            name: row for world in pool.map(partial(scored, videos, test), test.seeds) for name, row in world.items()
        }
    about = {"commit": commit(), "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU"}
    result = {**about, "torch": torch.__version__, "steps": test.steps, "means": means(clips), "clips": clips}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["means"], indent=1))


if __name__ == "__main__":
    main()
