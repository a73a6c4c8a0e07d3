"""`merope generate`: a trajectory file, a prompt and the first frames of a video, to a clip with all that made it."""

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from merope import formats
from merope.draw.birdseye import birdseye_image
from merope.errors import invalid
from merope.formats.trajectory import Trajectory
from merope.formats.video import write_image, write_video
from merope.formats.writing import replace_text, require_writable
from merope.generate.inputs import GenerateConfig, camera_path, read_prefix, versions, warn_of_idle_weights
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import picked_view

if TYPE_CHECKING:
    from merope.generate.base_video import BaseVideo
    from merope.generate.camera_video import CameraVideoPipeline
    from merope.generate.preflight import ModelOutline

NEEDED = ("av", "PIL")
"""Packages that write the clip, after hours of work."""

BIRDSEYE_PX = 480
DEFAULT_GUIDANCE = 5.0  # Wan's


def generate(config: GenerateConfig) -> Path:
    """Generate the clip and write it with its cameras, bird's-eye view and record; returns the record's path.

    Files appear when all is done: an interrupted run leaves nothing half-written. All input is checked first.
    """
    start_s = time.perf_counter()
    check_machine(config)
    check_folders(config)
    path = camera_path(config)
    outline = checked_model(config, path, own_pipeline=True)
    config = _settled(config, outline)
    prefix = None if config.prefix is None else read_prefix(config, outline)
    pipeline = load_pipeline(config) if outline.pipeline is None else _load_own(config, outline)
    loaded_s = time.perf_counter()
    frames = _made(pipeline, config, path, prefix)
    sampled_s = time.perf_counter()
    _write_clip(config, path, frames, 0 if prefix is None else prefix.shape[-4])
    seconds = {"load": loaded_s - start_s, "generate": sampled_s - loaded_s, "all": time.perf_counter() - start_s}
    record = config.out.with_suffix(".json")
    replace_text(record, json.dumps(_record(config, path, pipeline, seconds), indent=1, default=str) + "\n")
    return record


def check_machine(config: GenerateConfig) -> None:
    """Refuse missing packages, a device that is not there and a place that cannot be written to, before any work."""
    for package in NEEDED:
        import_module(package)
    if torch.device(config.run_device).type == "cpu" and config.offload:
        raise invalid("offload", "used with a GPU", config.run_device, "leave it out: weights are in main memory")
    require_writable("--out", config.out.absolute().parent)
    for made in config.outputs():
        if made.is_dir():
            raise invalid("--out", "a name for files", f"{made}, a folder", "choose another name")


def check_folders(config: GenerateConfig) -> None:
    """Refuse folders that are not there or hold something else, before a hub is asked and before a path is blamed."""
    from merope.generate.preflight import local_folder, model_folder

    model_folder(config.model)
    for name, given in (("branch", config.branch if config.has_branch else None), ("transformer", config.transformer)):
        if given is not None:
            local_folder(name, given)


def checked_model(config: GenerateConfig, path: Trajectory, own_pipeline: bool = False) -> "ModelOutline":
    """Everything that the model's small files can tell; whether others than `CameraVideoPipeline` will do."""
    from merope.generate.preflight import check_branch, check_model_weights, outline_model

    check_folders(config)
    outline = outline_model(config.model, config.transformer, own_pipeline)
    warn_of_idle_weights(config.model, config.branch, config.transformer)
    if outline.pipeline is not None:
        from merope.generate.own_pipeline import check_start

        check_one_view(config)
        check_start(config, outline)
    outline.strides.check(config.height, config.width, config.frames, "--frames")
    size = outline.strides.latent_size(config.height, config.width)
    outline.family.check_clip(outline.transformer.config, config.frames, size)
    if config.has_branch:
        check_branch(config.branch, outline, clip_cameras(config, path))
    _check_text(config, outline.has_text)
    check_model_weights(outline)
    return outline


def _settled(config: GenerateConfig, outline: "ModelOutline") -> GenerateConfig:
    """With the denoising steps that suit the model. Seeds and prefixes that a causal one cannot take are refused."""
    from merope.generate.preflight import trained_block_frames, trained_steps
    from merope.generate.stream import STEPS

    trained = config.model, config.branch if config.has_branch else None
    block = trained_block_frames(*trained) if outline.pipeline is None else None
    if block is not None:
        check_one_view(config)
        if config.seed < 0:
            raise invalid("--seed", "at least 0 for this model", config.seed, "each block draws its noise from it")
    if outline.pipeline is not None:
        return replace(config, steps=config.steps or STEPS)
    if block is not None and config.prefix is not None:
        outline.strides.check_blocks("--prefix-frames", config.prefix_frames, block)
    return replace(config, steps=config.steps or trained_steps(*trained) or STEPS)


def check_one_view(config: GenerateConfig) -> None:
    """Refuse a rig for a model that makes one video at a time."""
    if config.rig is not None:
        fix = "use a bidirectional Wan of one transformer, or generate the views one by one"
        raise invalid("--rig", "left out for this model", str(config.rig), fix)


def _check_text(config: GenerateConfig, has_encoder: bool) -> None:
    """Refuse text that the model cannot read, and no text where it reads some."""
    if has_encoder:
        import_module("ftfy")  # diffusers cleans prompts with it
        if config.prompt is None:
            raise invalid("--prompt", "given for a model with a text encoder", "nothing", '--prompt "" is no text')
        return
    for option, value in (("--prompt", config.prompt), ("--negative-prompt", config.negative_prompt)):
        if value is not None:
            raise invalid(option, "left out for a model without a text encoder", repr(value)[:60], "leave it out")
    if config.guidance is not None and config.guidance > 1.0:
        fix = "leave it out: there is no text to be guided by"
        raise invalid("--guidance", "at most 1 for a model without a text encoder", config.guidance, fix)


