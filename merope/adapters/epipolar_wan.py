"""CamCo's way: a second attention beside self-attention, in which queries see only keys near their epipolar lines."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from merope.adapters.conditioning import Carrier
from merope.adapters.told_processor import BlockSizes, ToldProcessor, applied, zero_linear
from merope.encodings.additive import AdditiveFeatures


class EpipolarAttention(ToldProcessor):
    """SelfAttn(x) + W_out · attend(q, k, v; mask) with q, k, v of x + R·features, and W_out zero at first.

    The mask is dense and its own: `merope.attend`, its plans and its kernels never see it. A query that sees no key
    gets nothing from it; CamI2V lets it see all keys, or tokens that are learned.
    """

    def __init__(self, sizes: BlockSizes, features: AdditiveFeatures) -> None:
        super().__init__(sizes, features)
        self.heads = sizes.narrow_heads
        self.cam_rays = nn.Linear(features.channels, sizes.width, bias=False)
        self.cam_qkv = nn.Linear(sizes.width, 3 * sizes.narrow)  # rows of q, then k, then v
        self.cam_out = zero_linear(sizes.narrow, sizes.width)

    def output(self, attn: Any, hidden: Tensor, cameras: Carrier, *args: Any, **kwargs: Any) -> Tensor:
        features, mask = cameras.condition.features, cameras.condition.mask
        assert features is not None
        assert mask is not None
        x = hidden + applied(self.cam_rays, features, hidden.dtype)
        narrow = applied(self.cam_qkv, x, hidden.dtype)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in narrow.chunk(3, dim=-1))
        attended = masked_attention(q, k[:, :, : mask.shape[-1]], v[:, :, : mask.shape[-1]], mask)
        out: Tensor = self.base(attn, hidden, *args, **kwargs)
        return out + applied(self.cam_out, attended.transpose(1, 2).flatten(2), out.dtype)


def masked_attention(
    q: Tensor,  # [B, H, Nq, d]
    k: Tensor,  # [B, H, Nk, d]
    v: Tensor,
    mask: Tensor,  # bool [B or 1, Nq, Nk]
) -> Tensor:  # [B, H, Nq, d]
    """Attention over the keys that each query sees; zeros for those that see none."""
    sees_any = mask.any(-1, keepdim=True)
    out = scaled_dot_product_attention(q, k, v, attn_mask=(mask | ~sees_any)[:, None])  # an empty row would be NaN
    return torch.where(sees_any[:, None], out, 0.0)
