"""CRePE: expected rotary phases along the path that a token's range interval traces in the query's image.

After Jin et al. 2026, of which no code is public: the idea (a distribution over the range along the token's ray, the
expected phasor over its curved path through the query's lens) is theirs; coordinates, periods and the treatment of what
a lens does not see are decisions of this library. U_ab = M_a M_bᵀ with contractions M: not norm preserving.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from merope.attention.plan import Block
from merope.encodings.expected_phasors import Ladder, expected_operators
from merope.encodings.protocol import Encoding
from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.lenses import Lens
from merope.geometry.visibility import pixels_seen, seen_half_angle_rad

COORDINATES = 3  # column / width, row / height, log range
RANGE_M = (0.01, 1000.0)  # clamps of a range, predicted or seen
Z_MIN_M = 0.05  # as URoPE's


@dataclass(frozen=True)
class CRePE(Encoding):
    """Phases of where, and how far away, the query's camera sees a key, averaged over the key's range interval.

    `content` is (mu, raw s) per token, as of `DepthHead`: the range along the unit ray is between exp(mu ∓ s) metres.
    Points of the path that the query's lens does not see are placed as for URoPE (`pixels_seen`); on a panorama a path
    across ±180° takes the long way round. With F = head_dim // 6 frequencies per coordinate, 6·F channels are used,
    coordinate-major, and the rest are left alone (head_dim 128: 126 and 2). `times` have no effect.

    knots: points of the path, uniform in log range; between them it is straight in phase. 2 is RayRoPE's endpoint form.
    image_periods: shortest and longest period over the image, in image sizes; frequencies are log-spaced.
    range_periods: the same for the natural logarithm of the range in metres.
    """

    knots: int = 8
    image_periods: tuple[float, float] = (1 / 16, 4.0)
    range_periods: tuple[float, float] = (0.25, 16.0)

    content_channels: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim < 2 * COORDINATES:
            raise invalid("head_dim", f"at least {2 * COORDINATES}", self.head_dim, f"the nearest is {2 * COORDINATES}")
        if self.knots < 2:
            raise invalid("knots", "an int ≥ 2", repr(self.knots), "2 is the endpoint form")
        for name in ("image_periods", "range_periods"):
            shortest, longest = getattr(self, name)
            if not 0 < shortest <= longest < math.inf:
                raise invalid(name, "(shortest, longest)", (shortest, longest), "put the shorter first")

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """One block over all whole sets of 6 channels, on adjacent pairs."""
        seen = partial(self._seen, query.lens, seen_half_angle_rad(query.lens, query.rays.device))
        sides = expected_operators(query, key, query.rays, key.rays, seen, self._ladder(query.rays), split_halves=False)
        channels = self.head_dim // (2 * COORDINATES) * 2 * COORDINATES
        return (Block("path", 0, channels, *sides, camera=True),)

    def _seen(
        self,
        lens: Lens,  # of the viewing cameras
        half_angle_rad: Tensor,  # [*lens.batch_shape]
        viewer_from_camera: Tensor,  # [B, G, S, 4, 4]
        rays: Tensor,  # [B or 1, G or 1, S, P, 3] unit
        content: Tensor,  # [B or 1, G or 1, S, P, 2]
    ) -> Tensor:  # [B, G, S, P, knots, 3]
        """Paths of the tokens in the image of the viewing camera: column and row in image sizes, log range."""
        turned = rays @ viewer_from_camera[..., :3, :3].mT  # [B, G, S, P, 3]
        ranges_m = self._log_ranges(content).exp()
        points = turned[..., None, :] * ranges_m[..., None] + viewer_from_camera[:, :, :, None, None, :3, 3]
        pixels = pixels_seen(lens, points, half_angle_rad, Z_MIN_M)  # [B, G, S, P, knots, 2]
        distance_m = torch.linalg.vector_norm(points, dim=-1, keepdim=True).clamp(*RANGE_M)
        image = pixels / pixels.new_tensor([lens.width, lens.height])
        return torch.cat((image, distance_m.log()), dim=-1)

    def _log_ranges(
        self,
        content: Tensor,  # [..., 2] mu, s
    ) -> Tensor:  # [..., knots]
        """Knots between mu − s and mu + s, both within RANGE_M."""
        mu, s = content.unbind(-1)
        low, high = math.log(RANGE_M[0]), math.log(RANGE_M[1])
        start, end = ((mu + sign * s).clamp(low, high)[..., None] for sign in (-1, 1))
        fractions = torch.linspace(0, 1, self.knots, dtype=content.dtype, device=content.device)
        return start + (end - start) * fractions

    def _ladder(self, like: Tensor) -> Ladder:
        """2π / period, every coordinate with its own log-spaced periods."""
        count = self.head_dim // (2 * COORDINATES)
        exponent = torch.linspace(0, 1, count, dtype=like.dtype, device=like.device)
        ladders = [
            shortest * (longest / shortest) ** exponent
            for shortest, longest in (self.image_periods, self.image_periods, self.range_periods)
        ]
        return Ladder(2 * math.pi / torch.stack(ladders), coordinate_major=True)
