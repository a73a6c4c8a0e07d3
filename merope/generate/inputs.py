"""What `merope generate` makes a clip from: its settings, camera path, lens and prefix, checked before any weights."""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from merope import formats
from merope.errors import invalid
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_video
from merope.geometry.lens_batches import picked, resized
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera
from merope.geometry.trajectories import resample

if TYPE_CHECKING:
    from merope.generate.preflight import ModelOutline

OUTPUT_SUFFIXES = (".mp4", ".cameras.json", ".birdseye.png", ".json")
NO_BRANCH = "none"  # as in a training config
ASPECT_TOLERANCE = 0.02  # of the ratio of the sides: cropping to whole tokens stays below


@dataclass(frozen=True)
class GenerateConfig:
    """Everything that decides a clip; written beside it.

    model, branch: folders or hub ids; the branch "none" is a model without cameras, for which the path is a record.
    transformer: one that was trained whole, in place of the model's.
    trajectory: a pose file or folder (docs/formats.md), whose first pose is that of the first frame.
    lens: a pose file whose lens is taken.
    fov_deg: horizontal field of view of a centred lens, a pinhole, or with xi a unified camera.
    guidance, dtype, device: None for what suits the model and the machine.
    """

    model: str
    branch: str
    trajectory: Path
    out: Path
    transformer: str | None = None
    trajectory_format: str | None = None
    trajectory_options: Mapping[str, Any] = field(default_factory=dict)
    assume_metric: bool = False
    lens: Path | None = None
    fov_deg: float | None = None
    xi: float = 0.0
    prefix: Path | None = None
    prefix_frames: int = 9
    prompt: str | None = None
    negative_prompt: str | None = None
    height: int = 288
    width: int = 512
    frames: int = 49
    fps: float = 12.0
    steps: int = 50
    guidance: float | None = None
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        for name in ("model", "branch", "transformer"):  # the shell leaves --model=~/wan alone
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        if self.out.suffix != ".mp4":
            raise invalid("out", "a file name that ends in .mp4", str(self.out), "name the clip, such as clip.mp4")
        if self.lens is not None and self.fov_deg is not None:
            raise invalid("lens and fov", "given once", "both", "leave one out")
        if self.xi != 0.0 and self.fov_deg is None:
            raise invalid("xi", "given with a field of view", self.xi, "add --fov DEGREES")
        for name in ("steps", "frames", "height", "width"):
            if getattr(self, name) < 1:
                raise invalid(name, "at least 1", getattr(self, name), f"the default is {getattr(type(self), name)}")
        if not 0.0 < self.fps < math.inf:
            raise invalid("fps", "positive and finite", self.fps, "pass frames per second, such as 12")
        self._check_outputs()

    def _check_outputs(self) -> None:
        """Refuse a name for the clip under which one of its files would replace an input."""
        inputs = {path.resolve() for path in (self.trajectory, self.lens, self.prefix) if path is not None}
        for suffix in OUTPUT_SUFFIXES:
            path = self.out.with_suffix(suffix)
            if path.resolve() in inputs:
                raise invalid("out", "a clip whose files replace no input", f"{path}, an input", "choose another name")

    @property
    def has_branch(self) -> bool:
        return self.branch != NO_BRANCH

    @property
    def run_device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def run_dtype(self) -> str:
        return self.dtype or ("float32" if self.run_device.startswith("cpu") else "bfloat16")


def camera_path(config: GenerateConfig) -> Trajectory:
    """The clip's cameras, one per frame, in metres, with the lens of the clip's size."""
    trajectory = formats.read(
        config.trajectory,
        config.trajectory_format,
        is_metric=True if config.assume_metric else None,
        **config.trajectory_options,
    )
    if not trajectory.is_metric:
        fix = "scale it to metres, or pass --assume-metric if it is in metres already"
        raise invalid(str(config.trajectory), "in metres", f"a path of arbitrary scale ({trajectory.convention})", fix)
    trajectory = replace(trajectory, lens=_lens(config, trajectory))
    for finding in formats.validate(trajectory):
        if finding.severity == "error":
            raise ValueError(f"{config.trajectory}: {finding.message}; {finding.hint}")
        _say(f"warning: {config.trajectory}: {finding.message}; {finding.hint}")
    path = at_frame_rate(trajectory, config.fps)
    if path.count < config.frames:
        got = f"{path.count} ({trajectory.count} poses in the file)"
        fix = f"use a longer path, --frames {path.count} or fewer, or another --fps"
        raise invalid(str(config.trajectory), f"{config.frames} frames long at {config.fps:g} fps", got, fix)
    return first_frames(path, config.frames)


