"""One training step on the real Wan2.2 TI2V-5B architecture with random weights: clips per second and peak memory.

    python benchmarks/train_step.py [--out benchmarks/results/train_step.json]

Latents are those of 49 frames of 288×512: 13 cameras of 9×16 tokens, three clean latent frames. Rows: the branch alone
(frozen base in bf16) and all weights (fp32 with bf16 arithmetic), each with gradient checkpointing, batch 1.
"""

import argparse
import json
import platform
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from merope.adapters.attachment import attach
from merope.adapters.branch_config import CameraBranchConfig
from merope.adapters.camera_branch import CameraBranch
from merope.datasets.world_data import WorldData
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.geometry.trajectories import driving_path
from merope.train.config import ModelSection, RunSection, TrainConfig
from merope.train.loop import train_step
from merope.train.model import Model
from merope.train.optimisers import build_optimisers
from merope.train.parallel import Ranks
from merope.train.provenance import commit
from merope.train.streams import Examples

WAN22_5B = {
    "num_layers": 30,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "ffn_dim": 14336,
    "in_channels": 48,
    "out_channels": 48,
    "patch_size": (1, 2, 2),
    "text_dim": 4096,
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}
TINY_VAE = {  # gives the strides and the number of channels; it encodes nothing here
    "base_dim": 4,
    "z_dim": 48,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
FRAMES, HEIGHT, WIDTH, PREFIX = 49, 288, 512, 9

NO_KERNEL = re.compile(r"#|^Mem(cpy|set)")
"""Spans of the optimiser, copies and fills."""

Trainable = Literal["branch", "all"]


@dataclass(frozen=True)
class RandomStream:
    """The same random latents every step."""

    examples: Examples

    def step(self, step: int) -> Iterator[Examples]:
        yield self.examples


def random_examples(device: torch.device, frames: int = FRAMES, height: int = HEIGHT, width: int = WIDTH) -> Examples:
    """Latents of one clip of so many pixels, with text and a driven path."""
    dice = torch.Generator().manual_seed(0)
    path = driving_path(frames, 12.0, dice, PREFIX)
    focal = 0.79 * width
    lens = Pinhole(focal, focal, width / 2, height / 2, width, height)
    text = torch.randn(1, 512, 4096, generator=dice)
    latents = torch.randn(1, 48, (frames - 1) // 4 + 1, height // 16, width // 16, generator=dice)
    return Examples(
        names=("random",),
        places=(0,),
        clean=latents.to(device),
        text=text.to(device),
        no_text=torch.zeros(512, 4096, device=device),
        cameras=Cameras(path[None], lens, plan_dtype=torch.float32).to(device),
    )


def branch_config(encoding: str) -> CameraBranchConfig | Literal["none"]:
    return "none" if encoding == "none" else CameraBranchConfig(encoding=encoding)


def train_config(trainable: Trainable, encoding: str) -> TrainConfig:
    return TrainConfig(
        run=RunSection(Path("unused"), batch_size=1, validation_clips=0),
        model=ModelSection(architecture=dict(WAN22_5B), trainable=trainable),
        data=WorldData("world", FRAMES, HEIGHT, WIDTH),
        branch=branch_config(encoding),
    )


def random_pipeline(architecture: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CameraVideoPipeline:
    """A transformer with random weights and what a pipeline needs around it, no camera branch.

    In half precision as `from_pretrained(torch_dtype=…)` leaves it: norms, modulation and time embedding stay in fp32.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            transformer = WanTransformer3DModel(**architecture)
    finally:
        torch.set_default_dtype(default)
    for name, parameter in transformer.named_parameters():
        if any(kept in name for kept in transformer._keep_in_fp32_modules):
            parameter.data = parameter.data.float()
    vae, scheduler = AutoencoderKLWan(**TINY_VAE), FlowMatchEulerDiscreteScheduler(shift=5.0)
    return CameraVideoPipeline(None, None, vae.to(device), scheduler, transformer, expand_timesteps=True)


def random_model(trainable: Trainable, device: torch.device, architecture: Mapping[str, Any] = WAN22_5B) -> Model:
    """In fp32 if all weights are trained, else frozen in bf16; with gradient checkpointing, no camera branch yet."""
    pipeline = random_pipeline(architecture, torch.float32 if trainable == "all" else torch.bfloat16, device)
    pipeline.transformer.requires_grad_(trainable == "all").train()
    pipeline.transformer.enable_gradient_checkpointing()
    return Model(pipeline, "bf16", device, PREFIX)


def trainable_branch(model: Model, config: CameraBranchConfig) -> CameraBranch:
    """A branch whose weights are trained, in fp32."""
    branch = attach(model.transformer, config)
    for processor in branch.processors().values():
        processor.requires_grad_(True).to(torch.float32)
    return branch


def timed_steps(
    config: TrainConfig, model: Model, examples: Examples, warm_up: int, steps: int
) -> tuple[list[float], list[float]]:  # seconds of the steps after warm-up, losses of all
    """Whole training steps with a fresh optimiser."""
    optimisers = build_optimisers(config, model.transformer)
    stream, ranks = RandomStream(examples), Ranks(0, 1, model.device)
    times, losses = [], []
    for step in range(warm_up + steps):
        started_s = now_s(model.device)
        losses.append(train_step(config, model, stream, optimisers, ranks, step)[0])  # type: ignore[arg-type]
        times.append(now_s(model.device) - started_s)
    return times[warm_up:], losses


def kernels_of_step(config: TrainConfig, model: Model, examples: Examples) -> tuple[float, int]:
    """Seconds that the GPU computes in a training step, and how many kernels that takes: what launching cannot blur."""
    optimisers = build_optimisers(config, model.transformer)
    stream, ranks = RandomStream(examples), Ranks(0, 1, model.device)
    train_step(config, model, stream, optimisers, ranks, 0)  # type: ignore[arg-type]  # makes the optimiser's state
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        train_step(config, model, stream, optimisers, ranks, 1)  # type: ignore[arg-type]
        now_s(model.device)
    on_gpu = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    kernels = [event for event in on_gpu if not NO_KERNEL.search(event.name)]
    return sum(event.self_device_time_total for event in kernels) / 1e6, len(kernels)


def now_s(device: torch.device) -> float:
    """The time when everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(trainable: Trainable, encoding: str, device: torch.device, steps: int) -> dict[str, Any]:
    """One row."""
    config, model = train_config(trainable, encoding), random_model(trainable, device)
    if config.branch != "none":
        trainable_branch(model, config.branch)
    torch.cuda.reset_peak_memory_stats()
    times, losses = timed_steps(config, model, random_examples(device), warm_up=2, steps=steps)
    trained, total = model.parameter_counts()
    median_s = sorted(times)[len(times) // 2]
    return {
        "encoding": encoding,
        "trainable": trainable,
        "trained_parameters": trained,
        "parameters": total,
        "step_s": median_s,
        "spread_s": max(times) - min(times),
        "clips_per_s": 1 / median_s,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/train_step.json"))
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for trainable in ("branch", "all"):
        for encoding in ("none", "ucpe", "merope"):
            if trainable == "branch" and encoding == "none":
                continue  # nothing to train
            row = measure(trainable, encoding, device, options.steps)
            torch.cuda.empty_cache()
            print({name: value for name, value in row.items() if name != "losses"}, flush=True)
            rows.append(row)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**about, "commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
