"""What an encoding is: a frozen config that turns two sides of tokens into blocks. The plan around them is the same."""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from torch import Tensor

from merope.attention.plan import AttentionPlan, Block
from merope.attention.visible_cameras import KeyRanges, Visibility, key_ranges
from merope.encodings.option_types import check_types, has_type
from merope.encodings.tokens import PREDICT_CONTENT, Times, Tokens, query_and_key_tokens
from merope.errors import invalid
from merope.geometry.cameras import Cameras


@dataclass(frozen=True)
class Encoding(ABC):
    """A camera encoding of heads with `head_dim` channels. To add one, write `blocks`.

    transform_values: U acts on values and output too (paper, Eq. 1); False: on the logits only.
    """

    head_dim: int = 128
    _: KW_ONLY
    transform_values: bool = True

    content_channels: ClassVar[int] = 0
    """Numbers per token that `plan` must be given as `content`; 0 for encodings that are pure geometry."""

    in_world: ClassVar[bool] = False
    """Whether U, or its clamp, depends on the world frame. Branches then take that of the clip's first camera."""

    clamps_lengths: ClassVar[bool] = False
    """Whether `attend` scales queries, keys and values back to the length they had before O and K."""

    def __post_init__(self) -> None:
        """Options have the types that their fields declare; encodings with further rules check these after it."""
        if not has_type(self.head_dim, int):
            raise invalid("head_dim", "an int", repr(self.head_dim), "divide the width by the heads with //")
        check_types(type(self), vars(self))
        for name, value in list(vars(self).items()):
            if isinstance(value, list):  # as JSON gives them; two encodings alike are equal
                object.__setattr__(self, name, tuple(value))

    @abstractmethod
    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """The block operators O and K of every token, in channel order (U_ab = O_a · K_{g(a), b})."""

    def plan(
        self,
        cameras: Cameras,
        grid: tuple[int, int],  # rows, columns
        *,
        key: Cameras | None = None,
        key_grid: tuple[int, int] | None = None,
        times: Times | None = None,  # [V] or [B, V] latent frames
        key_times: Times | None = None,
        extra_tokens: int = 0,
        key_extra_tokens: int | None = None,
        content: Tensor | None = None,  # [B, N, content_channels]
        key_content: Tensor | None = None,
        sees: Visibility | None = None,
    ) -> AttentionPlan:
        """Operators of all query and key tokens of a clip, built once and shared by all layers and steps.

        cameras, grid: the query side. Tokens are camera-major, then row-major, then `extra_tokens` without a camera.
        key, key_grid, …: the key side of cross-attention; without `key` it is the query side.
        times: latent-frame index of every camera, by default 0, 1, 2, …
        content: what the model predicts of every token (a depth, say), for encodings that read it; such a plan belongs
            to one layer and one step.
        sees: which key cameras each query camera sees, None: all. `merope.Visibility` says what extra tokens see.

        A plan made under torch.inference_mode cannot be used in training.
        """
        query_side, key_side = query_and_key_tokens(
            cameras, grid, key, key_grid, times, key_times, extra_tokens, key_extra_tokens, content, key_content
        )
        self._check_content(query_side, "content")
        self._check_content(key_side, "content" if key is None else "key_content")
        return AttentionPlan(
            head_dim=self.head_dim,
            blocks=self.blocks(query_side, key_side),
            query_cameras=query_side.cameras,
            tokens_per_camera=query_side.patches,
            query_has_camera=query_side.has_camera,
            key_has_camera=key_side.has_camera,
            transform_values=self.transform_values,
            clamps_lengths=self.clamps_lengths,
            visible_keys=None if sees is None else _visible_keys(sees, query_side, key_side),
        )

    def _check_content(self, tokens: Tokens, name: str) -> None:
        got = 0 if tokens.content is None else tokens.content.shape[-1]
        if got != self.content_channels:
            fix = PREDICT_CONTENT if self.content_channels else "this encoding reads geometry only"
            raise invalid(name, f"of {self.content_channels} channels for {type(self).__name__}", got, fix)


def _visible_keys(sees: Visibility, query: Tokens, key: Tokens) -> KeyRanges | None:
    extra = [side.count - side.cameras * side.patches for side in (query, key)]
    return key_ranges(sees, query.cameras, key.cameras, key.patches, *extra)
