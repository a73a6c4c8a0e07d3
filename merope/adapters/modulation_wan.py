"""BulletTime's and LingBot-World's way: the camera scales and shifts what a block works on, token by token."""

from torch import Tensor, nn
from torch.nn.functional import silu

from merope.adapters.told_processor import BlockSizes, ToldInput, applied, zero_linear
from merope.encodings.additive import AdditiveFeatures


class ModulatedAttention(ToldInput):
    """SelfAttn((1 + s) x + t), with s and t from the features of every token and zero at first.

    p = E·features, c = p + L₂ silu(L₁ p), (s, t) = S·c. The layers of c are those of LingBot-World's released code
    (2026), there on Plücker coordinates and as wide as the block; ours are width / C wide and E is each block's own.
    LingBot modulates the residual stream behind self-attention, which an attention processor does not reach; ours
    modulates the input of self-attention, after the block's own scale and shift, as adaptive normalisation does.
    BulletTime (Wang et al. 2025) describes such a one for cameras; we found no code of it.
    """

    def __init__(self, sizes: BlockSizes, features: AdditiveFeatures) -> None:
        super().__init__(sizes, features)
        self.cam_embed = nn.Linear(features.channels, sizes.narrow)
        self.cam_hidden = nn.Linear(sizes.narrow, sizes.narrow)
        self.cam_inject = nn.Linear(sizes.narrow, sizes.narrow)
        self.cam_modulate = zero_linear(sizes.narrow, 2 * sizes.width)  # rows of s, then t

    def told(self, hidden: Tensor, features: Tensor) -> Tensor:
        embedded = applied(self.cam_embed, features, self.cam_embed.weight.dtype)
        inner = silu(applied(self.cam_hidden, embedded, embedded.dtype))
        camera = embedded + applied(self.cam_inject, inner, embedded.dtype)
        scale, shift = applied(self.cam_modulate, camera, hidden.dtype).chunk(2, dim=-1)
        return hidden * (1 + scale) + shift
