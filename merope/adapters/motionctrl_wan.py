"""MotionCtrl's way: extrinsics beside the channels of every token, and a linear layer that mixes the two."""

import torch
from torch import Tensor

from merope.adapters.told_processor import BlockSizes, ToldInput, applied, zero_linear
from merope.encodings.additive import AdditiveFeatures


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
