"""Where a result comes from: the tree, the device, and how long each piece of a training run took."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from merope.train import checkpoint
from merope.train.config import TrainConfig

FINAL_STEPS = 100
"""Steps at the end of a run whose mean loss is its final loss: that of a single batch says little."""


def commit() -> str:
    """The commit of the source tree, with "+" if tracked files differ from it; MEROPE_COMMIT outside a checkout."""
    here = Path(__file__).parents[2]  # of site-packages no file is tracked, whatever repository it lies in
    try:
        _git(here, "ls-files", "--error-unmatch", "merope/__init__.py")
        head = _git(here, "rev-parse", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("MEROPE_COMMIT", "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def steps_done(config: TrainConfig) -> int:
    """Steps of a run's newest checkpoint."""
    places = checkpoint.complete(config.run.out / "checkpoints")
    return int(places[-1].name.removeprefix("step-")) if places else 0


@contextmanager
def timed_piece(config: TrainConfig) -> Iterator[None]:
    """Write a line about a piece of training into the run's folder: from which step to which, how long, on what."""
    begun, began_s = steps_done(config), time.perf_counter()
    try:
        yield
    finally:
        done = steps_done(config)
        if done > begun:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            piece = {"from": begun, "to": done, "wall_s": round(time.perf_counter() - began_s, 1)}
            with (config.run.out / "pieces.jsonl").open("a") as stream:
                stream.write(json.dumps(piece | {"gpu": device_name(device), "commit": commit()}) + "\n")


def provenance(config: TrainConfig) -> dict[str, Any]:
    """What a result row says about its run. `trained_s` is None if a piece was killed before it could be recorded."""
    pieces = _lines(config.run.out / "pieces.jsonl")
    whole = _cover(pieces, config.run.steps)
    log = _lines(config.run.out / "log.jsonl")
    losses = [row["loss"] for row in log[-FINAL_STEPS:]]
    validation = [row["validation_loss"] for row in log if "validation_loss" in row]
    return {
        "row": config.run.out.name.removesuffix(f"-seed{config.run.seed}"),
        "seed": config.run.seed,
        "steps": config.run.steps,
        "batch_size": config.run.batch_size,
        "pretrained": config.model.pretrained,
        "trainable": config.model.trainable,
        "branch": config.branch if config.branch == "none" else asdict(config.branch),
        "parameters": _parameters(config.run.out / "trained"),
        "gpu": ", ".join(sorted({piece["gpu"] for piece in pieces})),
        "torch": torch.__version__,
        "commit": ", ".join(sorted({piece["commit"] for piece in pieces})),
        "trained_s": round(sum(piece["wall_s"] for piece in pieces), 1) if whole else None,
        "final_loss": sum(losses) / len(losses) if losses else None,
        "validation_loss": validation[-1] if validation else None,
    }


def _cover(pieces: list[dict[str, Any]], steps: int) -> bool:
    """Whether each piece begins where the one before ended, from the first step to the last."""
    edges = [0, *(piece["to"] for piece in pieces)]
    return edges[-1] >= steps and [piece["from"] for piece in pieces] == edges[:-1]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _parameters(folder: Path) -> int:
    """Numbers in all weight files of a folder, from their headers."""
    count = 0
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            count += sum(torch.Size(weights.get_slice(name).get_shape()).numel() for name in weights.keys())  # noqa: SIM118
    return count
