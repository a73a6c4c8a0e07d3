"""`merope drive`: a path of any length, or the keys of a game, to a video that grows while it is made."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from merope.adapters.key_cache import KeyCache
from merope.draw.progress import ProgressLine, show_line
from merope.errors import invalid
from merope.formats.trajectory import Trajectory
from merope.generate.camera_path import say
from merope.generate.command import check_machine, checked_model, load_pipeline, path_cameras, text_guidance
from merope.generate.drive_folder import PUT_BACK, REPORT, DriveFolder
from merope.generate.drive_inputs import DriveConfig, Route, RouteFinder, check_goes_on, route_from_files
from merope.generate.inputs import GenerateConfig
from merope.generate.recall import REMEMBERED
from merope.generate.stream_checks import check_past_noise, check_prefix_blocks, check_recall
from merope.generate.stream_file import FILE as STATE
from merope.generate.stream_file import StreamSettings
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import picked

if TYPE_CHECKING:
    from merope.generate.camera_video import CameraVideoPipeline
    from merope.generate.preflight import ModelOutline
    from merope.generate.stream import CameraStream


def drive(
    config: DriveConfig, command: Mapping[str, object], find_route: RouteFinder = route_from_files
) -> DriveFolder:
    """Drive a new route to its end, into a new folder. All input is checked before weights are read.

    command: what the user asked for; the report keeps it, for `resume`.
    """
    clip, folder = config.clip, DriveFolder(config.clip.out.parent)
    check_machine(clip)
    route = find_route(config)
    outline = checked_model(clip, route.path)
    block = block_frames(clip)
    KeyCache(config.window, config.sink, block)  # which checks them
    _check_route(config, route, outline, block)
    with folder.claimed():
        folder.check_new()
        began_s = time.perf_counter()
        pipe = _quiet_pipeline(clip)
        cameras = path_cameras(route.path) if clip.has_branch else None
        stream = pipe.stream(
            clip.prompt,
            route.prefix,
            None if cameras is None or route.prefix is None else cameras.at(slice(route.prefix_frames)),
            negative_prompt=clip.negative_prompt,
            num_inference_steps=clip.steps,
            guidance_scale=text_guidance(clip, outline.has_text),
            **_stream_settings(config, block),
            cuda_graphs=_is_better_recorded(pipe),
        )
        folder.begin(stream, route.path, route.prefix, clip.fps, command)
        _drive_on(stream, folder, folder.path(), config, time.perf_counter() - began_s)
    return folder


def resume(config: DriveConfig) -> DriveFolder:
    """Go on with the drive of a folder from the state after its last block; the model is that of the config."""
    clip, folder = config.clip, DriveFolder(config.clip.out.parent)
    check_machine(clip)
    with folder.claimed():
        folder.read()
        path = folder.path()
        if folder.frames > path.count:
            raise invalid(
                str(folder.folder / REPORT), f"of at most the path's {path.count} frames", folder.frames, PUT_BACK
            )
        if folder.frames == path.count:
            folder.close(path, {})  # it may have been stopped before it came to that
            say(f"{folder.folder} is driven to its end already")
            return folder
        checked_model(clip, path)
        began_s = time.perf_counter()
        pipe = _quiet_pipeline(clip)
        stream = pipe.resume_stream(folder.folder, cuda_graphs=_is_better_recorded(pipe))
        _check_same_drive(stream, folder, config)
        folder.settle()
        _drive_on(stream, folder, path, config, time.perf_counter() - began_s)
    return folder


def _stream_settings(config: DriveConfig, block: int) -> dict[str, Any]:
    """What a stream is made with and its file keeps, by the names of both."""
    clip = config.clip
    sizes = {"height": clip.height, "width": clip.width, "window": config.window, "sink": config.sink, "block": block}
    remember = REMEMBERED if config.recall else 0
    return {**sizes, "seed": clip.seed, "remember": remember, "past_noise": config.past_noise}


def _check_same_drive(stream: "CameraStream", folder: DriveFolder, config: DriveConfig) -> None:
    """Refuse a state and a report that are not of one drive, before anything in the folder is changed."""
    clip, state, report = config.clip, folder.folder / STATE, folder.folder / REPORT
    told = _stream_settings(config, block_frames(clip)) | ({} if clip.steps is None else {"steps": clip.steps})
    rows = [(state, name, value, getattr(stream.settings, name)) for name, value in told.items()]
    rows += [(report, "frames", stream.frames, folder.frames), (report, "fps", clip.fps, folder.report.get("fps"))]
    for file, name, expected, got in rows:
        if got != expected:
            raise invalid(f"{name} in {file}", f"{expected} as in the rest of the drive", repr(got), PUT_BACK)


def _quiet_pipeline(clip: GenerateConfig) -> "CameraVideoPipeline":
    from merope.generate.frame_coding import streamed_vae_dtype
    from merope.generate.preflight import no_loading_bars

    with no_loading_bars():
        pipe = load_pipeline(clip, streamed_vae_dtype(clip.run_device))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _is_better_recorded(pipe: "CameraVideoPipeline") -> bool:
    from merope.adapters.recorded_passes import is_bound_by_launches

    return is_bound_by_launches(pipe.transformer)


def block_frames(clip: GenerateConfig) -> int:
    """Latent frames of a block: as the model was trained, known before its weights are read."""
    from merope.generate.preflight import trained_block_frames
    from merope.generate.stream import BLOCK_FRAMES

    return trained_block_frames(clip.model, clip.branch if clip.has_branch else None) or BLOCK_FRAMES


def _check_route(config: DriveConfig, route: Route, outline: "ModelOutline", block: int) -> None:
    """Refuse a prefix that does not fill blocks, a path that ends with it, and what a stream would refuse later."""
    clip = config.clip
    sizes = (clip.height, clip.width, config.window, config.sink, block)
    settings = StreamSettings(*sizes, 1, 1.0, clip.seed, REMEMBERED, config.past_noise)
    check_past_noise(config.past_noise)
    check_recall(config.recall, None, settings)
    check_goes_on(route.path, route.prefix_frames, clip.fps)
    if route.prefix is not None:
        check_prefix_blocks(route.prefix[None], outline.strides, settings)


def _drive_on(
    stream: "CameraStream", folder: DriveFolder, path: Trajectory, config: DriveConfig, load_s: float
) -> None:
    """Block by block to the end of the path. What is finished stays if anything stops it.

    A last block that the path does not fill is driven with its last camera held; the video ends with the path.
    """
    from merope.generate.causal_clips import blocks_left

    began_s, drive_s = time.perf_counter(), 0.0
    total = stream.blocks + blocks_left(stream, path.count)
    progress = ProgressLine("driving", total, "blocks", before=stream.blocks)
    try:
        while stream.frames < path.count:
            first, start_s = stream.frames, time.perf_counter()
            cameras = held_cameras(path, first, stream.block_frames) if config.clip.has_branch else None
            frames = stream.drive(cameras, config.recall)[: path.count - first]
            seconds = time.perf_counter() - start_s
            drive_s += seconds
            folder.add(stream, frames, seconds)
            progress.show(
                stream.blocks, f"{seconds:.2g} s a block, {folder.frames / folder.report['fps']:.3g} s of video"
            )
    finally:
        show_line("")
        keep_s = time.perf_counter() - began_s - drive_s
        folder.close(path, {"load": load_s, "drive": drive_s, "keep": keep_s})


def held_cameras(path: Trajectory, first: int, count: int) -> Cameras:
    """Cameras of a path from a frame on; after its end the last one stays."""
    frames = torch.arange(first, first + count).clamp_max(path.count - 1)
    assert path.lens is not None
    return Cameras(path.world_from_camera[frames], picked(path.lens, frames))
