"""A tiny model that streams, its path, and streams that have begun."""

from typing import Any

from adapters.wan_models import perturb, tiny_config, tiny_wan
from scenes import curved_drive
from tiny_pipelines import LENS, euler, tiny_pipeline, video
from torch import Tensor

from merope.adapters.attachment import attach
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.stream import CameraStream

PREFIX = 9
LONG = curved_drive(PREFIX + 60 * 12, step_m=0.4)
TWO_STEPS = {"num_inference_steps": 2}
ANY_SIZE = {"rtol": 1e-5, "atol": 1e-5}


def model(with_branch: bool = True, history: str | None = None) -> CameraVideoPipeline:
    """No text, one token a frame."""
    transformer = tiny_wan(num_layers=2)
    if with_branch:
        perturb(attach(transformer, tiny_config(blocks="every", history=history)))
    return tiny_pipeline(transformer=transformer, with_text=False, scheduler=euler())


def path(count: int, first: int = 0, offset_m: float = 0.0) -> Tensor:  # [count, 4, 4]
    poses = LONG[first : first + count].clone()
    poses[:, :3, 3] += offset_m
    return poses


def begun(pipe: CameraVideoPipeline, **options: Any) -> CameraStream:
    given = {"prefix": video(PREFIX), "cameras": path(PREFIX), "lens": LENS, "guidance_scale": 1.0, **TWO_STEPS}
    return pipe.stream(**{**given, **options})


def next_poses(stream: CameraStream) -> Tensor:
    return path(stream.block_frames, stream.frames)
