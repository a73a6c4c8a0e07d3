"""ViewRope: ray rotations in the low-frequency tail of the temporal band (Xiang et al. 2026)."""

from dataclasses import dataclass, field

from torch import Tensor

from merope.attention.plan import Block
from merope.encodings.protocol import Encoding
from merope.encodings.ray_frames import ray_rotation_block
from merope.encodings.rotary import check_positive, phase_block, rotary_phases, wan_bands
from merope.encodings.tokens import Tokens
from merope.errors import invalid


@dataclass(frozen=True)
class ViewRope(Encoding):
    """Wan's rotary layout (time, row, column) whose slowest temporal pairs make room for relative ray rotations.

    A head of 128 has 44, 42 and 42 channels for time, row and column. The last 11 of the 22 temporal pairs become 7
    triplets with A_aᵀ R_iᵀ R_j A_b (MeRoPE's rotation block) and one channel that is left alone. U is orthogonal and
    sees directions only: metres have no effect.

    A reconstruction: we found no code of the method. Its publication gives the rotated triplets of queries and keys and
    their place; the ray's frame (MinRot) and the number of triplets are ours.

    transform_values: False as in ViewRope, where values stay as they are.
    rope_base: base of the rotary frequencies.
    """

    transform_values: bool = field(default=False, kw_only=True)
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim < 14 or self.head_dim % 2:
            fix = f"the nearest is {max(14, self.head_dim + self.head_dim % 2)}"
            raise invalid("head_dim", "even and at least 14", self.head_dim, fix)
        check_positive("rope_base", self.rope_base)

    @property
    def band_channels(self) -> tuple[int, int, int]:
        """Channels of Wan's bands for (time, row, column), before the carving."""
        return wan_bands(self.head_dim)

    @property
    def time_pairs(self) -> int:
        """Temporal pairs that keep their phases: the faster half, rounded down."""
        return self.band_channels[0] // 4

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """Fast temporal pairs, ray rotations, then row and column."""
        time_channels = self.band_channels[0]
        triplets = (time_channels - 2 * self.time_pairs) // 3
        return (
            phase_block("time", 0, query, key, lambda tokens: self._phases(tokens)[..., : self.time_pairs]),
            ray_rotation_block(2 * self.time_pairs, 3 * triplets, query, key),
            phase_block(
                "image", time_channels, query, key, lambda tokens: self._phases(tokens)[..., time_channels // 2 :]
            ),
        )

    def _phases(self, tokens: Tokens) -> Tensor:  # [B, N, head_dim / 2]
        """Phases of the whole uncarved head; Wan has the row before the column."""
        return rotary_phases(tokens.positions[..., [0, 2, 1]], self.band_channels, self.rope_base)
