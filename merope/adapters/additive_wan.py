"""The CameraCtrl-style baseline in Wan's blocks: ray features added before the query and key projections."""

from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor

from merope.adapters.camera_attention import CameraProcessor, require_cameras
from merope.adapters.conditioning import CameraRotary
from merope.adapters.rerope import rotated
from merope.encodings.additive import AdditiveCamera, AdditiveFeatures


class AdditiveAttention(CameraProcessor):
    """Wan's self-attention whose queries and keys, not values, see x + W·features, with W zero at first."""

    def __init__(self, width: int, features: AdditiveFeatures) -> None:
        super().__init__()
        self.cam_add = AdditiveCamera(features, width)

    def forward(
        self,
        attn: WanAttention,
        hidden_states: Tensor,  # [B, N, width]
        encoder_hidden_states: None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: CameraRotary | None = None,
    ) -> Tensor:  # [B, N, width]
        """What diffusers calls in place of Wan's own processor."""
        cameras = require_cameras(rotary_emb)
        assert cameras.condition.features is not None
        seen = self.cam_add(hidden_states, cameras.condition.features)
        query, key, value = attn.norm_q(attn.to_q(seen)), attn.norm_k(attn.to_k(seen)), attn.to_v(hidden_states)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        q, k = rotated(q, *cameras.native), rotated(k, *cameras.native)
        out = dispatch_attention_fn(q, k, v, attn_mask=attention_mask, backend=self._attention_backend)
        out = out.flatten(2).type_as(q)
        for layer in attn.to_out:
            out = layer(out)
        return out
