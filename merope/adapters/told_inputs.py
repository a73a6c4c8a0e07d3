"""Ways that tell a block its cameras through the input of self-attention: ReCamMaster's, MotionCtrl's, modulation."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from merope.adapters.conditioning import Carrier
from merope.adapters.told_processor import BlockSizes, ToldProcessor, applied, zero_linear
from merope.encodings.additive import AdditiveFeatures


class ToldInput(ToldProcessor):
    """The block's own self-attention, whatever it is, on an input that knows the cameras."""

    def output(self, attn: Any, hidden: Tensor, cameras: Carrier, *args: Any, **kwargs: Any) -> Tensor:
        features = cameras.condition.features
        assert features is not None
        return self.projected(self.base(attn, self.told(hidden, features), *args, **kwargs))

    @abstractmethod
    def told(
        self,
        hidden: Tensor,  # [B, N, width]
        features: Tensor,  # [B or 1, N, channels]
    ) -> Tensor:  # [B, N, width]
        """The input that queries, keys and values are made of."""

    def projected(self, out: Tensor) -> Tensor:  # [B, N, width] -> [B, N, width]
        """What becomes of the output."""
        return out


class ReCamMasterAttention(ToldInput):
    """out + P·out with out = SelfAttn(x + E·features), where E and P are zero at first (Bai et al. 2025).

    Queries, keys and values see the camera. The released code has the projector I + P as one matrix that starts as the
    identity. Ours keeps the identity apart, so that a fresh branch changes no bit in any precision and weight decay
    pulls towards the identity.
    """

    def __init__(self, sizes: BlockSizes, features: AdditiveFeatures) -> None:
        super().__init__(sizes, features)
        self.cam_encode = zero_linear(features.channels, sizes.width)
        self.cam_project = zero_linear(sizes.width, sizes.width)

    def told(self, hidden: Tensor, features: Tensor) -> Tensor:
        return hidden + applied(self.cam_encode, features, hidden.dtype)

    def projected(self, out: Tensor) -> Tensor:
        return out + applied(self.cam_project, out, out.dtype)


class MotionCtrlAttention(ToldInput):
    """SelfAttn(x + M·[x, features]), where M is zero at first (Wang et al. 2024).

    In MotionCtrl's U-Net the layer I + M stands on the residual stream, before the second temporal attention. A block
    of Wan has one self-attention: the layer stands on its input. The released code starts the columns of x as the
    identity and leaves those of the camera random; ours are zero, so that a fresh branch changes nothing.
    """

    def __init__(self, sizes: BlockSizes, features: AdditiveFeatures) -> None:
        super().__init__(sizes, features)
        self.cam_mix = zero_linear(sizes.width + features.channels, sizes.width)

    def told(self, hidden: Tensor, features: Tensor) -> Tensor:
        both = torch.cat((hidden, features.to(hidden.dtype).expand(hidden.shape[0], -1, -1)), dim=-1)
        return hidden + applied(self.cam_mix, both, hidden.dtype)


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
