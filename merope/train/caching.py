"""`merope data cache`: the clips of a training config through its VAE and text encoder, once."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.data.cache import write_cache
from merope.errors import invalid
from merope.train.clip_streams import FrameEncoder, training_source, validation_source
from merope.train.config import FileData, TrainConfig
from merope.train.model import build_model


def cache_clips(config: TrainConfig, folder: Path, validation: bool) -> dict[str, str]:  # name -> why it was skipped
    """Encode all training (or validation) clips of a config into a folder that [data] kind = "cache" reads."""
    data = config.data
    if not isinstance(data, FileData):
        fix = "worlds are rendered as they are needed; a cache needs no cache"
        raise invalid("data.kind", '"nuscenes", "videos" or "panshot"', repr(data.kind), fix)
    source = validation_source(data) if validation else training_source(data)
    if source is None:
        raise invalid("validation clips", "named in [data]", "none", "add split_file or validation_manifest")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config, device, sharded=False)
    model.pipeline.strides.check(data.height, data.width, data.frames)
    text = FrameEncoder(model)

    @torch.no_grad()
    def encode_frames(frames: Tensor) -> Tensor:
        return model.pipeline.encode_frames(frames)

    return write_cache(
        folder, source, encode_frames, lambda caption: without_padding(text.text(caption)), _about(config)
    )


def without_padding(text: Tensor) -> Tensor:  # [L, D] -> [l, D]
    """Wan pads text with zero vectors; at least one row stays."""
    used = text.abs().amax(dim=-1).nonzero()
    return text[: int(used.max()) + 1 if len(used) else 1]


def _about(config: TrainConfig) -> dict[str, Any]:
    data = config.data
    assert isinstance(data, FileData)
    return {"model": config.model.pretrained, "frames": data.frames, "height": data.height, "width": data.width}
