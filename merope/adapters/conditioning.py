"""Cameras made ready, and what carries them to the blocks of a transformer: an argument that every block gets anyway.

So they are an *argument* of every block: whatever runs a block again (gradient checkpointing of any kind, with any
number of forwards before the backward) runs it with the cameras of its own forward, and torch.compile sees plain tensor
inputs. Nothing is kept on the side while blocks run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from merope.adapters.causal_attention import CausalRotary
from merope.adapters.history import HistoryReferences, joined, joint_times
from merope.adapters.key_cache import KeyReader
from merope.attention.plan import AttentionPlan
from merope.attention.visible_cameras import Visibility
from merope.encodings.tokens import Times
from merope.geometry.cameras import Cameras

CAMERAS, TIMES, HISTORY = "cameras", "times", "history"
"""Keys of `attention_kwargs` that are taken out before the transformer's own forward; others are left in."""

SEES, PAST = "sees", "past"
"""Keys that a causal model takes out before."""


@dataclass(frozen=True, eq=False)
class CameraCondition:
    """Cameras made ready for a batch of latents: what all blocks, denoising steps and guidance passes share.

    made_by: `makes` of the branch.
    samples: of the batch. Cameras of one clip serve others, too.
    plan: of encodings that are pure geometry; those that read tokens make one in every block from `cameras`.
    features: of integrations that are told numbers per token.
    mask: which keys each token sees in an attention of its own, beside self-attention.
    gather: (keys or values, dimension of tokens) → those of all ranks, where each rank holds the tokens of some frames
        and `plan` is for these queries and all keys.
    history: retrieved references of every sample. History "ca" has a `history_plan` of video tokens and references;
        with history "sa" the references stand behind the video in `cameras`, `times` and `plan`.
    sees: which cameras `plan` lets each camera see, None: all.
    past: hands out a stream's earlier keys and values, which `plan` has before the block's own.
    """

    cameras: Cameras  # [V] for all samples, or [B, V]
    grid: tuple[int, int]  # token rows, columns of a latent frame
    made_by: Mapping[str, object]
    samples: int
    times: Times | None = None  # latent-frame index of every camera
    plan: AttentionPlan | None = None
    features: Tensor | None = None  # [B or 1, N, channels]
    mask: Tensor | None = None  # bool [B or 1, N, keys]
    gather: Callable[[Tensor, int], Tensor] | None = None
    history: HistoryReferences | None = None
    history_plan: AttentionPlan | None = None
    sees: Visibility | None = None
    past: KeyReader | None = None
    _moved: dict[tuple[object, ...], Self] = field(init=False, repr=False, default_factory=dict)

    @property
    def appended(self) -> HistoryReferences | None:
        """References that take part as further frames."""
        return self.history if self.history_plan is None else None

    def with_appended(self, references: HistoryReferences) -> Self:
        """History "sa": the references' cameras and times behind the video's."""
        times = joint_times(self.times, self.cameras.count, references)
        return replace(self, cameras=joined(self.cameras, references.posed), times=times, history=references)

    def serves(self, samples: int) -> bool:
        """Whether it fits a batch of so many latents."""
        is_one_clip = self.cameras.world_from_camera.shape[:-3].numel() == 1
        has_one_time = self.times is None or torch.as_tensor(self.times).ndim == 1
        is_shared = is_one_clip and has_one_time and self.cameras.views == 1 and self.history is None
        return is_shared or samples == self.samples

    def to(self, device: torch.device | str | None, **_: object) -> Self:
        """The same condition on another device (models spread over devices move what they hand to a block).

        None is where it is, as for tensors: accelerate hands a whole model's arguments on like that. All blocks and
        steps share one copy, but for those that need its graph, and those of inference mode.
        """
        if device is None or self.cameras.device == torch.device(device):
            return self
        place = (torch.device(device), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if place not in self._moved:
            self._moved[place] = self._on(place[0])
        return self._moved[place]

    def _on(self, device: torch.device) -> Self:
        names = ("plan", "features", "mask", "history", "history_plan")
        moved = {name: value.to(device) for name in names if (value := getattr(self, name)) is not None}
        return replace(self, cameras=self.cameras.to(device), **moved)


class CameraRotary(tuple[Tensor, Tensor]):
    """A rotary embedding (cos, sin), Wan's [1, N, 1, head_dim], with cameras. Blocks without a branch see the tuple.

    native: the rotary embedding alone, or what stands for it in a causal model.
    condition: of the cameras.
    references: [B, R·P, width] tokens that history "ca" looks at, or None.
    """

    native: tuple[Tensor, Tensor]
    condition: CameraCondition
    references: Tensor | None

    def __new__(
        cls, native: tuple[Tensor, Tensor], condition: CameraCondition, references: Tensor | None = None
    ) -> Self:
        rotary = super().__new__(cls, native)
        rotary.native = native
        rotary.condition = condition
        rotary.references = references
        return rotary

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What copies and pickles are made of; a tuple's own are its items alone."""
        return self.native, self.condition, self.references

    def to(self, device: torch.device | str | None, **_: object) -> Self:
        """The same on another device."""
        references = None if self.references is None else self.references.to(device)
        native = (self[0].to(device), self[1].to(device))
        if isinstance(self.native, CausalRotary):
            native = self.native.to(device)
        return type(self)(native, self.condition.to(device), references)


class FrameShare(Protocol):
    """The frames of a clip that one rank holds where context parallelism splits clips over ranks."""

    @property
    def own(self) -> slice:
        """Its latent frames."""

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of all ranks along a dimension that holds those of this one."""


@dataclass(frozen=True, eq=False)
class CameraArgument:
    """In the place of an argument that the caller left out: nothing but cameras."""

    condition: CameraCondition
    native: ClassVar[None] = None
    references: ClassVar[None] = None

    def to(self, device: torch.device | str | None, **_: object) -> Self:
        """The same on another device."""
        return replace(self, condition=self.condition.to(device))


Carrier = CameraRotary | CameraArgument


def taken_off(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Carrier | None, tuple[Any, ...], dict[str, Any]]:
    """What carries cameras among arguments, None if nothing does, and the arguments as the base model knows them."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, Carrier)]
    plain = tuple(value.native if isinstance(value, Carrier) else value for value in args)
    named = {name: value.native if isinstance(value, Carrier) else value for name, value in kwargs.items()}
    return (found[0] if found else None), plain, named


def take_cameras_off(
    attn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of self-attention without a branch, where it could not read an argument that carries cameras."""
    return taken_off(args, kwargs)[1:]


def attended_dtype(latents: Tensor) -> torch.dtype:
    """The dtype in which blocks will attend."""
    device = latents.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else latents.dtype
