"""The passes of a transformer over the blocks of a stream, recorded once as a CUDA graph and replayed.

A pass of a small model is hundreds of launches, and a GPU waits for each. With a full window all blocks have the same
shapes, so their passes differ in numbers alone: those of the latents, of the cache and of the cameras. The graph reads
its own copies of these, and before a block is denoised they are overwritten with the block's.

What is not a number stays as it was when it was recorded. Weights that were moved are noticed, other changes of the
model (another processor, another scale of an adapter) are not: open a new stream after them.
"""

import logging
from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from merope.adapters.attachment import attached_branch, has_offload_hook
from merope.adapters.block_passes import BlockCondition, block_pass, finished_block
from merope.adapters.causal_wan import commit
from merope.adapters.families.noise import TIMESTEPS
from merope.adapters.key_cache import KeyCache
from merope.attention.plan import AttentionPlan

_logger = logging.getLogger("merope")

WARM_UP_PASSES = 2
"""Before a recording: libraries choose their kernels and Triton compiles its own."""

SMALL_PARAMETERS = 500_000_000
"""An estimate: a transformer below this is done with a launch before the next one comes."""


def why_not_recorded(transformer: Any) -> str | None:
    """Why the passes of a model cannot be recorded; None when they can."""
    parts = list(transformer.modules())
    if transformer.device.type != "cuda":
        return f"a transformer on {transformer.device}, not on a CUDA GPU"
    if hasattr(transformer, "_orig_mod") or any(getattr(part, "_compiled_call_impl", None) for part in parts):
        return "a transformer that torch.compile has taken over"
    if any(has_offload_hook(part) for part in parts):
        return "a transformer whose weights come and go"
    return None


def is_bound_by_launches(transformer: Any) -> bool:
    """Whether a model is better recorded: a small one that can be."""
    small = sum(weight.numel() for weight in transformer.parameters()) < SMALL_PARAMETERS
    return small and why_not_recorded(transformer) is None


