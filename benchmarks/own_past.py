"""What a causal model loses by its own past: its blocks after true blocks, and after those that it made.

    python benchmarks/own_past.py [--model FOLDER] [--worlds 2] [--name TEXT] [--out benchmarks/results/own-past.json]

Three paths in each of some worlds that no model was trained on, from the same noise twice. Of every block: PSNR, and
sharpness (squared steps from a pixel to its neighbours, over those of the true frames), means over the clips. Those of
the VAE alone are beside them. A row of the same weights is written over, others are kept.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from world_model import sharpness

from merope.adapters.causal_wan import attach_causal
from merope.adapters.families import family_of
from merope.bench.run_facts import weights_digest
from merope.demo.drive import SHIPPED_MODEL, loaded
from merope.evaluate.world_scores import psnr_db
from merope.formats.video import as_bytes
from merope.formats.writing import replace_text
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.conditions import latent_cameras
from merope.geometry.cameras import Cameras
from merope.train.few_steps import BlockClips, rolled_out
from merope.train.provenance import commit, device_name
from merope.world.clips_file import read_clips
from merope.world.commanded import FIRST_TEST_SEED, CommandedClip, WorldTest, clips_of_world

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def made_twice(
    pipeline: CameraVideoPipeline, commanded: list[CommandedClip], prefix_frames: int
) -> dict[str, list[Tensor]]:  # uint8 [T, H, W, 3] each
    """The clips through the VAE alone, and generated after either past."""
    block, levels, transformer = pipeline.causal_block_frames, pipeline.denoising_levels, pipeline.transformer
    if block is None or levels is None:
        raise SystemExit("--model must be a causal model that says its noise levels, as the one in the package")
    attach_causal(transformer)
    clean = torch.cat([pipeline.encode_frames(clip.true[None].to(DEVICE)) for clip in commanded])
    poses = torch.stack([clip.cameras.world_from_camera for clip in commanded])
    cameras = latent_cameras(Cameras(poses, commanded[0].cameras.lens).to(DEVICE), pipeline.strides.frames)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)).to(clean)
    text = family_of(transformer).no_text(transformer.config).to(clean).expand(len(clean), -1, -1)
    clips = BlockClips(clean, noise, text, cameras, pipeline.strides.latent_frames(prefix_frames), block)
    latents = {
        "VAE alone": clean,
        "after true blocks": rolled_out(transformer, clips, levels, past=clean)[-1],
        "after its own blocks": rolled_out(transformer, clips, levels)[-1],
    }
    return {name: [decoded(pipeline, one) for one in each] for name, each in latents.items()}


def decoded(pipeline: CameraVideoPipeline, latents: Tensor) -> Tensor:  # [C, T, h, w] -> uint8 [T, H, W, 3]
    return as_bytes((pipeline.decode_latents(latents[None])[0].movedim(0, -1).cpu() + 1.0) / 2.0)


def numbers_of(videos: list[Tensor], true: list[Tensor], frames: range) -> dict[str, float]:
    """Means over clips, of some of their frames."""
    pairs = [
        (made[frames.start : frames.stop], own[frames.start : frames.stop])
        for made, own in zip(videos, true, strict=True)
    ]
    return {
        "psnr_db": statistics.mean(psnr_db(*pair) for pair in pairs),
        "sharpness": statistics.mean(sharpness(*pair) for pair in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="what a causal model loses by its own past")
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="pipeline folder (the one in the package)")
    parser.add_argument("--worlds", type=int, default=2)
    parser.add_argument("--name", default="", help="of the model, in the file")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    pipeline, clips = loaded(options.model, DEVICE), read_clips(options.model)[0]
    seeds = range(FIRST_TEST_SEED, FIRST_TEST_SEED + options.worlds)
    commanded = [clip for seed in seeds for clip in clips_of_world(WorldTest().paths(clips, seed), clips, seed, DEVICE)]
    made = made_twice(pipeline, commanded, clips.prefix_frames)
    true = [clip.true.cpu() for clip in commanded]
    length = (pipeline.causal_block_frames or 1) * pipeline.strides.frames
    blocks = [range(start, start + length) for start in range(clips.prefix_frames, clips.frames, length)]
    row: dict[str, Any] = {"name": options.name, "weights": weights_digest(options.model), "worlds": options.worlds}
    row |= {"device": device_name(DEVICE), "torch": torch.__version__, "commit": commit(), "clips": len(commanded)}
    row["blocks"] = [{name: numbers_of(videos, true, frames) for name, videos in made.items()} for frames in blocks]
    for number, block in enumerate(row["blocks"], start=1):
        told = (f"{name} {one['psnr_db']:.1f} dB, {one['sharpness']:.2f}" for name, one in block.items())
        print(f"block {number}:", "; ".join(told))
    if options.out is not None:
        kept = json.loads(options.out.read_text()) if options.out.exists() else []
        rows = [one for one in kept if one["weights"] != row["weights"]]
        replace_text(options.out, json.dumps([*rows, row], indent=1) + "\n")


if __name__ == "__main__":
    main()
