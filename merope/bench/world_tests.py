"""The world benchmark: train an encoding on fresh worlds, command three paths in unseen ones, measure in metres.

A row is one config and one seed: same initialisation, data order, steps and optimiser for every encoding. Where a path
goes after the prefix cannot be told from it, so a model that does not look at the cameras must fail.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from merope.adapters.wan import load_branch
from merope.bench.provenance import device_name
from merope.errors import invalid
from merope.formats.video import as_bytes
from merope.generate.camera_video import CameraVideoPipeline
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import stacked
from merope.geometry.trajectories import turn_by
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.world.clips import WorldClips
from merope.world.render import Render, render
from merope.world.scene import World

FIRST_TEST_SEED = 100_000
"""Worlds from here on (below those of training) are commanded; smaller seeds serve validation."""

MANOEUVRES = ("original", "left", "right")

CLIPS_ON_GPU, CLIPS_ON_CPU = 48, 3
"""Clips that are generated together; a clip's noise does not depend on it. On a CPU more would only hide progress."""


@dataclass(frozen=True)
class WorldTest:
    """What is commanded: three paths in each of some unseen worlds.

    `stretch` multiplies how far every camera is from the first one, the prefix included; rotations stay. Training is at
    1, so that 2 and 4 command speeds and baselines that no model has seen.
    """

    worlds: int = 32
    turn_deg: float = 30.0  # heading that the last frame of a left or right turn gains
    steps: int = 30  # of denoising
    stretch: float = 1.0

    def __post_init__(self) -> None:
        if self.worlds < 1:
            raise invalid("worlds", "at least 1", self.worlds, "the table uses 32")
        if not 0.0 < self.stretch < math.inf:
            raise invalid("stretch", "positive and finite", self.stretch, "the table uses 1, 2 and 4")

    @property
    def seeds(self) -> range:
        return range(FIRST_TEST_SEED, FIRST_TEST_SEED + self.worlds)

    def paths(self, clips: WorldClips, seed: int) -> dict[str, Tensor]:  # each [T, 4, 4]
        """The drive of a world, and the same with a turn to either side after the prefix."""
        path, yaw_rad = clips.path(seed), math.radians(self.turn_deg)
        paths = {
            "original": path,
            "left": turn_by(path, -yaw_rad, clips.prefix_frames),
            "right": turn_by(path, yaw_rad, clips.prefix_frames),
        }
        return {name: stretched(path, self.stretch) for name, path in paths.items()}