def load_pipeline(config: GenerateConfig, vae_dtype: torch.dtype = torch.float32) -> "CameraVideoPipeline":
    """Model and branch on their device."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    from merope.generate.camera_video import CameraVideoPipeline

    return load_parts(CameraVideoPipeline, WanTransformer3DModel, config, vae_dtype)


def load_parts(pipeline: type[Any], transformer: type[Any], config: GenerateConfig, vae_dtype: torch.dtype) -> Any:
    """A pipeline of diffusers with the transformer of a config, its branches attached, on its device."""
    from merope.adapters.attachment import load_branch

    dtype = getattr(torch, config.run_dtype)
    parts = {}
    if config.transformer is not None:
        parts["transformer"] = transformer.from_pretrained(config.transformer, dtype=dtype)
    pipe = pipeline.from_pretrained(config.model, dtype={"default": dtype, "vae": vae_dtype}, **parts)
    if config.has_branch:
        load_branch(pipe, config.branch)
    if config.offload:
        pipe.enable_model_cpu_offload(device=config.run_device)
    else:
        pipe.to(config.run_device)
    return pipe


def _load_own(config: GenerateConfig, outline: "ModelOutline") -> "BaseVideo":
    """A model in its own pipeline. The VAE stays in float32 where that lets it."""
    from merope.generate.base_video import BaseVideo

    assert outline.pipeline is not None
    of_vae = torch.float32 if outline.family.casts_latents else getattr(torch, config.run_dtype)
    return BaseVideo(load_parts(outline.pipeline, type(outline.transformer), config, of_vae))


def _made(
    pipeline: "CameraVideoPipeline | BaseVideo",
    config: GenerateConfig,
    path: Trajectory,
    prefix: Tensor | None,  # uint8 [(views,) T0, H, W, 3]
) -> Tensor:  # uint8 [views, T, H, W, 3]
    from merope.generate.base_video import BaseVideo
    from merope.generate.causal_clips import made_clip
    from merope.generate.own_pipeline import own_frames

    if isinstance(pipeline, BaseVideo):
        return own_frames(pipeline, config, path_cameras(path), prefix)[None]
    return made_clip(
        pipeline,
        config.frames,
        clip_cameras(config, path) if config.has_branch else None,
        prefix,
        seed=config.seed,
        prompt=config.prompt,
        negative_prompt=config.negative_prompt,
        height=config.height,
        width=config.width,
        num_inference_steps=config.steps,
        guidance_scale=text_guidance(config, pipeline.text_encoder is not None),
    )


def clip_cameras(config: GenerateConfig, path: Trajectory) -> Cameras:
    """The cameras of all views along the path."""
    return path_cameras(path) if config.views is None else config.views.cameras(path.world_from_camera)


def _view_paths(config: GenerateConfig, path: Trajectory) -> list[Trajectory]:
    """The path of every view, with its lens."""
    rig = config.views
    if rig is None:
        return [path]
    return [
        replace(path, world_from_camera=path.world_from_camera @ pose, lens=picked_view(rig.lens, rig.views, view))
        for view, pose in enumerate(rig.rig_from_camera)
    ]


def path_cameras(path: Trajectory) -> Cameras:
    assert path.lens is not None
    return Cameras(path.world_from_camera, path.lens)


def text_guidance(config: GenerateConfig, has_text: bool) -> float:
    if config.guidance is not None:
        return config.guidance
    return DEFAULT_GUIDANCE if has_text else 1.0


def _write_clip(
    config: GenerateConfig,
    path: Trajectory,
    frames: Tensor,  # uint8 [views, T, H, W, 3]
    prefix_count: int,
) -> None:
    """Videos, cameras and bird's-eye view; made aside, so that an interrupted run leaves none of them."""
    out = config.out
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = {"commanded": path.world_from_camera}
    if prefix_count:
        paths["prefix"] = path.world_from_camera[:prefix_count]
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.stem}-") as aside:
        for clip, view, view_path in zip(config.clips(), frames, _view_paths(config, path), strict=True):
            write_video(view, Path(aside) / clip.name, config.fps)
            formats.write(view_path, Path(aside) / clip.with_suffix(".cameras.json").name)
        birdseye = Path(aside) / out.with_suffix(".birdseye.png").name
        write_image(birdseye_image(paths, BIRDSEYE_PX, BIRDSEYE_PX), birdseye)
        for made in sorted(Path(aside).iterdir()):
            made.replace(out.parent / made.name)


def _record(
    config: GenerateConfig,
    path: Trajectory,
    pipeline: "CameraVideoPipeline | BaseVideo",
    seconds: Mapping[str, float],
) -> dict[str, object]:
    """What it takes to make the clip again, and what it took."""
    from merope.generate.base_video import BaseVideo

    is_own = isinstance(pipeline, BaseVideo)  # whose guidance is its own, if none is given
    is_cuda = config.run_device.startswith("cuda")
    steps_m = torch.linalg.vector_norm(path.world_from_camera[:, :3, 3].diff(dim=0), dim=-1)
    return {
        "settings": asdict(config),
        "used": {
            "device": torch.cuda.get_device_name(config.run_device) if is_cuda else platform.machine(),
            "dtype": config.run_dtype,
            "guidance": config.guidance if is_own else text_guidance(config, pipeline.text_encoder is not None),
            "scheduler": type(pipeline.scheduler).__name__,
        },
        "trajectory": {"convention": path.convention, "length_m": float(steps_m.sum())},
        "wall_s": {name: round(value, 3) for name, value in seconds.items()},
        "peak_memory_gib": torch.cuda.max_memory_allocated(config.run_device) / 2**30 if is_cuda else None,
        "versions": versions(),
    }
