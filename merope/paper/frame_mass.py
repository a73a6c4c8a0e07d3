"""The share of its attention that a query frame gives to each key frame: in a camera branch and in a base model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from merope.adapters.camera_attention import CameraAttention
from merope.adapters.conditioning import CameraCondition
from merope.attention.dispatch import attend
from merope.errors import invalid


class WatchedProcessor:
    """In the place of a base model's processor: remembers its output and what it attended with last."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.output: Tensor | None = None  # of the video
        self.attended: _Attended | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Attended() as self.attended:
            out = self.base(*args, **kwargs)
        self.output = out[0] if isinstance(out, tuple) else out
        return out


class _Attended(TorchFunctionMode):
    """Notes queries, keys and mask of the first attention inside."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[Tensor, Tensor, Tensor | None] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and self.call is None:
            given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            self.call = given["query"], given["key"], given.get("attn_mask")
        return func(*args, **kwargs)


def branch_mass(
    processor: CameraAttention,
    hidden: Tensor,  # [B, N, width]
    condition: CameraCondition,
) -> Tensor:  # [frames, frames]
    """Attention mass between frames in a camera branch."""
    x = hidden.to(processor.cam_qkv.weight.dtype)
    q, k, _ = processor.projected(x)
    plan = replace(processor.plan(x, condition), transform_values=False)  # values here are marks, not features
    rows, columns = condition.grid
    return _frame_mass(lambda marks: attend(q.float(), k.float(), marks, plan), q, rows * columns)


def backbone_mass(
    watched: WatchedProcessor,
    tokens: int,  # of the video
    tokens_per_frame: int,
    text_first: bool,
) -> Tensor:  # [frames, frames]
    """Attention mass between frames in the base model's own self-attention, of what it does not give to text."""
    call = None if watched.attended is None else watched.attended.call
    if call is None:
        fix = 'call transformer.set_attention_backend("native") before'
        raise invalid("attention of the base model", "PyTorch's own while it is watched", "another backend", fix)
    q, k, mask = call
    start = q.shape[2] - tokens if text_first else 0
    video = slice(start, start + tokens)
    of_video = q[:, :, video].float()
    if mask is not None:
        mask = mask if mask.shape[-2] == 1 else mask[..., video, :]
        mask = mask if mask.dtype == torch.bool else mask.float()

    def attention(marks: Tensor) -> Tensor:
        values = marks.new_zeros(*k.shape[:3], marks.shape[-1])
        values[:, :, video] = marks
        return scaled_dot_product_attention(of_video, k.float(), values, attn_mask=mask)

    mass = _frame_mass(attention, of_video, tokens_per_frame)
    return mass / mass.sum(-1, keepdim=True)


def _frame_mass(
    attention: Callable[[Tensor], Tensor], q: Tensor, tokens_per_frame: int
) -> Tensor:  # [B, H, N, d] -> [frames, frames]
    """Attention applied to marks: channel f of a key token's value is 1 if the token is of frame f.

    So the weights themselves are never held; frames go through in portions of the head's width.
    """
    batch, heads, tokens, width = q.shape
    frame = torch.arange(tokens, device=q.device) // tokens_per_frame
    count = tokens // tokens_per_frame
    portions = []
    for first in range(0, count, width):
        marks = (frame[:, None] == first + torch.arange(width, device=q.device)).to(torch.float32)
        portions.append(attention(marks.expand(batch, heads, -1, -1).contiguous()).mean(dim=(0, 1)))
    mass = torch.cat(portions, dim=-1)[:, :count]
    return mass.unflatten(0, (count, tokens_per_frame)).mean(1)