def benchmark_tests(worlds: int, stretches: Sequence[float] = ()) -> list[WorldTest]:
    """The benchmark's own test, then one for every other stretch, in half as many worlds."""
    others = sorted(set(stretches) - {1.0})
    return [WorldTest(worlds), *(WorldTest((worlds + 1) // 2, stretch=stretch) for stretch in others)]


def stretched(
    world_from_camera: Tensor,  # [T, 4, 4]
    stretch: float,
) -> Tensor:  # [T, 4, 4]
    """The path with every camera so many times as far from the first one; rotations stay."""
    path, first = world_from_camera.clone(), world_from_camera[:1, :3, 3]
    path[:, :3, 3] = first + stretch * (path[:, :3, 3] - first)
    return path


@dataclass(frozen=True, eq=False)
class CommandedClip:
    """One clip of the test: where the camera should go and what it would see."""

    seed: int
    manoeuvre: str
    cameras: Cameras  # [T]
    true: Tensor  # uint8 [T, H, W, 3]
    world: World
    seen: Render  # what `true` is made of, with its depth; on the CPU

    @property
    def name(self) -> str:
        return f"world-{self.seed}-{self.manoeuvre}"


def commanded_clips(test: WorldTest, clips: WorldClips, device: torch.device) -> list[CommandedClip]:
    """All clips of a test."""
    return [clip for seed in test.seeds for clip in clips_of_world(test, clips, seed, device)]


def clips_of_world(test: WorldTest, clips: WorldClips, seed: int, device: torch.device) -> list[CommandedClip]:
    """The three clips of a world, which is cleared for all of them alike: they show the same street."""
    paths = test.paths(clips, seed)
    world = World(seed, device).cleared(torch.stack(list(paths.values())).to(device))
    commanded = []
    for manoeuvre, path in paths.items():
        cameras = Cameras(path, clips.lens(seed), plan_dtype=torch.float32)
        seen = render(world, cameras.to(device), clips.height, clips.width)
        seen = Render(seen.image.cpu(), seen.depth_m.cpu(), seen.valid.cpu(), world)
        commanded.append(CommandedClip(seed, manoeuvre, cameras, as_bytes(seen.image), world, seen))
    return commanded


def generate_clips(
    pipeline: CameraVideoPipeline,
    commanded: Sequence[CommandedClip],
    test: WorldTest,
    prefix_frames: int,
    cameras: bool,
) -> dict[str, Tensor]:  # name -> uint8 [T, H, W, 3]
    """Generate every clip from its prefix; the noise of a clip depends on its world alone."""
    pipeline.set_progress_bar_config(disable=True)
    device, videos = pipeline.transformer.device, {}
    at_once = CLIPS_ON_CPU if device.type == "cpu" else CLIPS_ON_GPU
    for start in range(0, len(commanded), at_once):
        part = commanded[start : start + at_once]
        print(f"generating clip {start + 1} of {len(commanded)}", end="\r", file=sys.stderr, flush=True)
        true = torch.stack([clip.true for clip in part])
        frames = pipeline(
            cameras=_together([clip.cameras for clip in part]) if cameras else None,
            prefix=true[:, :prefix_frames],
            height=true.shape[2],
            width=true.shape[3],
            num_frames=true.shape[1],
            num_inference_steps=test.steps,
            guidance_scale=1.0,
            generator=[torch.Generator(device).manual_seed(clip.seed) for clip in part],
            output_type="pt",
            return_dict=False,
        )[0]
        for clip, video in zip(
            part, (255.0 * frames).round().to(torch.uint8).permute(0, 1, 3, 4, 2).contiguous().cpu(), strict=True
        ):
            videos[clip.name] = video
    print(file=sys.stderr)
    return videos


def load_trained(config: TrainConfig, device: torch.device) -> CameraVideoPipeline:
    """The pipeline of a finished run."""
    folder = config.run.out / "trained"
    if not folder.is_dir():
        raise invalid(str(folder), "what a finished run wrote", "nothing", "train it first: merope bench world CONFIG")
    return load_row(folder, device)


def load_row(folder: Path, device: torch.device) -> CameraVideoPipeline:
    """A trained pipeline with its branch; that of the row without cameras has none."""
    pipeline = CameraVideoPipeline.from_pretrained(folder)
    if (folder / "branch").is_dir():
        load_branch(pipeline.transformer, folder / "branch")
    return pipeline.to(device)


def generated_file(config: TrainConfig, test: WorldTest) -> Path:
    """Where the videos of a row lie; those of a stretched test have their own file."""
    name = "generated" if test.stretch == 1.0 else f"generated-x{test.stretch:g}"
    return config.run.out / f"{name}.safetensors"


def generate_row(config: TrainConfig, test: WorldTest, device: torch.device) -> Path:
    """Generate the test clips of a trained row into its folder; those of the same test, clips and weights are kept."""
    file, part = generated_file(config, test), generated_file(config, test).with_suffix(".part")
    trained, clips = config.run.out / "trained", world_clips(config)
    about = {
        "test": json.dumps(vars(test)),
        "clips": repr(clips),
        "trained": weights_digest(trained) if trained.is_dir() else "",
    }
    if about.items() <= about_videos(file).items():
        return file
    pipeline = load_trained(config, device)
    began_s = time.perf_counter()
    commanded = commanded_clips(test, clips, device)
    videos = generate_clips(pipeline, commanded, test, config.objective.prefix_frames, config.branch != "none")
    seconds = f"{time.perf_counter() - began_s:.1f}"
    save_file(videos, part, about | {"generated_s": seconds, "gpu": device_name(device)})
    os.replace(part, file)
    return file


def about_videos(file: Path) -> dict[str, str]:
    """What videos were generated from, on what and for how long; empty where there are none, or half a file."""
    try:
        with safe_open(file, "pt") as videos:
            return videos.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def weights_digest(folder: Path) -> str:
    """What tells the weights of one training from those of any other: SHA-256 of all weight files of a folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _together(cameras: Sequence[Cameras]) -> Cameras:  # each [T] -> [B, T]
    poses = torch.stack([camera.world_from_camera for camera in cameras])
    return Cameras(poses, stacked([camera.lens for camera in cameras]), plan_dtype=torch.float32)
