"""Small transformers with retrieved history, and references for them."""

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from scenes import PINHOLE, random_poses
from torch import Tensor
from wan_models import cameras, perturb, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.attachment import attach
from merope.adapters.history import HistoryReferences
from merope.attention.plan import AttentionPlan
from merope.geometry.cameras import Cameras

PATHS = ("sa", "ca")
COUNT = 2  # references


def references(
    seed: int = 0, batch: int | None = None, times: Any = (101.0, 102.0), count: int = COUNT
) -> HistoryReferences:
    """Frames beside the drive of `cameras`."""
    generator = torch.Generator().manual_seed(50 + seed)
    lead = () if batch is None else (batch,)
    poses = random_poses(*lead, count, seed=seed + 3, spread_m=2.0)
    latents = torch.randn(batch or 1, 4, count, 4, 6, generator=generator)
    return HistoryReferences(latents, Cameras(poses, PINHOLE), times)


def wan_with(
    history: str | None, perturbed: bool = True, dtype: torch.dtype = torch.float32, **config: Any
) -> WanTransformer3DModel:
    transformer = tiny_wan(dtype, num_layers=2)
    branch = attach(transformer, tiny_config(history=history, **config))
    if perturbed:
        perturb(branch)
    return transformer


def run_with(transformer: Any, history: Any, video: Any = None, **inputs: Any) -> Tensor:
    kwargs = {"cameras": cameras() if video is None else video, "history": history}
    return transformer(**{**tiny_inputs(transformer.dtype), **inputs}, attention_kwargs=kwargs)[0]


def same_tables(one: AttentionPlan, other: AttentionPlan) -> bool:
    a, b = one.tensors(), other.tensors()
    return a.keys() == b.keys() and all(torch.allclose(a[name].double(), b[name].double(), atol=1e-5) for name in a)
