"""Load the models that a server is started with. A folder that does not fit is refused before its weights are read."""

from collections.abc import Sequence
from pathlib import Path

import torch

from merope.demo.drive import SHIPPED_MODEL, check_model, device_here, loaded
from merope.errors import invalid
from merope.generate.frame_coding import streamed_vae_dtype
from merope.generate.preflight import ModelOutline
from merope.studio.studio_model import MOST_STEPS, ModelChoice, StudioModel
from merope.world.clips import WorldClips
from merope.world.clips_file import CLIPS_FILE, read_clips

SHIPPED_NAME = "the package's model"


def load_models(choices: Sequence[ModelChoice]) -> list[StudioModel]:
    """All of them, or none: each folder is checked before the first one is loaded."""
    names = distinct_names([choice.model for choice in choices])
    checked = [_checked(choice) for choice in choices]
    asked = next((choice.prompt for choice in choices if choice.prompt is not None), None)
    if asked is not None and not any(outline.has_text for outline, _, _ in checked):
        raise invalid("--prompt", "left out: no model here has a text encoder", repr(asked), "leave it out")
    return [_loaded(choice, name, *found) for choice, name, found in zip(choices, names, checked, strict=True)]


def load_model(choice: ModelChoice) -> StudioModel:
    return load_models([choice])[0]


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """What pages call the models: the last parts of their folders, as many as tell them apart."""
    whole = [folder.resolve() for folder in folders]
    if len(set(whole)) < len(whole):
        raise invalid("--model", "another folder each time", ", ".join(map(str, folders)), "name each folder once")
    longest = max(len(folder.parts) for folder in whole)
    for count in range(1, longest + 1):
        names = ["/".join(folder.parts[-count:]) for folder in whole]
        if len(set(names)) == len(names):
            break
    return [SHIPPED_NAME if folder == SHIPPED_MODEL else name for folder, name in zip(folders, names, strict=True)]


def _checked(choice: ModelChoice) -> tuple[ModelOutline, WorldClips, int]:
    """The outline of a model, its clips and its denoising steps."""
    if not choice.model.is_dir():
        raise FileNotFoundError(f"model folder {choice.model} is missing; check --model")
    clips, steps = read_clips(choice.model)
    if choice.steps is None and steps > MOST_STEPS:
        raise invalid(f"steps in {choice.model / CLIPS_FILE}", f"at most {MOST_STEPS}", steps, "pass fewer as --steps")
    outline = check_model("--model", choice.model, choice.branch or choice.model / "branch", clips)
    device_here("--device", choice.device)
    return outline, clips, steps


def _loaded(choice: ModelChoice, name: str, outline: ModelOutline, clips: WorldClips, steps: int) -> StudioModel:
    device = device_here("--device", choice.device)
    dtype = torch.bfloat16 if outline.has_text and device.type == "cuda" else torch.float32
    precision = {"default": dtype, "vae": streamed_vae_dtype(device)}
    pipe = loaded(choice.model, device, choice.branch, precision)
    return StudioModel(pipe, clips, choice.steps or steps, choice, name)
