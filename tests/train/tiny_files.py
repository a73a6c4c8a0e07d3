"""Training from files in a second: a Wan folder with all its parts, and a data set in nuScenes' layout."""

import json
from pathlib import Path

import torch

from merope.datasets.synth import Drive, write_nuscenes
from merope.geometry.cameras import Cameras
from merope.geometry.trajectories import driving_path
from merope.train.config import TrainConfig
from merope.train.toml_config import read_config
from tests.tiny_pipelines import HEIGHT, LENS, WIDTH, tiny_pipeline

SCENES, FRAMES = 3, 9  # nine frames of a scene give five windows of five

CONFIG = f"""
[run]
out = "out"
steps = 2
batch_size = 2
micro_batch = 1
validation_clips = 2
validate_every = 2

[model]
pretrained = "{{root}}/wan"
precision = "fp32"
gradient_checkpointing = false

[branch]
compression = 2
encoding_options = {{{{ partition = [6, 6, 6, 6], native_split = [2, 2, 2], fractions = [0.0, 1.0] }}}}

[data]
kind = "nuscenes"
root = "{{root}}/nuscenes"
version = "v1.0-mini"
split_file = "{{root}}/splits.json"
frames = 5
height = {HEIGHT}
width = {WIDTH}
workers = 0

[objective]
prefix_frames = 1

[optimiser]
learning_rate = 1e-3
"""


def write_tiny_files(root: Path) -> None:
    """A model in `wan`, scenes of coloured noise in `nuscenes`, two scenes to train and one to validate, a config."""
    tiny_pipeline(with_branch=False).save_pretrained(root / "wan")
    generator = torch.Generator().manual_seed(0)

    def paint(cameras: Cameras) -> torch.Tensor:  # uint8 [V, H, W, 3]
        return torch.randint(0, 256, (cameras.count, HEIGHT, WIDTH, 3), dtype=torch.uint8, generator=generator)

    descriptions = ("a street at night", "a street", "rain")
    drives = [
        Drive(driving_path(FRAMES, 12.0, generator, prefix=1), text, start_us=1_600_000_000_000_000 + number * 10**9)
        for number, text in enumerate(descriptions)
    ]
    write_nuscenes(root / "nuscenes", "v1.0-mini", drives, LENS, paint)
    splits = {"train": ["scene-0000", "scene-0001"], "val": ["scene-0002"]}
    (root / "splits.json").write_text(json.dumps(splits))
    (root / "tiny.toml").write_text(CONFIG.format(root=root))


def file_config(root: Path, out: Path, *changes: str) -> TrainConfig:
    """The config of a folder of `write_tiny_files`."""
    return read_config(TrainConfig, root / "tiny.toml", [f"run.out={out}", *changes])
