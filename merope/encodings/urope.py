"""URoPE: keys lifted to depth anchors and reprojected into the query's image (Xie et al. 2026).

Written from the published description; base, units and what happens behind a camera are decisions of this library.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from merope.attention.operators import Operator, phasors
from merope.attention.plan import Block
from merope.encodings.protocol import Encoding
from merope.encodings.rotary import check_head_dim, check_positive, native_block, rotary_phases
from merope.encodings.tokens import Tokens
from merope.errors import invalid
from merope.geometry.lenses import Lens
from merope.geometry.poses import relative, transform
from merope.geometry.visibility import is_perspective, pixels_seen, seen_half_angle_rad


@dataclass(frozen=True)
class URoPE(Encoding):
    """Rotary phases between the query's patch and where the key's patch would appear in the query's image.

    Heads share the anchors in contiguous groups; with fewer heads than anchors, evenly spaced ones are used. Within one
    camera every anchor lands on the key's own patch: ordinary 2-D RoPE. U = Rot(ω·(key − query)), orthogonal.

    anchors_m: depths at which a key may lie, metres. Along the optical axis for perspective lenses (Pinhole,
        BrownConrady), along the unit ray for all others, whose rays may have no depth.
    split: channels for (time, column, row); None is 1/4, 3/8, 3/8 of the head. The published layout has no time band:
        split=(0, head_dim / 2, head_dim / 2).
    rope_base: base of the rotary frequencies; positions are in latent frames and patches.
    z_min_m: a point nearer to, or behind, a perspective query camera is taken at this depth.
    """

    anchors_m: tuple[float, ...] = (2.0, 8.0, 14.0, 20.0)
    split: tuple[int, int, int] | None = None
    rope_base: float = 10000.0
    z_min_m: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is None:
            check_head_dim(self.head_dim, 16)
        channels = self.channels
        if min(channels) < 0 or any(n % 2 for n in channels) or sum(channels) != self.head_dim:
            expected = f"three even counts that sum to head_dim {self.head_dim}"
            raise invalid("split", expected, channels, "pass (time, column, row) channels")
        if not self.anchors_m or not all(0 < depth_m < math.inf for depth_m in self.anchors_m):
            raise invalid("anchors_m", "positive depths in metres", self.anchors_m, "the method has (2, 8, 14, 20)")
        check_positive("rope_base", self.rope_base)
        check_positive("z_min_m", self.z_min_m, "0.05 is the default")

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels for (time, column, row)."""
        image = 3 * self.head_dim // 8
        return self.split if self.split is not None else (self.head_dim // 4, image, image)

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """The native band over time, and the image band as each query camera sees it."""
        time, column, row = self.channels
        blocks = [native_block(0, query, key, (time, 0, 0), self.rope_base)] if time else []
        if column or row:
            query_side, key_side = self._query_side(query), self._key_side(query, key)
            blocks.append(Block("image", time, self.head_dim, query_side, key_side, camera=True))
        return tuple(blocks)

    def _query_side(self, query: Tokens) -> Operator:
        """Rot(−ω x) at the patch's own column and row."""
        positions = query.positions[:, : query.cameras * query.patches, 1:]
        table = self._phasors(-positions.unflatten(1, (query.cameras, query.patches)))
        return Operator(query.per_token(table, self._unit(), entry_dims=2).to(query.dtype)[:, None, None], "phasor")

    def _key_side(self, query: Tokens, key: Tokens) -> Operator:
        """Rot(ω x) at the column and row where each query camera sees the key's anchors, one anchor per head group."""
        query_from_key = relative(query.origin_from_camera[:, :, None], key.origin_from_camera[:, None])
        half_angle_rad = seen_half_angle_rad(query.lens, key.rays.device)
        rows, columns = query.grid
        patches_per_pixel = key.rays.new_tensor([columns / query.lens.width, rows / query.lens.height])
        tables = []
        # One key camera at a time: the float64 phases of all of them would take many times the table's memory.
        for pose, rays in zip(query_from_key.unbind(2), key.rays.unbind(1), strict=True):
            points = transform(pose[:, :, None], self._lifted(key.lens, rays))
            pixels = pixels_seen(query.lens, points, half_angle_rad, self.z_min_m)
            tables.append(self._phasors(pixels * patches_per_pixel - 0.5).to(key.dtype))
        table = torch.stack(tables, dim=3)  # [B, Vq, A, Vk, P, L, 2]
        return Operator(key.per_token(table.transpose(1, 2), self._unit(), entry_dims=2), "phasor")

    def _lifted(
        self,
        lens: Lens,
        rays: Tensor,  # [B or 1, P, 3] unit
    ) -> Tensor:  # [B or 1, 1, A, P, 3] camera frame, metres
        """The points of every anchor on the rays of one key camera."""
        directions = rays / rays[..., 2:] if is_perspective(lens) else rays
        return directions[:, None, None] * rays.new_tensor(self.anchors_m)[:, None, None]

    def _phasors(
        self,
        patches: Tensor,  # [..., 2] column, row
    ) -> Tensor:  # [..., L, 2]
        _, column, row = self.channels
        return phasors(rotary_phases(pad(patches, (1, 0)), (0, column, row), self.rope_base))

    def _unit(self) -> Tensor:  # [L, 2]
        return torch.tensor([1.0, 0.0]).expand((self.head_dim - self.channels[0]) // 2, 2)
