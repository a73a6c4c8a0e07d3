"""`merope data cache`: the clips of a training config through its VAE and text encoder, once."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from merope.datasets.cache import write_cache
from merope.datasets.data_kind import FileData, FrameData
from merope.datasets.kinds import DATA_KINDS, MixtureData
from merope.errors import invalid
from merope.formats.parts import Part
from merope.train.clip_streams import FrameEncoder, check_sizes
from merope.train.config import TrainConfig
from merope.train.model import build_model

SAMPLING = {field.name for field in fields(FileData)} - {"kind"}
"""Settings of the data that do not change what a clip holds."""

NEWER = {"cameras": ("CAM_FRONT",)}
"""Settings that caches of older versions do not name, and what they were made with."""


def of_source(config: TrainConfig, name: str) -> TrainConfig:
    """The config with one source of its mixture as all its data."""
    if not isinstance(config.data, MixtureData):
        raise invalid("data.kind", '"mixture" for --source', repr(config.data.kind), "leave --source out")
    return replace(config, data=replace(config.data.source(name), name="", weight=1.0))


def cache_clips(
    config: TrainConfig, folder: Path, validation: bool, part: Part | None = None
) -> dict[str, str]:  # name -> why it was skipped
    """Encode all training (or validation) clips of a config into a folder that [data] kind = "cache" reads."""
    data = config.data
    if not isinstance(data, FrameData):
        kinds = " or ".join(f'"{name}"' for name, kind in DATA_KINDS.items() if issubclass(kind, FrameData))
        fix = "worlds are rendered as they are needed; a cache needs no cache"
        if isinstance(data, MixtureData):
            fix = f"add --source {' or '.join(data.source_names)}, and mix the caches"
        raise invalid("data.kind", kinds, repr(data.kind), fix)
    source = data.validation_clips() if validation else data.training_clips()
    if source is None:
        raise invalid("validation clips", "named in [data]", "none", "name them there, see docs/training.md")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config, device, sharded=False)
    check_sizes(config, model, data.height, data.width, data.frames)
    about = contents(config, "validation" if validation else "training")
    encoders = (model.pipeline.encode_frames, FrameEncoder(model).text)
    return write_cache(folder, source, *encoders, about, data.workers, part)


def contents(config: TrainConfig, part: str) -> dict[str, Any]:
    """What decides the files of a cache, as JSON."""
    named = {name: value for name, value in asdict(config.data).items() if name not in SAMPLING}
    data = {name: value for name, value in named.items() if name not in NEWER or value != NEWER[name]}
    plain = json.loads(json.dumps(data, default=str))
    return {"model": config.model.pretrained, "clips": part, "data": plain}
