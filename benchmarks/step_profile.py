"""What a training step of a config spends its time on: seconds, clips per second, and the kernels that take longest.

    python benchmarks/step_profile.py configs/miniature/merope.toml [--clips 32] [--set KEY=VALUE ...] [--out FILE.json]

The model is the config's own, its clips are random latents on random drives, new ones in every step, so plans are made
as in training. Nothing is rendered, encoded or saved: latents are drawn on the GPU, where a pool has them. A step is
timed as it is, then one more is seen by the profiler.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from train_step import now_s

from merope.geometry.cameras import Cameras
from merope.geometry.trajectories import driving_path
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.train.loop import train_step
from merope.train.model import Model, build_model
from merope.train.optimisers import build_optimisers
from merope.train.parallel import Ranks
from merope.train.provenance import commit, device_name
from merope.train.streams import Examples
from merope.train.toml_config import read_config
from merope.world.clips import WorldClips

KINDS = {
    "attention": ("attend", "gradients_", "sdpa", "flash", "fmha", "pack_", "bound_and", "finish_"),
    "products": ("gemm", "cutlass", "nvjet", "addmm", "bmm"),
    "fused by the compiler": ("triton_",),
    "optimiser and averages": ("multi_tensor", "foreach", "fused_adam"),
}
"""Parts of kernels' names, in lower case; what has none of them is "other"."""


@dataclass(frozen=True, eq=False)
class RandomClips:
    """A stream of random latents along random drives."""

    model: Model
    clips: WorldClips
    count: int

    def step(self, step: int) -> Iterator[Examples]:
        pipeline, device, clips = self.model.pipeline, self.model.device, self.clips
        dice, own_dice = torch.Generator().manual_seed(step), torch.Generator(device).manual_seed(step)
        drives = [driving_path(clips.frames, clips.frame_rate_hz, dice, clips.prefix_frames) for _ in range(self.count)]
        size = (pipeline.strides.latent_frames(clips.frames), *pipeline.strides.latent_size(clips.height, clips.width))
        no_text = self.model.no_text().to(device)
        shape = (self.count, self.model.transformer.config.in_channels, *size)
        yield Examples(
            names=tuple(f"random-{place}" for place in range(self.count)),
            places=tuple(range(self.count)),
            clean=torch.randn(shape, generator=own_dice, device=device),
            text=no_text.expand(self.count, -1, -1),
            no_text=no_text,
            cameras=Cameras(torch.stack(drives), clips.lens(0), plan_dtype=torch.float32).to(device),
        )


def profiled(config: TrainConfig, device: torch.device, warm_up: int, steps: int) -> dict[str, Any]:
    """Seconds of steps, and kernels of one more."""
    model, ranks = build_model(config, device, sharded=False), Ranks(0, 1, device)
    optimisers = build_optimisers(config, model.denoiser)
    stream: Any = RandomClips(model, world_clips(config), config.run.batch_size)
    times = []
    for step in range(warm_up + steps):
        began_s = now_s(device)
        train_step(config, model, stream, optimisers, ranks, step)
        times.append(now_s(device) - began_s)
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    ) as seen:
        train_step(config, model, stream, optimisers, ranks, warm_up + steps)
        now_s(device)
    step_s = sorted(times[warm_up:])[steps // 2]
    kernels = kernel_times_ms(seen, device)
    return {
        "step_s": step_s,
        "clips_per_s": config.run.batch_size / step_s,
        "kernels_ms": sum(ms for ms, _ in kernels.values()),
        "launches": sum(count for _, count in kernels.values()),
        "kinds_ms": kinds_ms(kernels),
        "longest": [[name, ms, count] for name, (ms, count) in sorted(kernels.items(), key=lambda item: -item[1][0])],
    }


def kernel_times_ms(seen: profile, device: torch.device) -> dict[str, tuple[float, int]]:
    """By name: milliseconds in all, and how often. On a CPU, of PyTorch's own operations."""
    kernels: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    on_gpu = device.type == "cuda"
    for event in seen.events():
        if (event.device_type == DeviceType.CUDA) == on_gpu:
            ms, count = kernels[event.name]
            own_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            kernels[event.name] = ms + own_us / 1e3, count + 1
    return dict(kernels)


def kinds_ms(kernels: dict[str, tuple[float, int]]) -> dict[str, float]:
    sums = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, (ms, _) in kernels.items():
        kind = next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), "other")
        sums[kind] += ms
    return sums


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="what a training step spends its time on")
    parser.add_argument("config", type=Path)
    parser.add_argument("--clips", type=int, help="of a step (the config's batch size)")
    parser.add_argument("--steps", type=int, default=10, help="that are timed (10)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before (5)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the config")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, config = torch.device(options.device), read_config(TrainConfig, options.config, options.set)
    clips = options.clips or config.run.batch_size
    config = replace(config, run=replace(config.run, batch_size=clips, micro_batch=clips))
    row = profiled(config, device, options.warm_up, options.steps)
    print(f"{row['step_s']:.4f} s, {row['clips_per_s']:.0f} clips/s, kernels {row['kernels_ms']:.0f} ms", flush=True)
    for kind, ms in row["kinds_ms"].items():
        print(f"{ms:9.2f} ms  {kind}")
    for name, ms, count in row["longest"][:40]:
        print(f"{ms:9.2f} ms {count:6} × {name[:90]}")
    if options.out is not None:
        about = {"config": str(options.config), "gpu": device_name(device), "torch": torch.__version__}
        row["longest"] = row["longest"][:60]
        options.out.write_text(json.dumps({**about, "commit": commit(), "clips": clips, **row}, indent=1))


if __name__ == "__main__":
    main()
