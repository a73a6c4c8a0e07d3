"""The parallel camera branch of one block: a second, narrower self-attention whose operator is the camera encoding."""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from merope.adapters.conditioning import CameraCondition, Carrier, taken_off
from merope.adapters.history import HistoryAttention
from merope.adapters.stand_in import StandIn
from merope.attention.dispatch import attend
from merope.attention.plan import AttentionPlan
from merope.encodings.additive import LatitudeUp
from merope.encodings.depth_head import DepthHead
from merope.encodings.protocol import Encoding
from merope.errors import invalid

QKNorm = Literal["rms"] | None
NORM_EPS = 1e-6


class CameraProcessor(StandIn, nn.Module, ABC):
    """An attention processor of diffusers that stands in the place of another one (`base`) and knows the cameras."""

    reason, way_back = "with a camera branch", "detach the branch"

    def __init__(self) -> None:
        super().__init__()
        self.base: Any = None  # set when the processor takes its place
        self.layer = ""  # the branch's name of it

    def take_place_of(self, base: Any) -> None:
        """Stand in for another processor. Attention layers hand on what its signature names, and they read it here."""
        self.base = base
        self.__dict__["__call__"] = base.__call__

    def give_place_back(self) -> Any:
        """The processor that was here before."""
        base, self.base = self.base, None
        del self.__dict__["__call__"]
        return base

    def forward(
        self,
        attn: nn.Module,
        hidden_states: Tensor,  # [B, N, width]
        *args: Any,
        **kwargs: Any,
    ) -> Any:  # as `base` returns it
        """What diffusers calls in place of the model's own processor. One of its arguments carries the cameras."""
        cameras, args, kwargs = taken_off(args, kwargs)
        if cameras is None:  # of blocks that run alone, or began before `attach`
            fix = "call the whole transformer, and attach no branch while it runs"
            raise invalid("the arguments of self-attention", "with cameras", "none with them", fix)
        return self.output(attn, hidden_states, cameras, *args, **kwargs)

    @abstractmethod
    def output(self, attn: Any, hidden: Tensor, cameras: Carrier, *args: Any, **kwargs: Any) -> Any:
        """Self-attention of a block that knows its cameras: video [B, N, width], and text where attention is joint."""


class CameraAttention(CameraProcessor):
    """The block's self-attention plus the camera branch, both on the modulated input, before the block's gate.

    out = SelfAttn(x) + W_out · attend(W_q x, W_k x, W_v x; U), with W_out zero at first, so that the block is unchanged
    until it learns (paper, Section 3.4; where the branch stands follows UCPE, Zhang et al. 2026). Text tokens of joint
    attention have no camera: they take no part in the branch. The names of the layers share no suffix with those of
    base models, so that LoRA finds only the latter.
    """

    def __init__(
        self,
        width: int,  # channels of the block
        heads: int,
        encoding: Encoding,
        qk_norm: QKNorm = None,
        has_history: bool = False,  # retrieved references through a cross-attention
        has_map: bool = False,  # the latitude-up map, added to the input
    ) -> None:
        super().__init__()
        inner = heads * encoding.head_dim
        self.heads = heads
        self.encoding = encoding
        self.cam_qkv = nn.Linear(width, 3 * inner)  # rows of q, then k, then v
        self.cam_out = nn.Linear(inner, width)
        self.cam_norm_q = nn.RMSNorm(inner, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.cam_norm_k = nn.RMSNorm(inner, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.cam_depth = DepthHead(width) if encoding.content_channels else None
        self.cam_map = nn.Linear(LatitudeUp.channels, width) if has_map else None
        self.cam_history = HistoryAttention(width, heads, encoding.head_dim) if has_history else None
        nn.init.zeros_(self.cam_out.weight)
        nn.init.zeros_(self.cam_out.bias)

    def output(self, attn: Any, hidden: Tensor, cameras: Carrier, *args: Any, **kwargs: Any) -> Any:
        out = self.base(attn, hidden, *args, **kwargs)
        video, *text = out if isinstance(out, tuple) else (out,)
        video = video + self.camera_output(hidden, cameras.condition)
        if self.cam_history is not None:
            video = video + self.history_output(hidden, cameras)
        return (video, *text) if isinstance(out, tuple) else video

    def camera_output(
        self,
        hidden: Tensor,  # [B, N, width]
        condition: CameraCondition,
    ) -> Tensor:  # [B, N, width]
        """What the branch adds to self-attention, in the dtype of hidden."""
        x, views = self._computed(hidden), condition.cameras.views
        if views > 1:  # all views of a clip see each other
            x = x.unflatten(0, (-1, views)).flatten(1, 2)
        if self.cam_map is not None:
            assert condition.features is not None
            x = x + self.cam_map(condition.features.to(self.cam_map.weight.dtype)).to(x.dtype)
        q, k, v = self.projected(x)
        if condition.gather is not None:
            k, v = condition.gather(k, 2), condition.gather(v, 2)
        if condition.past is not None and condition.plan is not None:
            attended = condition.past.attended(self.layer, q, k, v, condition.plan)
        elif condition.plan is not None:
            attended = attend(q, k, v, condition.plan)
        else:
            attended = self._attended_under_own_plan(q, k, v, x, condition)
        out: Tensor = self.cam_out(attended.transpose(1, 2).flatten(2))
        out = out if views == 1 else out.unflatten(1, (views, -1)).flatten(0, 1)
        return out.to(hidden.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attended_under_own_plan(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, condition: CameraCondition
    ) -> Tensor:  # [B, heads, N, head_dim]
        """Outside of compiled graphs: tracing a plan takes a compiler minutes and saves no time."""
        return attend(q, k, v, self.plan(x, condition))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [B, N, width] -> [B, heads, N, head_dim] each
        """Queries, keys and values of the branch, views of one product but for what norms make anew."""
        q, k, v = self.cam_qkv(x).chunk(3, dim=-1)
        q = self.cam_norm_q(q).to(v.dtype)  # under autocast norms answer in float32
        k = self.cam_norm_k(k).to(v.dtype)
        return self._by_head(q), self._by_head(k), self._by_head(v)

    def history_output(
        self,
        hidden: Tensor,  # [B, N, width]
        cameras: Carrier,
    ) -> Tensor:  # [B, N, width]
        """What retrieved references add to the block, in the dtype of hidden."""
        assert self.cam_history is not None
        added = self.cam_history(self._computed(hidden), cameras.references, cameras.condition.history_plan)
        return added.to(hidden.dtype)

    def plan(
        self,
        x: Tensor,  # [B, N, width]
        condition: CameraCondition,
    ) -> AttentionPlan:
        """The clip's plan, or this block's own one where the encoding reads what the block predicts of every token."""
        if condition.plan is not None:
            return condition.plan
        assert self.cam_depth is not None
        content = self.cam_depth(x)
        plan = self.encoding.plan(
            condition.cameras, condition.grid, times=condition.times, content=content, sees=condition.sees
        )
        return plan.to(dtype=plan_dtype(x))

    def _computed(self, hidden: Tensor) -> Tensor:
        """The input in the dtype of the branch; autocast has one of its own, and would cast what is cast here back."""
        return hidden if torch.is_autocast_enabled(hidden.device.type) else hidden.to(self.cam_qkv.weight.dtype)

    def _by_head(self, x: Tensor) -> Tensor:  # [B, heads, N, head_dim]
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


def plan_dtype(x: Tensor) -> torch.dtype:
    """Transforms run in float32, in float64 for float64 models."""
    return torch.promote_types(x.dtype, torch.float32)
