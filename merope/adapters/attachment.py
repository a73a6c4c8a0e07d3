"""Attach a camera branch to a video transformer of diffusers, take it off again, load a saved one.

    branch = merope.attach(transformer, merope.CameraBranchConfig())
    transformer(latents, timestep, text, attention_kwargs={"cameras": cameras})

All take a pipeline in the place of its transformer, and then serve all transformers that it has.

The branch lives in attention processors, diffusers' own extension point: no module of the base model is replaced and
no key of its state dict changes.
"""

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, overload

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn
from torch.utils.hooks import RemovableHandle

from merope.adapters.branch_config import CameraBranchConfig
from merope.adapters.camera_attention import CameraProcessor
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.camera_input import CameraInput
from merope.adapters.conditioning import CAMERAS, HISTORY, TIMES, CameraCondition, take_cameras_off
from merope.adapters.families import family_of
from merope.adapters.history import HistoryReferences
from merope.adapters.pipeline_branches import PipelineBranches, branch_subfolder, transformers_of
from merope.adapters.saving import asked_dtype, read_branch
from merope.encodings.tokens import Times
from merope.errors import invalid
from merope.geometry.cameras import Cameras

ATTACHMENT = "_merope_attachment"
SAVE = "save_pretrained"
PIPELINES = "diffusers.pipelines."
GROUP_OFFLOADING = "group_offloading"  # diffusers' name of the hook

Model = ModelMixin | DiffusionPipeline

_CHANGING = threading.Lock()
"""Held while a branch is put on or taken off: one thread at a time."""


@dataclass
class _Attachment:
    """What `detach` must undo. Not a module, so that the branch is no second path to the same parameters."""

    branch: CameraBranch
    inputs: CameraInput
    hooks: list[RemovableHandle]
    uncast: Any  # the transformer's `_skip_layerwise_casting_patterns` before


@overload
def attach(
    transformer: DiffusionPipeline, config: CameraBranchConfig | None = ..., dtype: torch.dtype | None = ...
) -> PipelineBranches: ...
@overload
def attach(
    transformer: ModelMixin, config: CameraBranchConfig | None = ..., dtype: torch.dtype | None = ...
) -> CameraBranch: ...
def attach(
    transformer: Model, config: CameraBranchConfig | None = None, dtype: torch.dtype | None = None
) -> CameraBranch | PipelineBranches:
    """Add a fresh camera branch; the output stays what it was until the branch is trained (not so for ReRoPE).

    Call it before torch.compile and before any sharding. From then on every forward needs
    `attention_kwargs={"cameras": …}`, or stands inside of `merope.cameras`. `dtype` is that of the branch, by default
    its block's. A pipeline gets a branch on each of its transformers (Wan2.2 A14B has two).
    """
    if isinstance(transformer, DiffusionPipeline):
        return _on_each(transformer, lambda name, part: attach(part, config, dtype))
    _check_transformer(transformer)
    if config is not None and not isinstance(config, CameraBranchConfig):
        fix = "pass CameraBranchConfig(encoding=…); a branch goes back on with save_pretrained and merope.load_branch"
        raise invalid("config", "a merope.CameraBranchConfig", type(config).__name__, fix)
    branch = CameraBranch.for_transformer(transformer, config or CameraBranchConfig())
    with _CHANGING:
        _install(transformer, branch, dtype)
    return branch


@overload
def load_branch(
    transformer: DiffusionPipeline, folder_or_hub_id: str | PathLike[str], **options: Any
) -> PipelineBranches: ...
@overload
def load_branch(transformer: ModelMixin, folder_or_hub_id: str | PathLike[str], **options: Any) -> CameraBranch: ...
def load_branch(
    transformer: Model, folder_or_hub_id: str | PathLike[str], **options: Any
) -> CameraBranch | PipelineBranches:
    """Attach a branch that `branch.save_pretrained` (or `push_to_hub`) wrote.

    options: those of diffusers' `from_pretrained` (revision, subfolder, token, cache_dir, local_files_only, …). `dtype`
    is that of the branch, by default its block's. A base model that the branch was not made for is refused with all
    differences. A pipeline with two transformers takes the folder that their branches were saved to together.
    """
    if isinstance(transformer, DiffusionPipeline):
        asked, names = options.pop("subfolder", None), transformers_of(transformer)
        places = {name: branch_subfolder(transformer, folder_or_hub_id, asked, name) for name in names}
        return _on_each(
            transformer, lambda name, part: load_branch(part, folder_or_hub_id, subfolder=places[name], **options)
        )
    _check_transformer(transformer)
    branch = read_branch(folder_or_hub_id, transformer, **options)
    with _CHANGING:
        _install(transformer, branch, asked_dtype(options))
    return branch


