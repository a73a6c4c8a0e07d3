"""What `merope generate` makes a clip from: its settings, camera path, lens and prefix, checked before any weights."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_video
from merope.generate.camera_path import ASPECT_TOLERANCE, PathSource, for_clip, read_metric_path, say

if TYPE_CHECKING:
    from merope.generate.preflight import ModelOutline

OUTPUT_SUFFIXES = (".mp4", ".cameras.json", ".birdseye.png", ".json")
NO_BRANCH = "none"  # as in a training config


@dataclass(frozen=True)
class GenerateConfig:
    """Everything that decides a clip; written beside it.

    model, branch: folders or hub ids; the branch "none" is a model without cameras, for which the path is a record.
    transformer: one that was trained whole, in place of the model's.
    trajectory: a pose file or folder (docs/formats.md), whose first pose is that of the first frame.
    lens: a pose file whose lens is taken.
    fov_deg: horizontal field of view of a centred lens, a pinhole, or with xi a unified camera.
    steps, guidance, dtype, device: None for what suits the model and the machine.
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
    steps: int | None = None
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
        if self.steps is not None and self.steps < 1:
            raise invalid("steps", "at least 1", self.steps, "leave it out to take what suits the model")
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise invalid("guidance", "finite", self.guidance, "5 is the default, 1 is none")
        self.path_source()  # which checks what it is made of
        self._check_outputs()

    def path_source(self) -> PathSource:
        """How the clip's cameras are read."""
        return PathSource(
            file=self.trajectory,
            frames=self.frames,
            fps=self.fps,
            height=self.height,
            width=self.width,
            format=self.trajectory_format,
            options=self.trajectory_options,
            assume_metric=self.assume_metric,
            lens=self.lens,
            fov_deg=self.fov_deg,
            xi=self.xi,
        )

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
        return chosen_device(self.device)

    @property
    def run_dtype(self) -> str:
        return chosen_dtype(self.dtype, self.run_device)


def chosen_device(device: str | None) -> str:
    """A device that was asked for and is there, or the best one of this machine."""
    if not device:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, RuntimeError):  # no word of torch's, a GPU that is not there, or "meta"
        fix = "leave it out to take the best one"
        raise invalid("device", "one of torch's devices that this machine has", repr(device), fix) from None
    return device


def chosen_dtype(dtype: str | None, device: str) -> str:
    """A dtype that was asked for, or the one that suits the device."""
    return dtype or ("float32" if device.startswith("cpu") else "bfloat16")


def camera_path(config: GenerateConfig) -> Trajectory:
    """The clip's cameras, one per frame, in metres, with the lens of the clip's size."""
    source = config.path_source()
    trajectory = read_metric_path(source)
    if config.prefix is not None:
        compare_prefix_and_lens(config.prefix, trajectory)
    return for_clip(source, trajectory)


def read_prefix(config: GenerateConfig, outline: "ModelOutline") -> Tensor:  # uint8 [T, H, W, 3]
    """The clean first frames, taken from the video at the clip's frame rate and scaled to its size."""
    from merope.generate.conditions import check_prefix_count

    check_prefix_count(config.prefix_frames, outline.strides, config.frames)
    return first_video_frames(config)


def first_video_frames(config: GenerateConfig) -> Tensor:  # uint8 [T, H, W, 3]
    """As many frames of the prefix as the config says, at its rate and size."""
    assert config.prefix is not None
    rate_hz, _, _ = _rate_and_size(config.prefix)
    if config.fps > rate_hz * 1.01:
        fix = f"pass --fps {rate_hz:g}, or a video of that rate"
        raise invalid(str(config.prefix), f"at least {config.fps:g} frames per second", f"{rate_hz:g}", fix)
    indices = [round(k * max(rate_hz / config.fps, 1.0)) for k in range(config.prefix_frames)]
    return read_video(config.prefix, indices, config.height, config.width)


def compare_prefix_and_lens(video: Path, trajectory: Trajectory) -> None:
    """Say so where the frames cannot be what the lens was calibrated for: their rays would be wrong."""
    lens = trajectory.lens
    assert lens is not None
    _, width, height = _rate_and_size(video)
    if abs((width / height) / (lens.width / lens.height) - 1.0) > ASPECT_TOLERANCE:
        say(
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


def warn_of_idle_weights(model: str, branch: str, transformer: str | None) -> None:
    """A transformer beside the branch was trained with it: say so where the model's own runs instead."""
    trained = Path(branch).parent / "transformer"
    is_models = Path(model).resolve() == trained.parent.resolve()
    if transformer is None and branch != NO_BRANCH and trained.is_dir() and not is_models:
        say(f"warning: the model's own transformer runs, not the one trained with the branch; --transformer {trained}")
