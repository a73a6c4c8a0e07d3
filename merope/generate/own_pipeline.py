"""Clips of models that run in their own, unmodified pipeline of diffusers, with cameras and what a prefix can be there.

A pipeline that takes first frames gets them: most take one, as an image. Else, where a forward takes one timestep per
frame or token, the first frames of a clip can be clean: they are put into the latents before every forward, at time 0.
Else there is text.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from merope.adapters.attachment import cameras as giving_cameras
from merope.adapters.families.facts import Family
from merope.errors import invalid
from merope.formats.video import as_bytes
from merope.generate.base_video import BaseVideo
from merope.generate.camera_path import say
from merope.generate.conditions import latent_cameras
from merope.generate.inputs import GenerateConfig
from merope.generate.preflight import ModelOutline
from merope.geometry.cameras import Cameras

Start = Literal["clean", "given", "text"]
"""What a clip may begin with: clean frames among the latents, frames that the pipeline takes, or nothing."""

CALL = ("prompt", "num_frames", "num_inference_steps", "generator", "output_type")
"""Arguments of every call."""

SIZE = ("height", "width")
"""Arguments of nearly every call."""


def check_start(config: GenerateConfig, outline: ModelOutline) -> None:
    """Say what the clip of a config begins with. A prefix that the model does not take is refused."""
    assert outline.pipeline is not None
    family, name, arguments = outline.family, outline.pipeline.__name__, call_arguments(outline.pipeline)
    _check_model(config, outline)
    _check_call(name, arguments)
    start: Start = "text" if config.prefix is None else possible_start(family, outline.transformer.config, arguments)
    _check_prefix(config, family, name, arguments, start)
    _check_size(config, outline, arguments)
    plural = "" if config.prefix_frames == 1 else "s"
    first = {
        "clean": f"{config.prefix_frames} clean frame{plural}, ",
        "given": f"{config.prefix_frames} given frames, " if plural else "the first frame as an image, ",
        "text": "",
    }
    say(f"{family.models} in {name}: {first[start]}text{' and cameras' if config.has_branch else ''}")


def _check_model(config: GenerateConfig, outline: ModelOutline) -> None:
    """Refuse families and folders that do not run here."""
    family = outline.family
    if family.not_generated:
        raise invalid("--model", "one that merope generate runs", family.models, family.not_generated)
    if config.transformer is not None and len(outline.transformers) > 1:
        fix = "put both into a copy of the model's folder"
        raise invalid("--transformer", "left out for a model of two", config.transformer, fix)
    if not outline.has_text:
        fix = "complete the folder: pipelines of other models than Wan want a prompt"
        raise invalid("--model", "with text_encoder and tokenizer", config.model, fix)


def _check_prefix(
    config: GenerateConfig, family: Family, name: str, arguments: Mapping[str, inspect.Parameter], start: Start
) -> None:
    """Refuse first frames that the pipeline does not take, and none where it wants some."""
    if config.prefix is None:
        if family.needs_frames(arguments):
            raise invalid(f"--prefix for {name}", "given: it wants an image", "nothing", "add --prefix-frames 1, too")
        return
    if start == "text":
        fix = "leave it out: the model has one timestep for all frames, and its pipeline takes no image"
        raise invalid(f"--prefix for {name}", "left out", str(config.prefix), fix)
    most = family.frames_taken(arguments)
    if start == "given" and config.prefix_frames > most:
        expected, takes = ("1", "one image, not several clean frames") if most == 1 else (f"at most {most}", "no more")
        fix = f"pass --prefix-frames {most}: the pipeline takes {takes}"
        raise invalid(f"--prefix-frames for {name}", expected, config.prefix_frames, fix)


def _check_call(name: str, arguments: Mapping[str, inspect.Parameter]) -> None:
    """Refuse pipelines that make no videos (of these models there are some for images), or need more than we have."""
    known = {"self", *CALL, *SIZE, "image"}
    missing = [argument for argument in CALL if argument not in arguments]
    needed = [key for key, value in arguments.items() if value.default is inspect.Parameter.empty and key not in known]
    if missing or needed:
        got = f"one without {missing[0]}" if missing else f"one that needs {needed[0]}"
        fix = "use the model's pipeline for videos, or run this one inside of merope.cameras"
        raise invalid(f"the pipeline {name}", "one that makes videos of text or first frames", got, fix)


def _check_size(config: GenerateConfig, outline: ModelOutline, arguments: Mapping[str, Any]) -> None:
    """Refuse a size that the pipeline would not keep: it goes by the image alone."""
    if all(name in arguments for name in SIZE):
        return
    sizes, pixels = outline.transformer.config, outline.strides.pixels
    made = outline.family.made_size(sizes, pixels, config.height, config.width)
    if made != (config.height, config.width):
        fix = "the pipeline makes clips of this size from such an image"
        raise invalid("--size", f"{made[0]} {made[1]}", f"{config.height} {config.width}", fix)


def call_arguments(pipeline: type[Any]) -> Mapping[str, inspect.Parameter]:
    """Of a pipeline's call."""
    return inspect.signature(pipeline.__call__).parameters


