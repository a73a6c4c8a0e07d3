"""What `merope drive` is told: its settings, and the path and first frames that they name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.key_strings import SPEED_M_S, YAW_RATE_DEG_S, poses_from_keys
from merope.formats.trajectory import Trajectory
from merope.generate.camera_path import PathSource, checked_path, first_frames, for_whole_path, read_metric_path
from merope.generate.inputs import GenerateConfig, compare_prefix_and_lens, first_frames_of
from merope.geometry.lens_batches import picked

KEYS = Path("--keys")  # in place of a pose file, in what is said about the path


@dataclass(frozen=True)
class DriveConfig:
    """Everything that decides a drive.

    clip: model, path, lens, prefix, size and rate, as `merope generate` takes them. Its number of frames does not
        count: a drive is as long as its path. The trajectory is KEYS where keys are given.
    keys: a key string (`formats/key_strings.py`); it goes on from the last camera of the prefix.
    prefix_poses: a pose file with the cameras of the prefix, for keys. A trajectory begins with them.
    window, sink, past_noise: as `pipe.stream` takes them.
    recall: latent frames of the same place that a block is shown besides, as `stream.drive` takes it.
    """

    clip: GenerateConfig
    keys: str | None = None
    speed_m_s: float = SPEED_M_S
    yaw_rate_deg_s: float = YAW_RATE_DEG_S
    prefix_poses: Path | None = None
    window: int = 12
    sink: int = 3
    past_noise: float = 0.0
    recall: int = 0

    def __post_init__(self) -> None:
        if (self.keys is None) == (self.clip.trajectory == KEYS):
            got = "none" if self.keys is None else "both"
            raise invalid("--trajectory or --keys", "given, one of them", got, 'such as --keys "w*40 a*10 w*40"')
        if self.keys is None and self.prefix_poses is not None:
            fix = "leave it out: a trajectory begins with the cameras of the prefix"
            raise invalid("--prefix-poses", "used with --keys", self.prefix_poses, fix)
        if self.prefix_poses is not None and self.clip.prefix is None:
            raise invalid("--prefix-poses", "used with --prefix", self.prefix_poses, "give the frames too")
        if self.recall and not self.clip.has_branch:
            fix = "leave it out: without cameras no place is known"
            raise invalid("--recall", "used with a camera branch", "--branch none", fix)
        if self.clip.prefix_frames < 1:
            fix = "without --prefix and --world a drive begins with none"
            raise invalid("--prefix-frames", "at least 1", self.clip.prefix_frames, fix)
        if self.clip.seed < 0:
            raise invalid("--seed", "at least 0", self.clip.seed, "each block draws its noise from it")


@dataclass(frozen=True, eq=False)
class Route:
    """What is driven: the camera of every frame, the prefix included, and the frames to begin with."""

    path: Trajectory  # with the lens of the video's size
    prefix: Tensor | None = None  # uint8 [T, H, W, 3]

    @property
    def prefix_frames(self) -> int:
        return 0 if self.prefix is None else len(self.prefix)


RouteFinder = Callable[[DriveConfig], Route]


def route_from_files(config: DriveConfig) -> Route:
    """The route that a pose file or keys describe, with first frames from a video or a folder of images."""
    prefix = None if config.clip.prefix is None else first_frames_of(config.clip, config.clip.prefix)
    if config.keys is None:
        return Route(_whole_path(config.clip, config.clip.path_source()), prefix)
    if prefix is None:
        return Route(path_of_keys(config))
    if config.prefix_poses is None:
        fix = "pass the pose file of the video, whose last used camera is where the keys go on"
        raise invalid("--prefix-poses", "given for keys after a prefix", "nothing", fix)
    source = replace(config.clip.path_source(), file=config.prefix_poses)
    before = _whole_path(config.clip, source)
    if before.count < len(prefix):
        expected = f"the cameras of {len(prefix)} frames at {source.fps:g} fps"
        raise invalid(str(config.prefix_poses), expected, before.count, "use fewer frames of the prefix")
    return Route(path_of_keys(config, first_frames(before, len(prefix))), prefix)


def _whole_path(clip: GenerateConfig, source: PathSource) -> Trajectory:
    """All of a pose file. If its lens and the frames of the prefix do not fit each other, that is said."""
    given = read_metric_path(source)
    if clip.prefix is not None:
        compare_prefix_and_lens(clip.prefix, given)
    return for_whole_path(source, given)


def check_goes_on(
    path: Trajectory,  # at the rate of the video
    given: int,  # first frames
    fps: float,
) -> None:
    """Refuse a path that ends with the frames of the prefix."""
    if path.count <= given:
        expected = f"of more than the {given} frames of the prefix"
        fix = "the path begins with the cameras of the prefix: give a longer one"
        raise invalid("--trajectory", expected, f"{path.count} at {fps:g} fps", fix)


def path_of_keys(
    config: DriveConfig,
    before: Trajectory | None = None,  # cameras of the prefix; None: the drive begins at the identity
) -> Trajectory:
    """The cameras of all frames: one step of the keys for each frame after the prefix."""
    assert config.keys is not None
    clip = config.clip
    poses = poses_from_keys(config.keys, clip.fps, config.speed_m_s, config.yaw_rate_deg_s)
    lens = None
    if before is not None:
        poses = torch.cat((before.world_from_camera, before.world_from_camera[-1] @ poses[1:]))
        held = torch.arange(len(poses)).clamp_max(before.count - 1)
        lens = None if before.lens is None else picked(before.lens, held)
    convention = f"keys at {clip.fps:g} frames per second: camera-to-world, OpenCV axes, metres"
    times_s = torch.arange(len(poses), dtype=torch.float64) / clip.fps
    source = clip.path_source()
    if lens is not None:  # scaled already, and whatever --lens and --fov say is in it
        source = replace(source, lens=None, fov_deg=None, xi=0.0)
    path = checked_path(source, Trajectory(poses, True, convention, times_s, lens))
    return for_whole_path(source, replace(path, timestamps_s=None))  # every pose is a frame: nothing to resample