def _on_each(pipeline: DiffusionPipeline, put_on: Callable[[str, ModelMixin], CameraBranch]) -> PipelineBranches:
    """A branch on every transformer of a pipeline, or on none."""
    made: dict[str, CameraBranch] = {}
    transformers = transformers_of(pipeline)
    try:
        for name, transformer in transformers.items():
            made[name] = put_on(name, transformer)
    except BaseException:
        for name in made:
            detach(transformers[name])
        raise
    return PipelineBranches(made)


@overload
def detach(transformer: DiffusionPipeline) -> PipelineBranches: ...
@overload
def detach(transformer: ModelMixin) -> CameraBranch: ...
def detach(transformer: Model) -> CameraBranch | PipelineBranches:
    """Take the branch off: the base model is as it was, with its own keys. The branch is returned, whole.

    Of a pipeline all branches are taken off, or none.
    """
    if not isinstance(transformer, DiffusionPipeline):
        return _detached({"": transformer})[""]
    return PipelineBranches(_detached(transformers_of(transformer)))


def _detached(transformers: dict[str, ModelMixin]) -> dict[str, CameraBranch]:
    """The branches of transformers, taken off; all of them or none."""
    with _CHANGING, ExitStack() as undo:
        attachments = {name: _attachment(part) for name, part in transformers.items()}
        for attachment in attachments.values():
            attachment.inputs.close()
            undo.callback(attachment.inputs.open)
        undo.pop_all()
        for name, attachment in attachments.items():
            _take_off(_uncompiled(transformers[name]), attachment)
    return {name: attachment.branch for name, attachment in attachments.items()}


def _take_off(transformer: ModelMixin, attachment: _Attachment) -> None:
    del transformer.__dict__[ATTACHMENT], transformer.__dict__[SAVE]
    for hook in attachment.hooks:
        hook.remove()
    transformer._skip_layerwise_casting_patterns = attachment.uncast
    for index, processor in attachment.branch.processors().items():
        _unset_processor(_self_attention(transformer, index), processor)


def attached_branch(transformer: ModelMixin) -> CameraBranch | None:
    """The camera branch of a transformer, None where it has none."""
    attachment = _uncompiled(transformer).__dict__.get(ATTACHMENT)
    return None if attachment is None else attachment.branch


@contextmanager
def cameras(
    transformer: Model,
    cameras: Cameras | CameraCondition,  # [V] or [b, V], one per frame of tokens
    times: Times | None = None,
    history: HistoryReferences | None = None,
) -> Iterator[None]:
    """Give cameras to every forward of this thread inside the block, for pipelines without `attention_kwargs`.

    with merope.cameras(pipe, cameras):
        video = pipe("a street at night")
    """
    parts = transformers_of(transformer) if isinstance(transformer, DiffusionPipeline) else {"": transformer}
    given = {CAMERAS: cameras, TIMES: times, HISTORY: history}
    with ExitStack() as stack:
        for part in parts.values():
            stack.enter_context(_attachment(part).inputs.giving(given))
        yield


def _install(transformer: ModelMixin, branch: CameraBranch, dtype: torch.dtype | None = None) -> None:
    _check_transformer(transformer)  # again: another thread may have been faster
    _check_blocks(transformer, branch)
    family = branch.family
    _set_processors(transformer, branch, dtype)
    inputs = CameraInput(branch, tuple(inspect.signature(type(transformer).forward).parameters)[1:])
    hooks = [
        transformer.register_forward_pre_hook(_check_processors),
        transformer.register_forward_pre_hook(_check_experts),
        transformer.register_forward_pre_hook(inputs.before_forward, with_kwargs=True),
        transformer.register_forward_hook(inputs.after_forward, always_call=True),
    ]
    if family.argument:
        others = set(range(len(transformer.get_submodule(family.blocks)))) - set(branch.processors())  # type: ignore[arg-type]
        hooks += [
            _self_attention(transformer, index).register_forward_pre_hook(take_cameras_off, with_kwargs=True)
            for index in others
        ]
    else:
        rope = transformer.get_submodule(family.rope)
        branch.time_limit = getattr(rope, "max_seq_len", None)
        hooks.append(rope.register_forward_hook(inputs.after_rope))
    uncast = transformer._skip_layerwise_casting_patterns
    transformer.__dict__[ATTACHMENT] = _Attachment(branch, inputs, hooks, uncast)
    transformer.__dict__[SAVE] = partial(_save_and_warn, transformer)
    of_branch = rf"{family.attention}\.processor"  # has its own precision
    transformer._skip_layerwise_casting_patterns = [*(uncast or ()), of_branch]  # type: ignore[assignment]


def _set_processors(transformer: ModelMixin, branch: CameraBranch, dtype: torch.dtype | None) -> None:
    """The branch's processors in their blocks, all of them or, where memory ends, none."""
    with ExitStack() as undo:
        for index, processor in branch.processors().items():
            attn = _self_attention(transformer, index)
            weight = getattr(attn, branch.family.query).weight
            computes = weight.is_floating_point() and weight.dtype.itemsize > 1  # not float8, only kept for storage
            processor.to(weight.device, dtype or (weight.dtype if computes else torch.bfloat16))
            processor.train(transformer.training)
            processor.take_place_of(attn.processor)
            attn.set_processor(processor)
            undo.callback(_unset_processor, attn, processor)
        undo.pop_all()


