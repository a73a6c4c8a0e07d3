"""The hooks of a transformer with a camera branch: they take cameras out of a call and put them on their carrier.

Most forwards drop `attention_kwargs`, so a hook before them takes the cameras out, and puts them on an argument of the
blocks or has a hook behind the `rope` module hand them on.
"""

import copy
import difflib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from merope.adapters.conditioning import (
    CAMERAS,
    HISTORY,
    PAST,
    SEES,
    TIMES,
    CameraCondition,
    CameraRotary,
    attended_dtype,
)
from merope.adapters.history import HistoryReferences, existing, tagged_phases, with_references, without_references
from merope.attention.visible_cameras import Visibility
from merope.encodings.tokens import Times
from merope.errors import invalid
from merope.geometry.cameras import Cameras

if TYPE_CHECKING:
    from merope.adapters.camera_branch import CameraBranch

ATTENTION_KWARGS = "attention_kwargs"


@dataclass(eq=False)
class _Forward:
    """What the hooks of one forward tell each other."""

    condition: CameraCondition | None = None
    embed: nn.Module | None = None  # makes tokens of the references, on the way to the blocks
    extra_frames: int = 0  # to be dropped from the output


class _OfThread(threading.local):
    """Threads that share a transformer have a forward under way each, and cameras of their own."""

    def __init__(self) -> None:
        self.forward = _Forward()
        self.kept: tuple[tuple[object, ...], CameraCondition] | None = None
        self.given: dict[str, Any] = {}  # by `merope.cameras`


