"""`merope generate`: a trajectory file, a prompt and the first frames of a video, to a clip with all that made it."""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from merope.birdseye import birdseye_image
from merope.data import formats
from merope.data.trajectory import Trajectory
from merope.data.video import read_video, write_image, write_video
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import picked, resized
from merope.geometry.lenses import Lens, UnifiedCamera
from merope.geometry.trajectories import resample

if TYPE_CHECKING:
    from merope.pipeline.camera_video import CameraVideoPipeline
    from merope.pipeline.preflight import ModelOutline

BIRDSEYE_PX = 480
DEFAULT_GUIDANCE = 5.0  # Wan's
OUTPUT_SUFFIXES = (".mp4", ".cameras.json", ".birdseye.png", ".json")
ASPECT_TOLERANCE = 0.02  # of the ratio of the sides: cropping to whole tokens stays below


@dataclass(frozen=True)
class GenerateConfig:
    """Everything that decides a clip; written beside it.

    model, branch: folders or hub ids.
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
    def run_device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def run_dtype(self) -> str:
        return self.dtype or ("float32" if self.run_device.startswith("cpu") else "bfloat16")


def generate(config: GenerateConfig) -> Path:
    """Generate the clip and write it with its cameras, bird's-eye view and record; returns the record's path.

    Files appear when all is done: an interrupted run leaves nothing half-written. All input is checked first.
    """
    start_s = time.perf_counter()
    _check_machine(config)
    path = camera_path(config)
    outline = _checked_model(config)
    prefix = None if config.prefix is None else read_prefix(config, outline)
    pipeline = _loaded(config)
    loaded_s = time.perf_counter()
    frames = _sampled(pipeline, config, path, prefix)
    sampled_s = time.perf_counter()
    _write_clip(config, path, frames, len(prefix) if prefix is not None else 0)
    seconds = {"load": loaded_s - start_s, "generate": sampled_s - loaded_s, "all": time.perf_counter() - start_s}
    record = config.out.with_suffix(".json")
    record.write_text(json.dumps(_record(config, path, pipeline, seconds), indent=1, default=str) + "\n")
    return record


def _check_machine(config: GenerateConfig) -> None:
    """Refuse a device that is not there and a place that cannot be written to, now and not after an hour."""
    try:
        kind = torch.device(config.run_device).type
    except RuntimeError:
        raise invalid("device", "one of torch's", repr(config.run_device), "use cuda, cuda:1, cpu, …") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise invalid(
            "device", "cpu on a machine without CUDA", config.run_device, "leave it out, or install CUDA torch"
        )
    if config.offload and kind == "cpu":
        raise invalid("offload", "used with a GPU", config.run_device, "leave it out: weights are in main memory")
    folder = next(parent for parent in config.out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise invalid("out", "in a folder that can be written to", str(config.out), f"check {folder}")


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
    """The lens for frames of the clip's size, from the option that says most."""
    if config.fov_deg is not None:
        return UnifiedCamera.from_fov(config.fov_deg, config.xi, config.width, config.height)
    source = config.trajectory if config.lens is None else config.lens
    lens = trajectory.lens if config.lens is None else formats.read(config.lens).lens
    if lens is None:
        fix = "pass --fov DEGREES, or --lens FILE with a pose file that has one"
        raise invalid(str(source), "a file with a lens", "poses only", fix)
    stretch = (config.width / config.height) / (lens.width / lens.height)
    if abs(stretch - 1.0) > ASPECT_TOLERANCE:
        _say(
            f"warning: images of {lens.width}×{lens.height} are stretched to {config.width}×{config.height}; "
            "lens and prefix are scaled alike, but models know upright pictures"
        )
    return resized(lens, config.width, config.height)


def _checked_model(config: GenerateConfig) -> "ModelOutline":
    """Everything that the model's small files can tell."""
    from merope.pipeline.preflight import check_branch, outline_model
    from merope.pipeline.text import Text

    outline = outline_model(config.model, config.transformer)
    outline.strides.check(config.height, config.width, config.frames)
    check_branch(config.branch, outline)
    text = Text(config.prompt, config.negative_prompt, None, None)
    text.check(outline.has_text, _guidance(config, outline.has_text) > 1.0, outline.transformer.config["text_dim"])
    return outline


def read_prefix(config: GenerateConfig, outline: "ModelOutline") -> Tensor:  # uint8 [T, H, W, 3]
    """The clean first frames, taken from the video at the clip's frame rate and scaled to its size."""
    from merope.pipeline.conditions import check_prefix_count

    assert config.prefix is not None
    check_prefix_count(config.prefix_frames, outline.strides, config.frames)
    rate_hz = _frame_rate(config.prefix)
    if config.fps > rate_hz * 1.01:
        fix = f"pass --fps {rate_hz:g}, or a video of that rate"
        raise invalid(str(config.prefix), f"at least {config.fps:g} frames per second", f"{rate_hz:g}", fix)
    indices = [round(k * max(rate_hz / config.fps, 1.0)) for k in range(config.prefix_frames)]
    return read_video(config.prefix, indices, config.height, config.width)


