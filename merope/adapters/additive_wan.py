"""The CameraCtrl-style baseline in Wan's blocks: ray features added before the query and key projections."""

from typing import Any

from torch import Tensor

from merope.adapters.conditioning import Carrier
from merope.adapters.rerope import rotated
from merope.adapters.told_processor import BlockSizes, ToldProcessor
from merope.adapters.wan_attention import attended, by_head
from merope.encodings.additive import AdditiveCamera, AdditiveFeatures


class AdditiveAttention(ToldProcessor):
    """Wan's self-attention whose queries and keys, not values, see x + W·features, with W zero at first."""

    def __init__(self, sizes: BlockSizes, features: AdditiveFeatures) -> None:
        super().__init__(sizes, features)
        self.cam_add = AdditiveCamera(features, sizes.width)

    def output(self, attn: Any, hidden: Tensor, cameras: Carrier, *args: Any, **kwargs: Any) -> Tensor:
        assert cameras.native is not None
        assert cameras.condition.features is not None
        seen = self.cam_add(hidden, cameras.condition.features)
        q, k, v = by_head(attn, seen, seen, hidden)
        q, k = rotated(q, *cameras.native), rotated(k, *cameras.native)
        return attended(attn, q, k, v, args, self._attention_backend)
