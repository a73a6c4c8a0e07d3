"""Where a trained row of the world benchmark is better than another: its denoising loss by noise and by frame.

    python benchmarks/world_losses.py --models raynova=outputs/world/raynova-seed0/trained merope=…
        [--out benchmarks/results/world-losses.json]

True clips of unseen worlds with the same noise for every model. At much noise a frame has to be taken from the given
ones, as the command says; at little noise it is seen, and what helps is to know what goes with what. What was measured
before of other models stays in the file.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from merope.bench.provenance import commit, device_name
from merope.bench.world import load_row
from merope.data.world_clips import WorldClips, as_video
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.train.objective import TIMESTEPS
from merope.train.toml_config import read_config

CONFIG = Path(__file__).parents[1] / "configs" / "world" / "merope.toml"
NOISE = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99)  # σ
CLIPS, AT_ONCE = 48, 16


@torch.no_grad()
def losses(folder: Path, clips: WorldClips, count: int, device: torch.device) -> Tensor:  # [len(NOISE), generated]
    """Mean squared error of the predicted velocity, by amount of noise and generated frame."""
    transformer, given = load_row(folder, device).transformer, clips.prefix_frames
    patch = transformer.config.patch_size
    tokens = clips.height // patch[1] * (clips.width // patch[2])
    total = torch.zeros(len(NOISE), clips.frames - given, dtype=torch.float64)
    for first in range(0, count, AT_ONCE):
        seeds = list(range(first, min(first + AT_ONCE, count)))
        cameras = clips.cameras(seeds, device)
        true = as_video(clips.pictures(seeds, cameras)).to(device)
        noise = torch.stack([torch.randn(true.shape[1:], generator=torch.Generator().manual_seed(s)) for s in seeds])
        noise, text = noise.to(device), torch.zeros(len(seeds), 1, transformer.config.text_dim, device=device)
        for index, sigma in enumerate(NOISE):
            level = sigma * (torch.arange(clips.frames, device=device) >= given)
            noised = torch.lerp(true, noise, level[:, None, None])
            timestep = (TIMESTEPS * level).repeat_interleave(tokens).expand(len(seeds), -1)
            velocity = transformer(noised, timestep, text, attention_kwargs={"cameras": cameras}).sample
            error = (velocity - (noise - true)).square().mean(dim=(1, 3, 4))[:, given:]
            total[index] += error.double().sum(0).cpu()
    return total / count


def main() -> None:
    """Measure every model that is named, and put it in place of what the file had of it."""
    parser = argparse.ArgumentParser(description="denoising loss of trained rows by noise and frame")
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--clips", type=int, default=CLIPS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/world-losses.json"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clips = world_clips(read_config(TrainConfig, CONFIG, []))
    models = json.loads(options.out.read_text())["models"] if options.out.exists() else {}
    print("loss at noise", *(f"{sigma:>7}" for sigma in NOISE))
    for model in options.models:
        name, folder = model.split("=", 1)
        found = losses(Path(folder), clips, options.clips, device)
        about = {"commit": commit(), "device": device_name(device), "torch": torch.__version__, "clips": options.clips}
        models[name] = {**about, "by_noise_and_frame": found.tolist()}
        options.out.write_text(json.dumps({"noise": NOISE, "models": models}, indent=1) + "\n")
        print(f"{name:<13}", *(f"{value:7.4f}" for value in found.mean(1)), flush=True)


if __name__ == "__main__":
    main()