def _frame_rate(video: Path) -> float:
    import av

    if not video.is_file():
        raise FileNotFoundError(f"video {video} is missing; check the path")
    try:
        with av.open(str(video)) as container:
            rate = container.streams.video[0].average_rate
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"video {video} cannot be decoded ({error}); get the file again") from error
    if rate is None:
        raise ValueError(f"video {video} does not say its frame rate; write it again as mp4")
    return float(rate)


def _loaded(config: GenerateConfig) -> "CameraVideoPipeline":
    """Model and branch on their device. The VAE stays in float32: in half precision it bands."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    from merope.adapters.wan import load_branch
    from merope.pipeline.camera_video import CameraVideoPipeline

    dtype = getattr(torch, config.run_dtype)
    parts = {}
    if config.transformer is not None:
        parts["transformer"] = WanTransformer3DModel.from_pretrained(config.transformer, dtype=dtype)
    pipeline: CameraVideoPipeline = CameraVideoPipeline.from_pretrained(
        config.model, dtype={"default": dtype, "vae": torch.float32}, **parts
    )
    load_branch(pipeline.transformer, config.branch)
    if config.offload:
        pipeline.enable_model_cpu_offload(device=config.run_device)
    else:
        pipeline.to(config.run_device)
    return pipeline


def _sampled(
    pipeline: "CameraVideoPipeline",
    config: GenerateConfig,
    path: Trajectory,
    prefix: Tensor | None,  # uint8 [T0, H, W, 3]
) -> Tensor:  # uint8 [T, H, W, 3]
    assert path.lens is not None
    output = pipeline(
        prompt=config.prompt,
        negative_prompt=config.negative_prompt,
        cameras=Cameras(path.world_from_camera, path.lens),
        prefix=prefix,
        height=config.height,
        width=config.width,
        num_frames=config.frames,
        num_inference_steps=config.steps,
        guidance_scale=_guidance(config, pipeline.text_encoder is not None),
        generator=torch.Generator("cpu").manual_seed(config.seed),  # the same noise on every machine
        output_type="pt",
        return_dict=False,
    )
    frames: Tensor = output[0][0]  # [T, 3, H, W] in [0, 1]
    return (frames.float() * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()


def _guidance(config: GenerateConfig, has_text: bool) -> float:
    if config.guidance is not None:
        return config.guidance
    return DEFAULT_GUIDANCE if has_text else 1.0


def _write_clip(config: GenerateConfig, path: Trajectory, frames: Tensor, prefix_count: int) -> None:
    """Video, cameras and bird's-eye view; made aside, so that an interrupted run leaves none of them."""
    out = config.out
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = {"commanded": path.world_from_camera}
    if prefix_count:
        paths["prefix"] = path.world_from_camera[:prefix_count]
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.stem}-") as aside:
        clip = Path(aside) / out.name
        write_video(frames, clip, config.fps)
        formats.write(path, clip.with_suffix(".cameras.json"))
        write_image(birdseye_image(paths, BIRDSEYE_PX, BIRDSEYE_PX), clip.with_suffix(".birdseye.png"))
        for made in sorted(Path(aside).iterdir()):
            made.replace(out.parent / made.name)


def _record(
    config: GenerateConfig, path: Trajectory, pipeline: "CameraVideoPipeline", seconds: Mapping[str, float]
) -> dict[str, object]:
    """What it takes to make the clip again, and what it took."""
    import merope

    is_cuda = config.run_device.startswith("cuda")
    steps_m = torch.linalg.vector_norm(path.world_from_camera[:, :3, 3].diff(dim=0), dim=-1)
    return {
        "settings": asdict(config),
        "used": {
            "device": torch.cuda.get_device_name(config.run_device) if is_cuda else platform.machine(),
            "dtype": config.run_dtype,
            "guidance": _guidance(config, pipeline.text_encoder is not None),
            "scheduler": type(pipeline.scheduler).__name__,
        },
        "trajectory": {"convention": path.convention, "length_m": float(steps_m.sum())},
        "wall_s": {name: round(value, 3) for name, value in seconds.items()},
        "peak_memory_gib": torch.cuda.max_memory_allocated(config.run_device) / 2**30 if is_cuda else None,
        "versions": {"merope": merope.__version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "diffusers", "transformers")},
    }


def _say(text: str) -> None:
    print(f"merope: {text}", file=sys.stderr)
