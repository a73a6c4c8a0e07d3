"""Training runs that take a second: the tiny config made smaller still."""

import json
from pathlib import Path

from merope.train.config import TrainConfig
from merope.train.toml_config import read_config

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"

SMALLER = (
    "run.batch_size=4",
    "run.micro_batch=1",
    "run.validation_clips=0",
    "run.checkpoint_every=1000",
    "model.architecture.num_attention_heads=1",
    "model.architecture.attention_head_dim=48",
    "model.architecture.ffn_dim=32",
    "model.architecture.num_layers=2",
    "branch.compression=1",
    "branch.encoding_options={partition=[12,12,12,12], native_split=[4,4,4], fractions=[0.0,1.0]}",
    "data.frames=4",
    "data.height=16",
    "data.width=24",
)


def tiny_config(out: Path, *changes: str) -> TrainConfig:
    """A model of 48 channels on clips of 4 frames with 2 × 3 tokens, four clips a step, one at a time."""
    return read_config(TrainConfig, TINY, [*SMALLER, f"run.out={out}", *changes])


def losses(out: Path) -> list[float]:
    """Of every step that the log of a run has."""
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]
