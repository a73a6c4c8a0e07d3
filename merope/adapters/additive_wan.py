"""The CameraCtrl-style baseline in Wan's blocks: ray features added before the query and key projections."""

from typing import Any

from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from merope.adapters.camera_attention import CameraProcessor
from merope.adapters.conditioning import Carrier
from merope.adapters.rerope import rotated
from merope.encodings.additive import AdditiveCamera, AdditiveFeatures


class AdditiveAttention(CameraProcessor):
    """Wan's self-attention whose queries and keys, not values, see x + W·features, with W zero at first."""

    def __init__(self, width: int, features: AdditiveFeatures) -> None:
        super().__init__()
        self.cam_add = AdditiveCamera(features, width)

    def output(self, attn: Any, hidden: Tensor, cameras: Carrier, *args: Any, **kwargs: Any) -> Tensor:
        assert cameras.native is not None
        assert cameras.condition.features is not None
        _, mask, _ = args  # of Wan: text, mask, rotary embedding
        seen = self.cam_add(hidden, cameras.condition.features)
        query, key, value = attn.norm_q(attn.to_q(seen)), attn.norm_k(attn.to_k(seen)), attn.to_v(hidden)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        q, k = rotated(q, *cameras.native), rotated(k, *cameras.native)
        out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=self._attention_backend)
        out = out.flatten(2).type_as(q)
        for layer in attn.to_out:
            out = layer(out)
        return out