class CameraInput:
    """The hooks of a transformer with a camera branch.

    Cameras come made ready by `branch.prepare`, or as they are. A pipeline that does not know merope passes the same
    `Cameras` in every denoising step: each thread keeps what was made of its last ones, see `_identity`.
    """

    def __init__(self, branch: "CameraBranch", names: tuple[str, ...]) -> None:
        self.branch = branch
        self.names = names  # of the forward's arguments
        self._threads, self._traced = _OfThread(), _Forward()
        self._running: set[threading.Thread] = set()
        self._entering, self._is_closed = threading.Lock(), False

    def __deepcopy__(self, memo: dict[int, Any]) -> "CameraInput":
        memo[id(self)] = fresh = CameraInput(self.branch, self.names)
        fresh.branch = copy.deepcopy(self.branch, memo)
        return fresh

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as new hooks of the same branch."""
        return CameraInput, (self.branch, self.names)

    @property
    def _underway(self) -> _Forward:
        """The forward under way; a graph has its own, because torch.compile does not trace what belongs to threads."""
        return self._traced if torch.compiler.is_compiling() else self._threads.forward

    def before_forward(
        self, transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook of the transformer: take cameras and history out of `attention_kwargs`."""
        if ATTENTION_KWARGS in self.names[: len(args)]:
            fix = "pass attention_kwargs by name"
            raise invalid("attention_kwargs", "a keyword argument", "a positional one", fix)
        kwargs = dict(kwargs)
        given = self._given(kwargs.pop(ATTENTION_KWARGS, None) or {})
        cameras, times = given.pop(CAMERAS, None), given.pop(TIMES, None)
        history = given.pop(HISTORY, None)
        _check_spelling(given)
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        family, patch = self.branch.family, self.branch.config["base"]["patch_size"]
        latents = family.video(arguments)
        sees = family.sees(transformer.config, latents.shape[2] // patch[0])
        condition = self.condition(cameras, latents, times, history, sees)
        if condition is cameras:
            _check_ready(condition, self.branch, latents)
        if given or ATTENTION_KWARGS in self.names:
            kwargs = {**kwargs, ATTENTION_KWARGS: given}
        if not torch.compiler.is_compiling():
            self._enter()
        if family.argument:
            carried = family.carried(arguments.get(family.argument), condition)
            return self._replaced(args, kwargs, family.argument, carried)
        underway = self._underway
        underway.condition, underway.embed, underway.extra_frames = condition, None, 0
        if condition.appended is not None:
            underway.extra_frames = condition.appended.count
            args, kwargs = with_references(args, kwargs, condition.appended, transformer.config.patch_size)
        elif condition.history is not None:
            underway.embed = transformer.patch_embedding  # offloaded weights are not on the device before the forward
        return args, kwargs

    def _given(self, attention_kwargs: dict[str, Any]) -> dict[str, Any]:
        """What came with the call, and what `merope.cameras` gives to all calls of this thread."""
        around = {} if torch.compiler.is_compiling() else self._threads.given
        if around and CAMERAS in attention_kwargs:
            fix = "leave them out of one of the two"
            raise invalid(CAMERAS, "given once", "in attention_kwargs and by merope.cameras", fix)
        return {**around, **attention_kwargs}

    def _replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another value of one of them."""
        place = self.names.index(name)
        if place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: value}

    @contextmanager
    def giving(self, given: dict[str, Any]) -> Iterator[None]:
        """Let the forwards of this thread have these conditions."""
        before, self._threads.given = self._threads.given, given
        try:
            yield
        finally:
            self._threads.given = before

    def after_rope(self, rope: nn.Module, args: tuple[Any, ...], native: tuple[Tensor, Tensor]) -> CameraRotary:
        """Forward hook of the rotary embedding: hand the cameras to the blocks."""
        underway = self._underway
        condition, embed = underway.condition, underway.embed
        underway.condition = underway.embed = None
        if condition is None:
            fix = "call the transformer, not its parts"
            raise invalid(CAMERAS, "given before the rotary embedding runs", None, fix)
        if condition.appended is not None:
            native = tagged_phases(rope, native, condition.appended)
        references = None
        if embed is not None and condition.history is not None:
            latents: Tensor = args[0]  # what the rotary embedding is asked about
            references = embed(condition.history.latents.to(latents)).flatten(2).transpose(1, 2)
        return CameraRotary(native, condition, references)

    def after_forward(self, transformer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of the transformer, also after an error: drop what came out for the references."""
        if not torch.compiler.is_compiling():
            self._running.discard(threading.current_thread())
        extra_frames = self._underway.extra_frames
        return without_references(output, extra_frames) if extra_frames and output is not None else output

    def _enter(self) -> None:
        """A forward begins in this thread."""
        with self._entering:
            if self._is_closed:
                raise invalid("the camera branch", "attached", "one that another thread has detached", "run it again")
            self._running.add(threading.current_thread())

    def close(self) -> None:
        """Let no further forward begin. Refused while another thread is in one: its last blocks would lose cameras."""
        here = threading.current_thread()  # of which Ctrl-C may have ended a forward without a word
        with self._entering:
            busy = [thread.name for thread in self._running if thread is not here and thread.is_alive()]
            if busy:
                fix = "wait for its end, then detach"
                raise invalid("transformer", "at rest while its branch is detached", f"a forward in {busy[0]}", fix)
            self._is_closed = True

    def open(self) -> None:
        """Let forwards begin again."""
        self._is_closed = False

    def condition(
        self,
        cameras: Cameras | CameraCondition | None,
        latents: Tensor,  # [B, channels, T, H, W]
        times: Times | None,
        history: HistoryReferences | None = None,
        sees: Visibility | None = None,
    ) -> CameraCondition:
        """What came made ready, or the condition of these cameras and references: kept from the last step, or new."""
        if isinstance(cameras, CameraCondition):
            for name, value in ((TIMES, times), (HISTORY, history)):
                if value is not None:
                    fix = f"pass {name} to branch.prepare"
                    raise invalid(f'attention_kwargs["{name}"]', "left out with cameras made ready", value, fix)
            if sees is not None and cameras.sees != sees:
                fix = "call branch.prepare(cameras, latents, times, sees=sees)"
                expected = f"for frames that see {repr(sees)[:80]}"
                raise invalid("cameras made ready", expected, repr(cameras.sees)[:80], fix)
            return cameras
        if not isinstance(cameras, Cameras):
            expected = "merope.Cameras: the transformer has a camera branch"
            got = None if cameras is None else type(cameras).__name__
            fix = "pass Cameras(world_from_camera, lens); merope.detach gives the base model"
            raise invalid(f'attention_kwargs["{CAMERAS}"]', expected, got, fix)
        if torch.compiler.is_compiling():
            fix = "make them ready outside the compiled call: branch.prepare(cameras, latents)"
            raise invalid(f'attention_kwargs["{CAMERAS}"]', "a CameraCondition under torch.compile", "Cameras", fix)
        identity, kept = _identity(cameras, latents, times, existing(history), sees), self._threads.kept
        if identity is not None and kept is not None and kept[0] == identity:
            return kept[1]
        condition = self.branch.prepare(cameras, latents, times, history, sees)
        self._threads.kept = None if identity is None else (identity, condition)
        return condition


def _check_spelling(others: Iterable[str]) -> None:
    """Refuse keys that are nearly ours or of a causal model: Wan's forward ignores all that it does not know."""
    if torch.compiler.is_compiling():
        return
    for name in others:
        if name in (SEES, PAST):
            fix = "call merope.attach_causal(transformer) first"
            raise invalid(f'attention_kwargs["{name}"]', "left out of a model that is not causal", name, fix)
        near = difflib.get_close_matches(name, (CAMERAS, TIMES, HISTORY), n=1)
        if near:
            raise invalid(f'attention_kwargs["{name}"]', "a known key", repr(name), f"did you mean {near[0]!r}?")


def _check_ready(
    condition: CameraCondition,
    branch: "CameraBranch",
    latents: Tensor,  # [B, channels, T, H, W]
) -> None:
    """Refuse cameras made ready by another branch or for other latents: tokens may be as many, and run in silence."""
    if torch.compiler.is_compiling():  # sizes may be symbols
        return
    for name, own in branch.makes.items():
        if condition.made_by[name] != own:
            fix = "call prepare of the branch that this transformer has"
            raise invalid("cameras made ready", f"for {name} {own!r}", f"{name} {condition.made_by[name]!r}", fix)
    if not condition.serves(len(latents)):
        fix = "call branch.prepare(cameras, latents) with latents of this batch"
        raise invalid("cameras made ready", f"for a batch of {len(latents)}", condition.samples, fix)
    if condition.gather is not None:  # some frames only
        return
    references = 0 if condition.appended is None else condition.appended.count
    made_for = (condition.cameras.moments - references, *condition.grid)
    patch = branch.config["base"]["patch_size"]
    here = tuple(size // step for size, step in zip(latents.shape[2:], patch, strict=True))
    if made_for != here:
        fix = "call branch.prepare(cameras, latents) with latents of this shape"
        raise invalid("cameras made ready", f"for tokens (frames, rows, columns) {here}", made_for, fix)


def _identity(
    cameras: Cameras,
    latents: Tensor,
    times: Times | None,
    history: HistoryReferences | None,
    sees: Visibility | None,
) -> tuple[object, ...] | None:
    """What must be the same for a kept condition to be used again; None where none may be kept.

    Cameras and history are compared as objects. Version counters tell of tensors that were edited in place. Tensors of
    inference mode have none. The graph of poses, or times, that want gradients belongs to one backward pass.
    """
    tensors = _tensors(cameras, history)
    with_graph = [x for x in (*tensors, times) if isinstance(x, Tensor) and x.requires_grad]
    wants_gradients = torch.is_grad_enabled() and with_graph
    if wants_gradients or any(x.is_inference() for x in tensors):
        return None
    return (
        cameras,
        history,
        sees,
        [x._version for x in tensors],
        None if times is None else torch.as_tensor(times).tolist(),
        (latents.shape, latents.device, latents.dtype),
        attended_dtype(latents),  # kernels' tables are made for one
        torch.is_inference_mode_enabled(),  # what is made there cannot be trained with
    )


def _tensors(cameras: Cameras, history: HistoryReferences | None) -> list[Tensor]:
    values = [cameras.world_from_camera, cameras.has_pose, *vars(cameras.lens).values()]
    of_history = [] if history is None else [history.latents, history.times, *_tensors(history.posed, None)]
    return [value for value in (*values, *of_history) if isinstance(value, Tensor)]
