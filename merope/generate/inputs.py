"""What `merope generate` makes a clip from: its settings, camera path, lens and prefix, checked before any weights."""

import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

import merope
from merope.errors import invalid
from merope.formats.files import natural_order
from merope.formats.rig_file import read_rig
from merope.formats.trajectory import Trajectory
from merope.formats.video import decoded_frames, rate_and_size, read_image
from merope.generate.camera_path import PathSource, for_clip, read_metric_path, say
from merope.geometry.lens_batches import has_ratio, resized
from merope.geometry.rigs import Rig

if TYPE_CHECKING:
    from merope.generate.preflight import ModelOutline

CLIP_SUFFIXES = (".mp4", ".cameras.json")  # of every view
OTHER_SUFFIXES = (".birdseye.png", ".json")
VIEW = "{view}"
IMAGES = (".png", ".jpg", ".jpeg")
NO_BRANCH = "none"  # as in a training config


@dataclass(frozen=True)
class GenerateConfig:
    """Everything that decides a clip; written beside it.

    model, branch: folders or hub ids; the branch "none" is a model without cameras, for which the path is a record.
    transformer: one that was trained whole, in place of the model's.
    trajectory: a pose file or folder (docs/formats.md), whose first pose is that of the first frame.
    lens: a pose file whose lens is taken.
    fov_deg: horizontal field of view of a centred lens, a pinhole, or with xi a unified camera.
    rig: a rig file (docs/formats.md): every view goes along the path, and has files and a prefix of its own, whose name
        has {view} in the place of the view's.
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
    rig: Path | None = None
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
        if self.rig is not None and not self.has_branch:
            raise invalid("rig", "left out for a model without cameras", str(self.rig), "generate the views one by one")
        self.path_source()  # which checks what it is made of
        self._check_outputs()

    def path_source(self) -> PathSource:
        """How the clip's cameras are read."""
        names = ("frames", "fps", "height", "width", "assume_metric", "lens", "fov_deg", "xi", "rig")
        same = {name: getattr(self, name) for name in names}
        return PathSource(file=self.trajectory, format=self.trajectory_format, options=self.trajectory_options, **same)

    def _check_outputs(self) -> None:
        """Refuse a name for the clip under which one of its files would replace an input."""
        given = (self.trajectory, self.lens, self.rig, *self.prefixes())
        inputs = {path.resolve() for path in given if path is not None}
        for path in self.outputs():
            if path.resolve() in inputs:
                raise invalid("out", "a clip whose files replace no input", f"{path}, an input", "choose another name")

    @cached_property
    def views(self) -> Rig | None:
        """The rig with lenses for the clip's size."""
        if self.rig is None:
            return None
        rig = read_rig(self.rig)
        if self.prefix is not None and rig.views > 1 and VIEW not in str(self.prefix):
            fix = f"name one video per view, such as first-{VIEW}.mp4"
            raise invalid("prefix", f"a name with {VIEW} for a rig", str(self.prefix), fix)
        return replace(rig, lens=resized(rig.lens, self.width, self.height))

    def prefixes(self) -> list[Path]:
        """The video that each view continues, if any."""
        if self.prefix is None:
            return []
        names = ("",) if self.views is None else self.views.names
        return [Path(str(self.prefix).replace(VIEW, name)) for name in names]

    def clips(self) -> list[Path]:
        """The video of every view."""
        return [self.out] if self.views is None else [self.out.with_suffix(f".{name}.mp4") for name in self.views.names]

    def outputs(self) -> list[Path]:
        """All files that a run writes."""
        of_clips = [clip.with_suffix(suffix) for clip in self.clips() for suffix in CLIP_SUFFIXES]
        return [*of_clips, *(self.out.with_suffix(suffix) for suffix in OTHER_SUFFIXES)]

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


def versions() -> dict[str, str]:
    """What decides a clip beside its settings and its weights."""
    packages = {name: version(name) for name in ("torch", "diffusers", "transformers")}
    return {"merope": merope.__version__, "python": platform.python_version()} | packages