class Passes:
    """The passes over the blocks of one stream with one text, launch by launch."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer

    def velocity(
        self,
        block: BlockCondition,
        latents: Tensor,  # [B, C, block, h, w]
        timestep: Tensor,  # [B]
        text: Tensor,  # [B, L, text_dim]
    ) -> Tensor:  # [B, C, block, h, w]
        """What the transformer predicts for a block."""
        return block_pass(self.transformer, block, latents, timestep, text)

    def commit(
        self,
        cache: KeyCache,
        block: BlockCondition,
        latents: Tensor,  # [B, C, block, h, w] finished
        text: Tensor,  # [B, L, text_dim]
        noise_level: float = 0.0,
    ) -> KeyCache:
        """The cache with a finished block."""
        return commit(self.transformer, cache, block, latents, text, noise_level)


class RecordedPasses(Passes):
    """The same passes. The second block in a row with the same structure is recorded, and what follows is replayed.

    A block of another structure runs launch by launch: while the window grows, or with other numbers of recalled views.
    """

    def __init__(self, transformer: Any) -> None:
        super().__init__(transformer)
        self._recording: _Recording | None = None
        self._plan: AttentionPlan | None = None  # tells one block from the next
        self._structure: Hashable = None
        self._failed = False

    @torch.no_grad()
    def velocity(self, block: BlockCondition, latents: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """As `Passes.velocity`."""
        recording = self._for_block(block, latents, text)
        if recording is None:
            return super().velocity(block, latents, timestep, text)
        return recording.replay(block, latents, timestep).clone()

    @torch.no_grad()
    def commit(
        self, cache: KeyCache, block: BlockCondition, latents: Tensor, text: Tensor, noise_level: float = 0.0
    ) -> KeyCache:
        """As `Passes.commit`."""
        recording = self._for_block(block, latents, text) if block.reader.cache is cache else None
        if recording is None:
            return super().commit(cache, block, latents, text, noise_level)
        recording.replay(block, latents, torch.full_like(recording.timestep, TIMESTEPS * noise_level))
        return finished_block(cache, block, recording.block.reader, latents)

    def _for_block(self, block: BlockCondition, latents: Tensor, text: Tensor) -> "_Recording | None":
        """The recording that a block can take, made now if the block before was like it; None: there is none."""
        if block.plan is not self._plan:
            before, self._plan = self._structure, block.plan
            self._structure = _structure(self.transformer, block, latents, text)
            if self._recording is not None and self._recording.structure != self._structure:
                self._recording = None  # its memory first
            if self._recording is None and self._structure is not None and self._structure == before:
                self._recording = self._recorded(block, latents, text)
        return self._recording

    def _recorded(self, block: BlockCondition, latents: Tensor, text: Tensor) -> "_Recording | None":
        """None where a pass cannot be recorded; says why, once, and does not try again."""
        if self._failed:
            return None
        try:
            recording = _Recording(self.transformer, self._structure, block, latents, text)
        except RuntimeError as error:  # no memory is left, or a layer waits for the GPU
            self._failed = True
            _logger.warning("passes of the stream run launch by launch, they could not be recorded: %s", error)
            return None
        return recording if recording.is_complete else None


class _Recording:
    """A CUDA graph of one pass, and the memory that it reads and writes."""

    def __init__(
        self, transformer: Any, structure: Hashable, block: BlockCondition, latents: Tensor, text: Tensor
    ) -> None:
        self.structure = structure
        # In one copy: the text's keys are known by the very tensor that they were made of.
        own, own_text = deepcopy((block.reading(block.reader.cache, keep=True), text))
        self.block: BlockCondition = own
        self.latents = latents.to(transformer.dtype, copy=True)
        self.timestep = torch.zeros(latents.shape[0], device=latents.device)
        self._read, outline = _numbers(self.block), _outline(_read_by_layers(self.block), [])
        self._current: object = None
        self._replay, self.predicted = _record(
            lambda: block_pass(transformer, self.block, self.latents, self.timestep, own_text), latents.device
        )
        # Tables that the pass itself made of a plan would stay those of this block.
        self.is_complete = _outline(_read_by_layers(self.block), []) == outline

    def replay(self, block: BlockCondition, latents: Tensor, timestep: Tensor) -> Tensor:  # [B, C, block, h, w]
        """One pass. The next one overwrites its result."""
        if block.plan is not self._current:
            for own, given in zip(self._read, _numbers(block), strict=True):
                torch._foreach_copy_(own, given, non_blocking=True)
            self._current = block.plan
        self.latents.copy_(latents)
        self.timestep.copy_(timestep)
        self._replay()
        return self.predicted


def _record(call: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """What runs a call again, on the memory that it reads now, and the memory into which it writes its result."""
    with torch.cuda.device(device):
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_PASSES):
                call()
        before = torch.cuda.current_stream(device)
        before.wait_stream(stream)
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # other threads may go on
                result = call()
        finally:
            torch.cuda.set_stream(before)  # torch stays on its own where a capture breaks off
    return graph.replay, result


def _structure(transformer: Any, block: BlockCondition, latents: Tensor, text: Tensor) -> Hashable:
    """All that a recording takes for granted; None for blocks that are not recorded, those with history."""
    cameras = block.cameras
    if cameras is not None and (cameras.history is not None or cameras.features is not None):
        return None
    branch = attached_branch(transformer)
    weights = [*transformer.parameters(), *(() if branch is None else branch.parameters())]
    where = tuple(weight.data_ptr() for weight in weights)
    return _outline(_read_by_layers(block), []), latents.shape, transformer.dtype, id(text), where


def _read_by_layers(block: BlockCondition) -> tuple[Any, ...]:
    """What the layers of a model read of a block."""
    cameras = None if block.cameras is None else block.cameras.plan
    return block.plan, cameras, [frame.layers for frame in block.reader.cache.seen]


def _numbers(block: BlockCondition) -> list[list[Tensor]]:
    """The tensors that the layers read, each number once. Those of one dtype are together: few launches copy them."""
    found: list[Tensor] = []
    _outline(_read_by_layers(block), found)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in found:
        by_dtype.setdefault(x.dtype, []).append(_without_repeats(x))
    return list(by_dtype.values())


def _outline(value: Any, found: list[Tensor]) -> Hashable:
    """What a value is but for the numbers in its tensors, which are put into a list."""
    if isinstance(value, Tensor):
        found.append(value)
        return tuple(value.shape), value.stride(), value.dtype
    if is_dataclass(value):
        return type(value), *(_outline(getattr(value, field.name), found) for field in fields(value))
    if isinstance(value, dict):
        return tuple((name, _outline(each, found)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_outline(each, found) for each in value)
    return repr(value) if isinstance(value, slice) else value


def _without_repeats(x: Tensor) -> Tensor:
    """The tensor without dimensions along which it repeats itself: these cannot be written."""
    if 0 not in x.stride():
        return x
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