def possible_start(family: Family, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Start:
    """The most that a clip can begin with."""
    if family.frames_taken(arguments):
        return "given"
    can_be_clean = family.timesteps != "clip" and not family.image_channels(config)
    return "clean" if can_be_clean and "callback_on_step_end" in arguments else "text"


def own_frames(
    video: BaseVideo,
    config: GenerateConfig,
    cameras: Cameras,  # [T], one per RGB frame
    prefix: Tensor | None,  # uint8 [T0, H, W, 3]
) -> Tensor:  # uint8 [T, H, W, 3]
    """The frames of a clip."""
    from PIL import Image

    pipe, family = video.pipe, video.family
    arguments = call_arguments(type(pipe))
    call: dict[str, Any] = {
        "prompt": config.prompt,
        **{name: getattr(config, name) for name in SIZE if name in arguments},
        "num_frames": config.frames,
        "num_inference_steps": config.steps,
        "generator": torch.Generator("cpu").manual_seed(config.seed),  # the same noise on every machine
        "output_type": "np",
        **family.whole_clip(arguments, config.frames),
    }
    if config.negative_prompt is not None:
        call["negative_prompt"] = config.negative_prompt
    if config.guidance is not None:
        call |= family.guided(pipe, config.guidance)
    with ExitStack() as around:
        if config.has_branch:
            of_tokens = latent_cameras(cameras, video.strides.of_cameras)
            around.enter_context(giving_cameras(pipe, of_tokens))
        if prefix is not None and family.frames_taken(arguments):
            call |= family.first_frames(arguments, [Image.fromarray(frame) for frame in prefix.numpy()])
        elif prefix is not None:
            call |= around.enter_context(clean_prefix(video, video.encode_frames(prefix[None])))
        frames = torch.as_tensor(pipe(**call).frames[0])
    made, asked = tuple(frames.shape[:3]), (config.frames, config.height, config.width)
    if made != asked:
        fix = "run it inside of merope.cameras, and give its frames the cameras that they have"
        raise invalid(f"the clip of {type(pipe).__name__}", f"of frames, height and width {asked}", made, fix)
    return as_bytes(frames.float()).cpu()


@contextmanager
def clean_prefix(
    video: BaseVideo,
    clean: Tensor,  # [1, C, K, h, w] normalised
) -> Iterator[dict[str, Any]]:
    """Let these be the first latent frames of all forwards inside; gives the callback for the pipeline's call."""
    last: dict[str, Any] = {}

    def before(transformer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        last.update(kwargs)
        return args, video.family.with_clean_frames(transformer.config, kwargs, clean)

    def put_back(pipe: Any, step: int, time: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A step of the scheduler has moved them."""
        latents = tensors["latents"].clone()
        of_video = video.family.video({**last, "hidden_states": latents})
        of_video[:, :, : clean.shape[2]] = clean.to(of_video)
        return {"latents": latents}

    hooks = [
        transformer.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        for transformer in video.transformers.values()
    ]
    try:
        yield {"callback_on_step_end": put_back}
    finally:
        for hook in hooks:
            hook.remove()
