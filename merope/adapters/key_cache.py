"""What a stream remembers of its latent frames: raw keys and values of every layer, and the cameras.

Keys are kept as the layers made them. Rotary phases and camera operators act when they are read, for the frames that
ask. So a frame can be read from any camera, at any distance in time, as often as one likes, and nothing that is kept
ever has to be changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Self

import torch
from torch import Tensor

from merope.adapters.text_keys import TextKeys
from merope.adapters.turned_keys import TurnedKeys, can_keep
from merope.attention.dispatch import attend
from merope.attention.plan import AttentionPlan
from merope.errors import invalid
from merope.geometry.cameras import Cameras

KeysValues = tuple[Tensor, Tensor]  # [B, heads, tokens, head_dim] each


@dataclass(frozen=True, eq=False)
class FrameKeys:
    """One latent frame: keys and values of every layer by its name, and its camera.

    camera: [1] or [B, 1], on the CPU: a GPU would be waited for at every comparison of lenses. None for a model without
        a camera branch.
    time: latent frames after the first one of the block that reads; None: in line with the other frames of the cache.
    """

    layers: dict[str, KeysValues]
    camera: Cameras | None
    time: float | None = None


@dataclass(frozen=True, eq=False)
class KeyCache:
    """The first latent frames of a stream and its last ones. It is never changed: `after` makes the next one.

    window: latent frames that a block sees at most, its own included.
    sink: how many of the first frames every block sees besides.
    block: latent frames that are made at once.
    frames: first and last ones that the next block sees, oldest first.
    recalled: older ones that the next block sees besides, and no later block.
    count: all frames so far, forgotten ones included.
    text: what layers keep of the text; the caches of later blocks have the same.
    """

    window: int
    sink: int = 0
    block: int = 3
    frames: tuple[FrameKeys, ...] = ()
    count: int = 0
    recalled: tuple[FrameKeys, ...] = ()
    text: TextKeys = field(default_factory=TextKeys)

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("sink", 0), ("window", self.block)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise invalid(name, f"an int ≥ {least}", repr(value), "count latent frames, the own block included")

    def after(self, new: Sequence[FrameKeys]) -> Self:
        """The cache with these frames, too, without those that no later block sees."""
        frames = (*self.frames, *new)
        recent = max(self.sink, len(frames) - (self.window - self.block))
        kept = frames[: self.sink] + frames[recent:]
        return replace(self, frames=kept, count=self.count + len(new), recalled=())

    @property
    def seen(self) -> tuple[FrameKeys, ...]:
        """All frames that the next block sees, in the order in which they stand before it."""
        return self.recalled + self.frames

    @property
    def times(self) -> list[float]:
        """Of all frames that the next block sees, counted from its first: …, −2, −1, but for those with their own."""
        count = len(self.seen)
        return [place - count if frame.time is None else frame.time for place, frame in enumerate(self.seen)]

    @property
    def cameras(self) -> Cameras | None:  # [n] or [B, n]
        """The cameras of all frames that the next block sees."""
        cameras = [frame.camera for frame in self.seen if frame.camera is not None]
        return all_joined(cameras) if cameras else None

    @property
    def bytes(self) -> int:
        """What the keys and values take."""
        return sum(x.nbytes for frame in self.seen for pair in frame.layers.values() for x in pair)


class KeyReader:
    """Lets every layer attend to what a cache holds and to the block that is under way.

    keep: remember the block's own keys, for `kept`.
    turned: keys that another reader of the same cache, for the same block, has turned already.
    """

    def __init__(self, cache: KeyCache, keep: bool = False, turned: TurnedKeys | None = None) -> None:
        self.cache = cache
        self.turned = turned or TurnedKeys()
        self._own: dict[str, KeysValues] | None = {} if keep else None

    def attended(
        self,
        layer: str,
        q: Tensor,  # [B, heads, n, d]
        k: Tensor,
        v: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:  # [B, heads, n, d]
        """Attention of a block to keys and values of the past and to its own."""
        if self._own is not None:
            self._own[layer] = (k, v)
        if not self.cache.seen or not can_keep(q, plan):
            return attend(q, *self._joined(layer, k, v), plan)
        if self.turned.has(layer):
            self.turned.replace_last(layer, k, v, plan)
        else:
            self.turned.keep(layer, *self._joined(layer, k, v), plan)
        return self.turned.attend(layer, q, plan)

    def _joined(self, layer: str, k: Tensor, v: Tensor) -> KeysValues:  # [B, heads, n, d] -> [B, heads, past + n, d]
        """Keys and values of the past, then these."""
        past = [frame.layers[layer] for frame in self.cache.seen]
        if not past:
            return k, v
        if past[0][0].shape[0] != k.shape[0]:
            fix = "go on with as many clips as the stream began with"
            raise invalid("the batch", f"{past[0][0].shape[0]}, that of the cache", k.shape[0], fix)
        return torch.cat([*(keys for keys, _ in past), k], dim=2), torch.cat([*(values for _, values in past), v], 2)

    def kept(self, frames: int, cameras: Cameras | None) -> list[FrameKeys]:
        """The latent frames of the block, one by one: each can be forgotten alone."""
        assert self._own, "made with keep, and read by a forward"
        split = {layer: (_by_frame(k, frames), _by_frame(v, frames)) for layer, (k, v) in self._own.items()}
        return [
            FrameKeys(
                {layer: (keys[frame], values[frame]) for layer, (keys, values) in split.items()},
                None if cameras is None else cameras.at(slice(frame, frame + 1)),
            )
            for frame in range(frames)
        ]


def all_joined(cameras: Sequence[Cameras]) -> Cameras:  # [n], [m], … -> [n + m + …]
    """One row of all cameras."""
    return reduce(lambda these, other: these.joined(other), cameras)


def _by_frame(x: Tensor, frames: int) -> list[Tensor]:  # [B, heads, frames · tokens, d] -> [B, heads, tokens, d] each
    """Copies, because a view would keep the whole block."""
    return [part.detach().clone(memory_format=torch.contiguous_format) for part in x.tensor_split(frames, dim=2)]