def _unset_processor(attn: Any, processor: CameraProcessor) -> None:
    attn.set_processor(processor.give_place_back())


def _uncompiled(transformer: Any) -> ModelMixin:
    """The model itself behind torch.compile's wrapper."""
    return getattr(transformer, "_orig_mod", transformer)


def _attachment(transformer: ModelMixin) -> _Attachment:
    attachment: _Attachment | None = _uncompiled(transformer).__dict__.get(ATTACHMENT)
    if attachment is None:
        raise invalid("transformer", "one with a camera branch", "one without", "call merope.attach first")
    return attachment


def _self_attention(transformer: ModelMixin, index: int) -> Any:
    family = family_of(transformer)
    return transformer.get_submodule(f"{family.blocks}.{index}.{family.attention}")


def _check_blocks(transformer: ModelMixin, branch: CameraBranch) -> None:
    """Refuse blocks whose processors have weights: these would be saved, and trained, as if they were the branch's.

    Refuse moved ones too: hooks of diffusers and accelerate are put on the layers that are there, and a branch that
    comes later has none.
    """
    for index in branch.processors():
        attn = _self_attention(transformer, index)
        found: object = attn.processor
        if isinstance(found, nn.Module) and found.state_dict():
            fix = "call transformer.set_attn_processor with diffusers' own processor first"
            raise invalid(f"processor of block {index}", "one without weights", type(found).__name__, fix)
        if getattr(found, "_parallel_config", None) is not None:
            expected = f"without context parallelism for {branch.family.models} with a camera branch"
            fix = "shard samples instead: plans are not split over ranks"
            raise invalid("transformer", expected, f"block {index} with it", fix)
        block = transformer.get_submodule(f"{branch.family.blocks}.{index}")
        moved = [block, attn, *getattr(attn, branch.family.query).modules()]  # as wholes, or layer by layer
        if any(map(has_offload_hook, moved)):
            fix = "attach or load the branch first, then call enable_sequential_cpu_offload or enable_group_offload"
            raise invalid("transformer", "one whose layers are not offloaded yet", f"block {index} offloaded", fix)


def has_offload_hook(layer: nn.Module) -> bool:
    """Whether the weights of a layer come for its forward and go after it, be it accelerate's or diffusers' doing."""
    hooks = getattr(layer, "_diffusers_hook", None)
    is_grouped = hooks is not None and hooks.get_hook(GROUP_OFFLOADING) is not None
    return is_grouped or getattr(getattr(layer, "_hf_hook", None), "offload", False)


def _check_processors(transformer: ModelMixin, args: tuple[Any, ...]) -> None:
    """Forward pre-hook: someone else's processor in a camera block would run it without cameras and say nothing."""
    branch = attached_branch(transformer)
    if branch is None or torch.compiler.is_compiling():
        return
    for index, processor in branch.processors().items():
        found: object = _self_attention(transformer, index).processor
        if found is not processor:
            fix = "call merope.detach first, set_attn_processor then, and attach or load the branch after it"
            raise invalid(f"processor of block {index}", "that of the camera branch", type(found).__name__, fix)


def _check_experts(transformer: ModelMixin, args: tuple[Any, ...]) -> None:
    """Forward pre-hook: of two transformers (Wan2.2 A14B) the one without a branch would ignore the cameras.

    A transformer does not know its pipeline; the pipeline that calls it stands on the stack.
    """
    frame = None if torch.compiler.is_compiling() else sys._getframe()
    while frame is not None:
        is_pipeline = frame.f_globals.get("__name__", "").startswith(PIPELINES) and frame.f_code.co_name == "__call__"
        if is_pipeline:  # of other frames, f_locals would keep tensors alive
            for name in ("transformer", "transformer_2"):
                expert = getattr(frame.f_locals.get("self"), name, None)
                if expert is not None and attached_branch(expert) is None:
                    fix = "attach one to both: merope.attach(pipe)"
                    raise invalid(f"pipe.{name}", "with a camera branch, like its other transformer", "without", fix)
            return
        frame = frame.f_back


def _save_and_warn(transformer: ModelMixin, *args: Any, **options: Any) -> None:
    """diffusers' `save_pretrained` of a transformer that carries a branch."""
    warnings.warn(
        "the camera branch is saved among the weights of the transformer, and diffusers drops it when it loads them; "
        "save it on its own: merope.detach(transformer).save_pretrained(folder)",
        stacklevel=2,
    )
    type(transformer).save_pretrained(transformer, *args, **options)


def _check_transformer(transformer: ModelMixin) -> None:
    family_of(transformer)
    if attached_branch(transformer) is not None:
        raise invalid("transformer", "one without a camera branch", "one with a branch", "call merope.detach first")