def at_frame_rate(trajectory: Trajectory, fps: float) -> Trajectory:
    """The path at a constant frame rate. Without times, every pose is a frame; lenses are those nearest in time."""
    if trajectory.timestamps_s is None:
        times_s = torch.arange(trajectory.count, dtype=torch.float64) / fps
        return replace(trajectory, timestamps_s=times_s)
    poses, times_s = resample(trajectory.world_from_camera, trajectory.timestamps_s.contiguous(), fps)
    nearest = (times_s[:, None] - trajectory.timestamps_s).abs().argmin(dim=1)
    lens = None if trajectory.lens is None else picked(trajectory.lens, nearest)
    return replace(trajectory, world_from_camera=poses, timestamps_s=times_s, lens=lens, frame_names=None)


def first_frames(path: Trajectory, count: int) -> Trajectory:
    """The beginning of a path."""
    return replace(
        path,
        world_from_camera=path.world_from_camera[:count],
        timestamps_s=None if path.timestamps_s is None else path.timestamps_s[:count],
        lens=None if path.lens is None else picked(path.lens, torch.arange(count)),
        frame_names=None if path.frame_names is None else path.frame_names[:count],
    )


def _lens(config: GenerateConfig, trajectory: Trajectory) -> Lens:
    """The lens for frames of the clip's size."""
    lens = _calibrated_lens(config, trajectory)
    if config.prefix is not None:
        _compare_prefix_and_lens(config.prefix, lens)
    stretch = (config.width / config.height) / (lens.width / lens.height)
    if abs(stretch - 1.0) > ASPECT_TOLERANCE:
        _say(
            f"warning: images of {lens.width}×{lens.height} are stretched to {config.width}×{config.height}; "
            "lens and prefix are scaled alike, but models know upright pictures"
        )
    return resized(lens, config.width, config.height)


def _calibrated_lens(config: GenerateConfig, trajectory: Trajectory) -> Lens:
    """The lens as it was given, from the option that says most; a field of view is that of the clip's frames."""
    if config.fov_deg is not None:
        unified = UnifiedCamera.from_fov(config.fov_deg, config.xi, config.width, config.height)
        if config.xi != 0.0:
            return unified
        return Pinhole(unified.fx, unified.fy, unified.cx, unified.cy, config.width, config.height)
    source = config.trajectory if config.lens is None else config.lens
    lens = trajectory.lens if config.lens is None else formats.read(config.lens).lens
    if lens is None:
        fix = "pass --fov DEGREES, or --lens FILE with a pose file that has one"
        raise invalid(str(source), "a file with a lens", "poses only", fix)
    return lens


def read_prefix(config: GenerateConfig, outline: "ModelOutline") -> Tensor:  # uint8 [T, H, W, 3]
    """The clean first frames, taken from the video at the clip's frame rate and scaled to its size."""
    from merope.generate.conditions import check_prefix_count

    assert config.prefix is not None
    check_prefix_count(config.prefix_frames, outline.strides, config.frames)
    rate_hz, _, _ = _rate_and_size(config.prefix)
    if config.fps > rate_hz * 1.01:
        fix = f"pass --fps {rate_hz:g}, or a video of that rate"
        raise invalid(str(config.prefix), f"at least {config.fps:g} frames per second", f"{rate_hz:g}", fix)
    indices = [round(k * max(rate_hz / config.fps, 1.0)) for k in range(config.prefix_frames)]
    return read_video(config.prefix, indices, config.height, config.width)


def _compare_prefix_and_lens(video: Path, lens: Lens) -> None:
    """Say so where the frames cannot be what the lens was calibrated for: their rays would be wrong."""
    _, width, height = _rate_and_size(video)
    if abs((width / height) / (lens.width / lens.height) - 1.0) > ASPECT_TOLERANCE:
        _say(
            f"warning: frames of {video} are {width}×{height}, the lens is of {lens.width}×{lens.height}: scaled to "
            "the clip they do not fit each other; crop the video, or give the lens of its frames with --lens FILE"
        )


def _rate_and_size(video: Path) -> tuple[float, int, int]:  # frames per second, width, height
    import av

    if not video.is_file():
        raise FileNotFoundError(f"video {video} is missing; check the path")
    try:
        with av.open(str(video)) as container:
            stream = container.streams.video[0]
            rate, width, height = stream.average_rate, stream.width, stream.height
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"video {video} cannot be decoded ({error}); get the file again") from error
    if rate is None:
        raise ValueError(f"video {video} does not say its frame rate; write it again as mp4")
    return float(rate), width, height


def warn_of_idle_weights(config: GenerateConfig) -> None:
    """A transformer beside the branch was trained with it: say so where the model's own runs instead."""
    trained = Path(config.branch).parent / "transformer"
    is_models = Path(config.model).resolve() == trained.parent.resolve()
    if config.transformer is None and config.has_branch and trained.is_dir() and not is_models:
        _say(f"warning: the model's own transformer runs, not the one trained with the branch; --transformer {trained}")


def _say(text: str) -> None:
    print(f"merope: {text}", file=sys.stderr)
