"""The branches of a pipeline: one for each of its transformers, made, saved and loaded together."""

from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn

from merope.adapters.camera_branch import CameraBranch
from merope.errors import invalid

TRANSFORMERS = ("transformer", "transformer_2")
"""Components of pipelines that denoise. Wan2.2 A14B has an expert for early steps and one for late ones."""


class PipelineBranches(nn.ModuleDict):
    """The camera branches of a pipeline, by the name of the transformer that they are on."""

    def __init__(self, branches: dict[str, CameraBranch]) -> None:
        super().__init__(branches)

    def save_pretrained(self, folder: str | PathLike[str], **options: Any) -> None:
        """Save every branch in a folder of its name; options are those of diffusers' own `save_pretrained`."""
        for name, branch in self.items():
            branch.save_pretrained(Path(folder) / name, **options)  # type: ignore[operator]


def transformers_of(pipeline: DiffusionPipeline) -> dict[str, ModelMixin]:
    """The transformers of a pipeline by name."""
    parts = {name: getattr(pipeline, name, None) for name in TRANSFORMERS}
    found = {name: part for name, part in parts.items() if part is not None}
    if not found:
        fix = "load the pipeline with its transformer; docs/bases.md lists the models that take a camera branch"
        raise invalid("pipeline", "one with a transformer", type(pipeline).__name__, fix)
    return found


def branch_subfolder(
    pipeline: DiffusionPipeline, folder_or_hub_id: str | PathLike[str], subfolder: str | None, name: str
) -> str | None:
    """Where `load_branch` finds the branch of one transformer: in a folder of its name, or, if alone, right there."""
    inside = PurePosixPath(subfolder or "")
    is_alone = len(transformers_of(pipeline)) == 1 and not (Path(folder_or_hub_id) / inside / name).is_dir()
    return subfolder if is_alone else str(inside / name)
