"""What an encoding is: a frozen config that turns two sides of tokens into blocks. The plan around them is the same."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from merope.attention.plan import AttentionPlan, Block
from merope.encodings.tokens import Times, Tokens, query_and_key_tokens
from merope.geometry.cameras import Cameras


@dataclass(frozen=True)
class Encoding(ABC):
    """A camera encoding of heads with `head_dim` channels. To add one, write `blocks`."""

    head_dim: int = 128

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
    ) -> AttentionPlan:
        """Operators of all query and key tokens of a clip, built once and shared by all layers and steps.

        cameras, grid: the query side. Tokens are camera-major, then row-major, then `extra_tokens` without a camera.
        key, key_grid, key_times, key_extra_tokens: the key side of cross-attention; without `key` it is the query side.
        times: latent-frame index of every camera, by default 0, 1, 2, …
        """
        query_side, key_side = query_and_key_tokens(
            cameras, grid, key, key_grid, times, key_times, extra_tokens, key_extra_tokens
        )
        return AttentionPlan(
            head_dim=self.head_dim,
            blocks=self.blocks(query_side, key_side),
            query_cameras=query_side.cameras,
            tokens_per_camera=query_side.patches,
            query_has_camera=query_side.has_camera,
            key_has_camera=key_side.has_camera,
        )
