"""ReCamMaster's way: a linear map of the extrinsics added to the input of self-attention, a projector behind it."""

from torch import Tensor

from merope.adapters.told_processor import BlockSizes, ToldInput, applied, zero_linear
from merope.encodings.additive import AdditiveFeatures


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
