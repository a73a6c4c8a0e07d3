"""ReRoPE: the camera encoding inside the backbone's own self-attention, in place of its slowest rotary channels.

The paper's ablation (Appendix "Integration style") carves "low-frequency camera rotary channels into the backbone's
native self-attention" after Li et al. 2026 and says no more. Our reading: every head gives up the slow end of its time,
row and column bands, where a clip's positions hardly turn the phase; there the native rotation is dropped and the
encoding's operator stands instead, on queries and keys and, like in the branch, on values and output. For heads of 128
the kept native channels are as many as MeRoPE's native band (16 for time, 8 and 8), so that the other 96 take its
36 + 36 + 24 camera channels. There are no new parameters, and the pretrained output is not preserved: the backbone has
to be trained.
"""

from typing import Any

import torch
from torch import Tensor

from merope.adapters.camera_attention import CameraProcessor
from merope.adapters.conditioning import Carrier
from merope.adapters.wan_attention import out_layers, projected
from merope.attention.dispatch import attend
from merope.encodings.rotary import wan_bands
from merope.errors import invalid

Bands = tuple[int, int, int]  # channels for time, row, column

CARVE_128: Bands = (28, 34, 34)
PARTITION_96 = (36, 36, 24, 0)


def check_carve(carve: Bands | None, head_dim: int) -> Bands:
    """The channels that each band gives up, counted from its slow end."""
    bands = wan_bands(head_dim)
    chosen = CARVE_128 if carve is None and head_dim == 128 else tuple(carve or ())
    if (
        len(chosen) != 3
        or sum(chosen) == 0
        or any(n % 2 or not 0 <= n <= b for n, b in zip(chosen, bands, strict=True))
    ):
        expected = f"three even counts of at most {bands} channels of time, row, column"
        raise invalid("carve", expected, carve, f"heads of 128 have the default {CARVE_128}")
    return chosen[0], chosen[1], chosen[2]


class CarvedAttention(CameraProcessor):
    """Wan's self-attention with the camera operator on the carved channels of every head."""

    def __init__(self, head_dim: int, carve: Bands) -> None:
        super().__init__()
        kept_and_carved = [(band - n, n) for band, n in zip(wan_bands(head_dim), carve, strict=True)]
        self.pieces = [size for pair in kept_and_carved for size in pair]  # kept, carved of time, row, column

    def output(self, attn: Any, hidden: Tensor, cameras: Carrier, *args: Any, **kwargs: Any) -> Tensor:
        assert cameras.native is not None
        assert cameras.condition.plan is not None
        q, k, v = projected(attn, hidden)
        cosine, sine = (self._parted(table.transpose(1, 2))[1] for table in cameras.native)
        out = attend(
            self._camera_first(q, cosine, sine),
            self._camera_first(k, cosine, sine),
            torch.cat(self._parted(v), dim=-1),
            cameras.condition.plan,
        )
        return out_layers(attn, self._in_place(out).transpose(1, 2).flatten(2))

    def _parted(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [..., carved], [..., kept]
        parts = x.split(self.pieces, dim=-1)
        return torch.cat(parts[1::2], dim=-1), torch.cat(parts[0::2], dim=-1)

    def _camera_first(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # [B, heads, N, d]
        """Carved channels as they are, then the kept ones under their native rotation."""
        carved, kept = self._parted(x)
        return torch.cat((carved, rotated(kept, cosine, sine)), dim=-1)

    def _in_place(self, x: Tensor) -> Tensor:  # [B, heads, N, d]
        """Channels back from camera-first order to where the output projection expects them."""
        kept, carved = self.pieces[0::2], self.pieces[1::2]
        parts = x.split((*carved, *kept), dim=-1)
        return torch.cat([part for pair in zip(parts[3:], parts[:3], strict=True) for part in pair], dim=-1)


def rotated(
    x: Tensor,  # [..., d]
    cosine: Tensor,  # [..., d] each value twice, as Wan's rotary embedding gives them
    sine: Tensor,
) -> Tensor:  # [..., d]
    """Wan's rotary embedding: adjacent pairs turned by their phases, in the dtype of x."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosine[..., 0::2], sine[..., 1::2]
    turned = torch.stack((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return turned.flatten(-2).to(x.dtype)
