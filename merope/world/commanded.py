"""Clips that are commanded in unseen worlds: three paths each, and what the camera would see on them.

The prefix does not tell where a path goes after it. So a model that does not look at the cameras must fail.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.video import as_bytes
from merope.geometry.cameras import Cameras
from merope.geometry.trajectories import turn_by
from merope.world.clips import WorldClips
from merope.world.render import Render, render
from merope.world.scene import World

FIRST_TEST_SEED = 100_000
"""Worlds from here on (below those of training) are commanded; smaller seeds serve validation."""

MANOEUVRES = ("original", "left", "right")


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
    true: Tensor  # uint8 [T, H, W, 3], or of as many first frames as were asked for
    world: World
    seen: Render  # what `true` is made of, with its depth; on the CPU

    @property
    def name(self) -> str:
        return f"world-{self.seed}-{self.manoeuvre}"


def commanded_clips(
    test: WorldTest, clips: WorldClips, device: torch.device, seen_frames: int | None = None
) -> list[CommandedClip]:
    """All clips of a test."""
    return [
        clip
        for seed in test.seeds
        for clip in clips_of_world(test.paths(clips, seed), clips, seed, device, seen_frames)
    ]


def clips_of_world(
    paths: Mapping[str, Tensor],  # each [T, 4, 4]
    clips: WorldClips,
    seed: int,
    device: torch.device,
    seen_frames: int | None = None,  # so many first frames of each are rendered; None: all
) -> list[CommandedClip]:
    """Clips of one world along some paths. It is cleared for all of them alike: they show the same street."""
    world = World(seed, device).cleared(torch.stack(list(paths.values())).to(device))
    commanded = []
    for manoeuvre, path in paths.items():
        cameras = Cameras(path, clips.lens(seed), plan_dtype=torch.float32)
        seen = render(world, cameras.at(slice(seen_frames)).to(device), clips.height, clips.width)
        seen = Render(seen.image.cpu(), seen.depth_m.cpu(), seen.valid.cpu(), world)
        commanded.append(CommandedClip(seed, manoeuvre, cameras, as_bytes(seen.image), world, seen))
    return commanded
