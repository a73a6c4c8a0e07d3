"""A street of the procedural world as the beginning of a drive: `merope drive --world N`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from merope.demo.drive import SHIPPED_MODEL, WORLDS
from merope.demo.given_paths import beyond_training, on_the_road
from merope.errors import invalid
from merope.formats.trajectory import Trajectory
from merope.generate.camera_path import for_whole_path, read_metric_path, say
from merope.generate.drive_inputs import DriveConfig, Route, check_goes_on, path_of_keys
from merope.geometry.cameras import Cameras
from merope.geometry.poses import relative
from merope.world.clips import WorldClips
from merope.world.clips_file import read_clips
from merope.world.commanded import FIRST_TEST_SEED

CLEARED_FRAMES = 600
"""Of the path: what stands in the way of later cameras is too far away for the prefix to show it."""


@dataclass(frozen=True)
class Street:
    """A street that no model was trained on, and what a model's clips are like."""

    model: Path
    world: int
    clips: WorldClips
    steps: int

    @classmethod
    def of(cls, world: int, model: str | None) -> "Street":
        """For a model's folder, or the model in the package."""
        if not 0 <= world < WORLDS:
            raise invalid("--world", f"from 0 to {WORLDS - 1}, the worlds kept out of training", world, "try 4")
        folder = SHIPPED_MODEL if model is None else Path(model).expanduser()
        return cls(folder, world, *read_clips(folder))

    def filled_in(self, given: dict[str, Any]) -> dict[str, Any]:
        """Options of the command, with what the model's clips are like where the user has not said it."""
        known: dict[str, Any] = {
            "model": str(self.model),
            "branch": str(self.model / "branch"),
            "size": (self.clips.height, self.clips.width),
            "fps": self.clips.frame_rate_hz,
            "steps": self.steps,
        }
        if given["lens"] is None and given["fov"] is None:
            known |= {"fov": self.clips.fov_deg[0], "xi": self.clips.xi[0]}
        return given | {name: value for name, value in known.items() if given[name] is None or name == "xi"}

    def route(self, config: DriveConfig) -> Route:
        """The prefix is rendered: along the world's own drive before keys, along the beginning of a trajectory."""
        clip, seed = config.clip, FIRST_TEST_SEED + self.world
        count, source = clip.prefix_frames, clip.path_source()
        if clip.fps != self.clips.frame_rate_hz:
            say(f"warning: the model has seen {self.clips.frame_rate_hz:g} frames per second only, not {clip.fps:g}")
        clips = replace(self.clips, height=clip.height, width=clip.width, frame_rate_hz=clip.fps)
        if config.keys is None:
            path = for_whole_path(source, read_metric_path(source))
            path = replace(path, world_from_camera=relative(path.world_from_camera[:1], path.world_from_camera))
        else:
            own = replace(clips, frames=max(clips.frames, count + 1), prefix_frames=count).path(seed)[:count]
            path = path_of_keys(config, Trajectory(own, True, "the world's own drive"))
        check_goes_on(path, count, clip.fps)
        poses = on_the_road(source.file, path.world_from_camera)
        if clip.fov_deg is not None:
            clips = replace(clips, fov_deg=(clip.fov_deg, clip.fov_deg), xi=(clip.xi, clip.xi))
        for note in beyond_training(poses, clips, self.clips):
            say(f"note: {note}")
        assert path.lens is not None
        cameras = Cameras(poses[None, :count], path.lens, plan_dtype=torch.float32)
        return Route(path, clips.pictures([seed], cameras, clear_of=poses[None, :CLEARED_FRAMES])[0])