def camera_path(config: GenerateConfig) -> Trajectory:
    """The clip's cameras, one per frame, in metres, with the lens of the clip's size."""
    source = config.path_source()
    trajectory = read_metric_path(source)
    for prefix in config.prefixes():
        compare_prefix_and_lens(prefix, trajectory)
    return for_clip(source, trajectory)


def read_prefix(config: GenerateConfig, outline: "ModelOutline") -> Tensor:  # uint8 [(views,) T, H, W, 3]
    """The clean first frames, from videos at the clip's frame rate or from folders of images, scaled to its size."""
    from merope.generate.conditions import check_prefix_count

    check_prefix_count(config.prefix_frames, outline.strides, config.frames)
    frames = [first_frames_of(config, prefix) for prefix in config.prefixes()]
    return frames[0] if config.views is None else torch.stack(frames)


def first_frames_of(config: GenerateConfig, prefix: Path) -> Tensor:  # uint8 [T, H, W, 3]
    """As many frames of a video or images of a folder as the config says, at its size."""
    if not prefix.is_dir():
        return _first_video_frames(config, prefix)
    images = _images(prefix)
    if len(images) < config.prefix_frames:
        expected = f"a folder of at least {config.prefix_frames} images ({', '.join(IMAGES)}), one per frame"
        raise invalid("--prefix", expected, f"{len(images)} in {prefix}", "add some, or pass --prefix-frames")
    return torch.stack([read_image(path, config.height, config.width) for path in images[: config.prefix_frames]])


def _images(folder: Path) -> list[Path]:
    """Those of a prefix, in the order of their numbers."""
    names = [path.name for path in folder.iterdir() if path.suffix.lower() in IMAGES and path.name[0] != "."]
    return [folder / names[k] for k in natural_order(names)]


def _first_video_frames(config: GenerateConfig, video: Path) -> Tensor:  # uint8 [T, H, W, 3]
    """As many frames of a video as the config says, at its rate and size."""
    rate_hz, _, _ = rate_and_size(video)
    if config.fps > rate_hz * 1.01:
        fix = f"pass --fps {rate_hz:g}, or a video of that rate"
        raise invalid(str(video), f"at least {config.fps:g} frames per second", f"{rate_hz:g}", fix)
    indices = [round(k * max(rate_hz / config.fps, 1.0)) for k in range(config.prefix_frames)]
    frames = list(islice(decoded_frames(video, config.height, config.width), indices[-1] + 1))
    if len(frames) <= indices[-1]:
        expected = f"at least {indices[-1] + 1} frames, for {config.prefix_frames} at {config.fps:g} frames per second"
        raise invalid(str(video), expected, len(frames), "pass a longer video, or fewer --prefix-frames")
    return torch.stack([frames[index] for index in indices])


def compare_prefix_and_lens(prefix: Path, trajectory: Trajectory) -> None:
    """Say so where the frames cannot be what the lens was calibrated for: their rays would be wrong."""
    lens, size = trajectory.lens, _size_of(prefix)
    assert lens is not None
    if size is None:
        return
    width, height = size
    if not has_ratio(lens, width, height):
        say(
            f"warning: frames of {prefix} are {width}×{height}, the lens is of {lens.width}×{lens.height}: scaled to "
            "the clip they do not fit each other; crop them, or give the lens of these frames with --lens FILE"
        )


def _size_of(prefix: Path) -> tuple[int, int] | None:  # width, height
    """That of a video, or of a folder's first image; None for what is refused when it is read."""
    from PIL import Image

    if prefix.is_file():
        return rate_and_size(prefix)[1:]
    images = _images(prefix) if prefix.is_dir() else []
    try:
        with Image.open(images[0]) as image:
            return image.size
    except (IndexError, OSError):
        return None


def warn_of_idle_weights(model: str, branch: str, transformer: str | None) -> None:
    """A transformer beside the branch was trained with it: say so where the model's own runs instead."""
    trained = Path(branch).parent / "transformer"
    is_models = Path(model).resolve() == trained.parent.resolve()
    if transformer is None and branch != NO_BRANCH and trained.is_dir() and not is_models:
        remedy = f"--transformer {quote(str(trained))}"
        say(f"warning: the model's own transformer runs, not the one trained with the branch; {remedy}")
