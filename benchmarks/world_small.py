"""Rows of the world benchmark in small, on a CPU core: which of two encodings is learned faster, in five minutes a row.

    python benchmarks/world_small.py merope raynova "raynova branch.encoding_options.direction_scale=0.5"
        [--seeds 0 1] [--out benchmarks/results/world-small.json]

A row is that of configs/world, with changes behind its name where wanted. Its model has four blocks of one head (1.2 M
parameters), its clips have 7 frames of 24×40 pixels, two of them given, in 6×10 tokens. What is reported is the loss on
48 clips of unseen worlds: nothing is generated, and a difference here is a hint, not a result of the benchmark. Stopped
rows go on, finished ones are not trained again, and what was measured before of other rows stays in the file.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from merope.train.config import TrainConfig
from merope.train.loop import train
from merope.train.provenance import commit, steps_done
from merope.train.toml_config import read_config

CONFIGS = Path(__file__).parents[1] / "configs" / "world"
SMALL = (
    "run.steps=300",
    "run.batch_size=8",
    "run.micro_batch=8",
    "run.validate_every=100",
    "run.checkpoint_every=100",
    "model.compile=false",
    'model.precision="fp32"',
    "model.architecture.patch_size=[1, 4, 4]",
    "model.architecture.num_attention_heads=1",
    "model.architecture.num_layers=4",
    "model.architecture.ffn_dim=384",
    "model.architecture.freq_dim=64",
    "data.frames=7",
    "data.height=24",
    "data.width=40",
    "objective.prefix_frames=2",
    "optimiser.learning_rate=1.5e-3",
    "optimiser.warmup_steps=50",
    "optimiser.decay_steps=100",
)


def small_config(row: str, changes: list[str], seed: int, runs: Path) -> TrainConfig:
    """A row in small, in a folder of its own."""
    words = [change.removeprefix("branch.encoding_options.").replace("=", "-") for change in changes]
    out = runs / "-".join([row, *words, f"seed{seed}"])
    return read_config(TrainConfig, CONFIGS / f"{row}.toml", [*SMALL, *changes, f'run.out="{out}"', f"run.seed={seed}"])


def held_out_losses(config: TrainConfig) -> dict[str, float]:
    """Train, or go on; the loss on held-out clips after so many steps. A run that is stopped ends the program."""
    train(config)
    if steps_done(config) < config.run.steps:
        sys.exit(1)
    log = [json.loads(line) for line in (config.run.out / "log.jsonl").read_text().splitlines()]
    return {str(row["step"]): round(row["validation_loss"], 5) for row in log if "validation_loss" in row}


def main() -> None:
    """Train what is named, and put each in place of what the file had of it, as soon as it is trained."""
    parser = argparse.ArgumentParser(description="rows of the world benchmark in small")
    parser.add_argument("rows", nargs="+", metavar="ROW", help='of configs/world; changes follow it: "ROW KEY=VALUE …"')
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, default=Path("outputs/world-small"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/world-small.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for seed in options.seeds:
        for row in options.rows:
            name, *changes = row.split()
            losses = held_out_losses(small_config(name, changes, seed, options.runs))
            put(options.out, {"row": row, "seed": seed, "held_out_loss": losses, "commit": commit()})


def put(file: Path, new: dict[str, Any]) -> None:
    """Add a row to the file, or replace it, and print it."""
    before = json.loads(file.read_text()) if file.exists() else []
    rows = [row for row in before if (row["row"], row["seed"]) != (new["row"], new["seed"])]
    file.write_text(json.dumps([*rows, new], indent=1) + "\n")
    print(new["row"], "seed", new["seed"], *(f"{loss:.4f}" for loss in new["held_out_loss"].values()), flush=True)


if __name__ == "__main__":
    main()
