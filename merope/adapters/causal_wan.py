"""A causal Wan: every latent frame sees its own block and what came before it, in a whole clip or block by block.

    merope.attach_causal(transformer)                            # before or after merope.attach
    sees = merope.Visibility.block_causal(frames)
    transformer(latents, timestep, text, attention_kwargs={"sees": sees, "cameras": cameras})    # a whole clip

    cache = KeyCache(window=12)
    block = ready_block(transformer, cache, latents, cameras)    # of the next 3 latent frames
    transformer(latents, timestep, text, attention_kwargs={"past": block})
    cache = commit(transformer, cache, block, clean_latents, text)

No weight is added. A call without `sees` and `past` is the base model's own, bit for bit. In a stream the frames of the
cache stand in a row before the block, sinks first: what matters is how far back they are, not how long the stream is.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from merope.adapters.attachment import attached_branch
from merope.adapters.batching import matched_batch
from merope.adapters.block_passes import BlockCondition, block_pass, finished_block
from merope.adapters.branch_config import check_causal
from merope.adapters.camera_attention import CameraProcessor, plan_dtype
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.causal_attention import CausalAttention, CausalRotary, rotary_plan
from merope.adapters.causal_history import leading_references, led_by_references, seeing_references
from merope.adapters.conditioning import CAMERAS, HISTORY, PAST, SEES, TIMES, CameraCondition, attended_dtype
from merope.adapters.families.noise import TIMESTEPS
from merope.adapters.history import HistoryReferences, with_references, without_references
from merope.adapters.key_cache import KeyCache, KeyReader
from merope.adapters.text_keys import KEPT, TextAttention
from merope.attention.dispatch import make_ready
from merope.attention.plan import AttentionPlan
from merope.attention.visible_cameras import Visibility, teacher_forced
from merope.encodings.tokens import Times
from merope.errors import invalid
from merope.geometry.cameras import Cameras

CAUSAL = "_merope_causal"
"""Where a causal transformer keeps what `detach_causal` must undo."""


def attach_causal(transformer: WanTransformer3DModel) -> None:
    """Let a transformer take `sees` and `past` in its attention_kwargs. Twice is once."""
    if CAUSAL in getattr(transformer, "_orig_mod", transformer).__dict__:  # behind torch.compile's wrapper, or bare
        return
    if not isinstance(transformer, WanTransformer3DModel):
        fix = "pass the transformer itself, before torch.compile, PEFT or FSDP wrap it"
        raise invalid("transformer", "a diffusers WanTransformer3DModel", type(transformer).__name__, fix)
    if transformer.config.patch_size[0] != 1:
        fix = "use a model whose tokens span one latent frame"
        raise invalid("transformer.patch_size[0]", "1 for causal attention", transformer.config.patch_size[0], fix)
    if any(getattr(block.attn1.processor, "_parallel_config", None) is not None for block in transformer.blocks):
        raise invalid("transformer", "without context parallelism", "one with it", "shard samples instead")
    for index, block in enumerate(transformer.blocks):
        attn: Any = block.attn1
        layer = f"base.{index}"
        if isinstance(attn.processor, CameraProcessor):
            attn.processor.base = CausalAttention(attn.processor.base, layer)
        else:
            attn.set_processor(CausalAttention(attn.processor, layer))
        block.attn2.set_processor(TextAttention(block.attn2.processor, index))
    inputs = CausalInput()
    hooks = [  # before those of a camera branch, whichever came first
        transformer.register_forward_pre_hook(inputs.before_forward, with_kwargs=True, prepend=True),
        transformer.rope.register_forward_hook(inputs.after_rope, prepend=True),
        transformer.condition_embedder.text_embedder.register_forward_hook(inputs.after_text),
        transformer.register_forward_hook(inputs.after_forward),
    ]
    transformer.__dict__[CAUSAL] = hooks


def detach_causal(transformer: WanTransformer3DModel) -> None:
    """Give every block its own attention back. A camera branch stays."""
    transformer = getattr(transformer, "_orig_mod", transformer)
    hooks: list[RemovableHandle] | None = transformer.__dict__.pop(CAUSAL, None)
    if hooks is None:
        raise invalid("transformer", "a causal one", "one that is not", "call merope.attach_causal first")
    for hook in hooks:
        hook.remove()
    for block in transformer.blocks:
        attn: Any = block.attn1
        if isinstance(attn.processor, CausalAttention):
            attn.set_processor(attn.processor.base)
        elif isinstance(getattr(attn.processor, "base", None), CausalAttention):
            attn.processor.base = attn.processor.base.base
        across: Any = block.attn2
        if isinstance(across.processor, TextAttention):
            across.set_processor(across.processor.base)


def teacher_forcing(
    cameras: Cameras | None,  # [T] or [B, T], of one copy
    frames: int,
    block: int = 3,
    *,
    last: int | None = None,
    given: int | None = None,
) -> dict[str, Any]:
    """attention_kwargs of a pass over a clean copy of a clip and then a noisy one, 2 · frames latent frames in all.

    Both copies of a frame have the same time and the same camera. `last` and `given` as in
    `Visibility.teacher_forcing`; with `given` the pass is over the frames that `teacher_forced` names.
    """
    clean, noisy = teacher_forced(frames, block, given)
    times = [*range(frames)[clean], *range(frames)[noisy]]
    twice = {} if cameras is None else {CAMERAS: cameras.at(clean).joined(cameras.at(noisy))}
    return {SEES: Visibility.teacher_forcing(frames, block, last=last, given=given), TIMES: times, **twice}


def ready_block(
    transformer: WanTransformer3DModel,
    cache: KeyCache,
    latents: Tensor,  # [B, C, block, h, w]
    cameras: Cameras | None = None,  # [block] or [B, block]; for a model with a camera branch
    history: HistoryReferences | None = None,
    times: Sequence[float] | None = None,  # [block]
) -> BlockCondition:
    """The next frames of a stream, which see what the cache holds and each other.

    history: retrieved references for a branch with history "ca". With "sa" they are frames of the cache (`recalling`).
    times: of the frames, by default 0, 1, 2, …; those of the cache are −1, −2, … backwards.
    """
    branch, frames = attached_branch(transformer), latents.shape[2]
    if (cameras is None) != (branch is None):
        expected = "None for a model without a camera branch" if branch is None else "given to a model with a branch"
        got = "None" if cameras is None else "cameras"
        raise invalid(CAMERAS, expected, got, "attach or load a branch" if branch is None else "pass one per frame")
    moments = torch.tensor([*cache.times, *(times or range(frames))], dtype=torch.float64, device=latents.device)
    plan = rotary_plan(transformer.rope, _grid(transformer, latents), moments[None, -frames:], moments[None])
    plan, reader, condition = _ready_plan(plan, latents), KeyReader(cache), None
    if branch is not None and cameras is not None:
        cameras, _ = matched_batch(cameras, None, len(latents))  # the cache keeps one clip a sample, too
        past, leading = cache.cameras, len(cache.recalled)
        condition = branch.prepare_block(cameras, latents, past, moments, history, leading)
        condition = replace(condition, past=reader)
    return BlockCondition(plan, condition, cameras, reader)


@torch.no_grad()
def commit(
    transformer: WanTransformer3DModel,
    cache: KeyCache,
    block: BlockCondition,
    latents: Tensor,  # [B, C, block, h, w] finished
    text: Tensor,  # [B, L, text_dim]
    noise_level: float = 0.0,
    **options: Any,
) -> KeyCache:
    """The cache with a finished block: one pass at timestep 0 makes its keys.

    noise_level: of latents that the caller has put noise on, which the model is told. Later blocks then see less of
        their faults. Models that were trained with `objective.past_noise` know such a past.
    options: further ones of the transformer's forward.
    """
    reading = block.reading(cache, keep=True)
    timestep = torch.full((latents.shape[0],), TIMESTEPS * noise_level, device=latents.device)
    block_pass(transformer, reading, latents, timestep, text, **options)
    return finished_block(cache, block, reading.reader, latents)


def recalling(
    transformer: WanTransformer3DModel,
    cache: KeyCache,
    latents: Tensor,  # [B, C, n, h, w]
    cameras: Cameras | None,  # [n] or [B, n]
    text: Tensor,  # [B, L, text_dim]
    times: Sequence[float] | None = None,  # [n], counted from the first frame of the next block
) -> KeyCache:
    """The cache with further frames for the next block alone: finished ones from long ago, or references.

    One clean pass makes their keys, in which they see each other. Without times they stand in line before all others.
    """
    count = latents.shape[2]
    alone = KeyCache(window=2 * count, block=count)
    block = ready_block(transformer, alone, latents.to(transformer.dtype), cameras, times=times)
    frames = commit(transformer, alone, block, latents, text).frames
    own: Sequence[float | None] = times or [None] * count
    timed = [replace(frame, time=time) for frame, time in zip(frames, own, strict=True)]
    return replace(cache, recalled=tuple(timed))


class CausalInput:
    """The hooks of a causal transformer: visibility and cache reach the blocks with the rotary embedding."""

    def __init__(self) -> None:
        self._threads, self._traced = threading.local(), SimpleNamespace()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CausalInput":
        memo[id(self)] = fresh = CausalInput()
        return fresh

    def __reduce__(self) -> tuple[Any, ...]:
        return CausalInput, ()

    @property
    def _forward(self) -> Any:
        """Where the hooks of one forward tell each other; torch.compile does not trace what belongs to threads."""
        return self._traced if torch.compiler.is_compiling() else self._threads

    def before_forward(
        self, transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook of the transformer: take `sees` and `past` out of `attention_kwargs`."""
        given = dict(kwargs.get("attention_kwargs") or {})
        sees, past = given.pop(SEES, None), given.pop(PAST, None)
        self._forward.underway, self._forward.references, self._forward.text = None, 0, None
        if sees is None and past is None:
            _check_sees_all(given.get(CAMERAS))
            return args, kwargs
        if past is None and not isinstance(sees, Visibility):
            fix = "Visibility.block_causal(frames) makes one"
            raise invalid(f'attention_kwargs["{SEES}"]', "a merope.Visibility", type(sees).__name__, fix)
        _check_processors(transformer)
        latents = args[0] if args else kwargs["hidden_states"]
        if past is not None:
            self._forward.underway = _checked_block(past, sees, given, latents), past.reader
            given[CAMERAS] = past.cameras
            if "encoder_hidden_states" in kwargs:
                self._forward.text = past.reader.cache.text.of(kwargs["encoder_hidden_states"])
        else:
            branch = attached_branch(transformer)
            history = leading_references(branch, given)
            if branch is not None and history is not None:
                history = led_by_references(given, history, latents, branch.config["latent_stride"])
                args, kwargs = with_references(args, kwargs, history, transformer.config.patch_size, before=True)
                sees, latents = seeing_references(sees, history.count), args[0] if args else kwargs["hidden_states"]
                self._forward.references = history.count
            self._forward.underway = _whole_plan(transformer, latents, given, sees), None
            _prepare_cameras(branch, latents, sees, given, self._forward.references)
        return args, {**kwargs, "attention_kwargs": given}

    def after_rope(self, rope: nn.Module, args: tuple[Any, ...], native: Any) -> Any:
        """Forward hook of the rotary embedding: hand plan and cache to the blocks."""
        forward = self._forward
        underway, forward.underway = getattr(forward, "underway", None), None
        return native if underway is None else CausalRotary(native, *underway)

    def after_text(self, embedder: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> None:
        """Forward hook of the text embedder: let the text carry what the layers keep of it."""
        kept = getattr(self._forward, "text", None)
        if kept is not None:
            setattr(embedded, KEPT, kept)

    def after_forward(self, transformer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of the transformer: drop what came out for references."""
        references = getattr(self._forward, "references", 0)
        return without_references(output, references, before=True) if references else output


def _check_sees_all(cameras: object) -> None:
    """Refuse cameras made ready for a visibility in a call without one: the base model would see all frames."""
    if isinstance(cameras, CameraCondition) and cameras.sees is not None:
        fix = "pass the same sees in attention_kwargs, or call branch.prepare without it"
        raise invalid("cameras made ready", "for frames that see all", repr(cameras.sees)[:80], fix)


def _checked_block(past: object, sees: object, others: dict[str, Any], latents: Tensor) -> AttentionPlan:
    """The plan of a block of a stream, refusing what does not go with it."""
    if not isinstance(past, BlockCondition):
        fix = "pass ready_block(transformer, cache, latents, cameras)"
        raise invalid(f'attention_kwargs["{PAST}"]', "a block made ready", type(past).__name__, fix)
    for name, value in ((SEES, sees), *((name, others.get(name)) for name in (CAMERAS, TIMES, HISTORY))):
        if value is not None:
            fix = "leave it out: a block sees its cache, from the cameras that it was made ready with"
            raise invalid(f'attention_kwargs["{name}"]', f'left out with "{PAST}"', type(value).__name__, fix)
    if past.plan.query_cameras != latents.shape[2]:
        fix = "make the block ready for these latents"
        raise invalid(f'attention_kwargs["{PAST}"]', f"of {latents.shape[2]} frames", past.plan.query_cameras, fix)
    return past.plan


def _whole_plan(transformer: Any, latents: Tensor, given: dict[str, Any], sees: Visibility) -> AttentionPlan:
    """The base model's plan for a whole clip, or for two copies of it."""
    cameras = given.get(CAMERAS)
    times: Times | None = cameras.times if isinstance(cameras, CameraCondition) else given.get(TIMES)
    batch, frames = latents.shape[0], latents.shape[2]
    moments = torch.arange(frames) if times is None else torch.as_tensor(times)
    moments = moments.to(latents.device, torch.float64)
    fits = moments.shape[-1:] == (frames,) and (moments.ndim == 1 or (moments.ndim == 2 and batch % len(moments) == 0))
    if not fits or not bool(moments.isfinite().all()):
        expected = f"finite, one for each of {frames} latent frames"
        raise invalid(TIMES, expected, list(moments.shape), "pass latent-frame indices, of one clip or of each")
    if moments.ndim == 2:
        moments = moments.repeat_interleave(batch // moments.shape[0], dim=0)
    moments = moments.reshape(-1, frames)
    return _ready_plan(rotary_plan(transformer.rope, _grid(transformer, latents), moments, moments, sees), latents)


def _prepare_cameras(
    branch: CameraBranch | None, latents: Tensor, sees: Visibility, given: dict[str, Any], leading: int
) -> None:
    """Put cameras under the same visibility into attention_kwargs; those made ready must have been made for it."""
    cameras = given.get(CAMERAS)
    if branch is not None:
        check_causal(branch)
    if branch is None:
        given.pop(TIMES, None)
    elif isinstance(cameras, CameraCondition):
        if cameras.sees != sees:
            fix = "call branch.prepare(cameras, latents, times, sees=sees)"
            raise invalid("cameras made ready", "for the visibility of this call", repr(cameras.sees)[:80], fix)
    elif isinstance(cameras, Cameras):
        times, history = given.pop(TIMES, None), given.pop(HISTORY, None)
        given[CAMERAS] = branch.prepare(cameras, latents, times, history, sees, leading)


def _ready_plan(plan: AttentionPlan, latents: Tensor) -> AttentionPlan:
    plan = plan.to(dtype=plan_dtype(latents))
    make_ready(plan, attended_dtype(latents))
    return plan


def _grid(transformer: Any, latents: Tensor) -> tuple[int, int]:
    _, rows, columns = transformer.config.patch_size
    return latents.shape[3] // rows, latents.shape[4] // columns


def _check_processors(transformer: Any) -> None:
    """Refuse a block that would see everything: someone set another processor after `attach_causal`."""
    for index, block in enumerate(transformer.blocks):
        found = block.attn1.processor
        inner = found.base if isinstance(found, CameraProcessor) else found
        if not isinstance(inner, CausalAttention):
            fix = "call merope.detach_causal and merope.attach_causal after set_attn_processor"
            raise invalid(f"processor of block {index}", "a causal one", type(found).__name__, fix)
