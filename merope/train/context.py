"""Context parallelism: the frames of a clip split over ranks, exactly.

Every rank keeps the tokens of its own frames, and with them its own query cameras. Keys and values travel raw: all
ranks gather them, and the encoding's transform for the own query cameras stays local, so nothing that depends on the
query's camera is ever sent. Predictions are gathered at the end; a rank's loss covers its own frames only, so that the
sum over ranks is the loss of the clip and gradients add up.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from merope.adapters.attachment import attached_branch
from merope.adapters.camera_attention import CameraAttention
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.conditioning import CameraRotary
from merope.adapters.rerope import rotated
from merope.adapters.wan_attention import by_head, out_layers
from merope.errors import invalid


class _Gather(torch.autograd.Function):
    """Tensors of one shape from all ranks, end to end; backward adds up what the ranks want of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # [n, ...] -> [ranks · n, ...]
        ctx.group = group
        out = x.new_empty((group.size() * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        out = grad.new_empty((len(grad) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


@dataclass(frozen=True)
class FrameShards:
    """Which frames of a clip belong to which rank: neighbouring ones, the first ranks one more where it must be."""

    group: dist.ProcessGroup
    frames: int

    def __post_init__(self) -> None:
        if self.frames < self.group.size():
            fix = "use fewer context ranks, or longer clips"
            raise invalid("parallel.context", f"at most the {self.frames} latent frames", self.group.size(), fix)

    @property
    def counts(self) -> list[int]:
        """Frames of every rank."""
        ranks = self.group.size()
        return [self.frames // ranks + (rank < self.frames % ranks) for rank in range(ranks)]

    @property
    def own(self) -> slice:
        """Frames of this rank."""
        rank = self.group.rank()
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])

    def own_tokens(self, tokens: int) -> slice:
        """Tokens of this rank's frames, out of those of all."""
        per_frame = tokens // self.frames
        return slice(self.own.start * per_frame, self.own.stop * per_frame)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of all ranks along a dimension that holds this rank's. Ranks with fewer frames pad."""
        per_frame = x.shape[dim] // self.counts[self.group.rank()]
        most = per_frame * max(self.counts)
        tokens_first = x.movedim(dim, 0)
        padded = torch.cat((tokens_first, tokens_first.new_zeros(most - len(tokens_first), *tokens_first.shape[1:])))
        parts = _Gather.apply(padded, self.group).split(most)
        kept = [part[: per_frame * count] for part, count in zip(parts, self.counts, strict=True)]
        return torch.cat(kept).movedim(0, dim)


class GatheredSelfAttention:
    """Wan's self-attention of this rank's queries to the keys of all ranks; in the place of diffusers' processor."""

    def __init__(self, context: "ContextParallel") -> None:
        self.context = context

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,  # [B, own tokens, width]
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:  # [B, own tokens, width]
        q, k, v = by_head(attn, hidden_states, hidden_states, hidden_states)
        cosine, sine = rotary_emb
        k, v = (self.context.shards.gather(x, 1) for x in (rotated(k, cosine, sine), v))
        out = dispatch_attention_fn(rotated(q, cosine, sine), k, v)
        return out_layers(attn, out.flatten(2, 3).type_as(hidden_states))


class ContextParallel:
    """Splits the frames of every clip that goes through a transformer over the ranks of a group."""

    def __init__(self, transformer: WanTransformer3DModel, group: dist.ProcessGroup) -> None:
        self.group = group
        self.shards = FrameShards(group, group.size())  # of the clip under way
        branch = attached_branch(transformer)
        if branch is not None:
            _check_branch(branch)
            branch.frame_share = partial(FrameShards, group)
        transformer.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        for index, block in enumerate(transformer.get_submodule("blocks").children()):
            self._replace_self_attention(block)
            block.register_forward_pre_hook(self._enter_first if index == 0 else self._enter)
        transformer.get_submodule("norm_out").register_forward_pre_hook(self._leave)

    def _replace_self_attention(self, block: nn.Module) -> None:
        attn: Any = block.get_submodule("attn1")
        if isinstance(attn.processor, CameraAttention):
            attn.processor.base = GatheredSelfAttention(self)
        else:
            attn.set_processor(GatheredSelfAttention(self))

    def _begin(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        latents = args[0] if args else kwargs["hidden_states"]
        self.shards = FrameShards(self.group, latents.shape[2])

    def _enter_first(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = args
        return self._enter(block, (hidden[:, self.shards.own_tokens(hidden.shape[1])], *others))

    def _enter(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Time modulation and rotary tables of the own tokens; text stays whole."""
        hidden, text, modulation, rotary = args
        if modulation.ndim == 4:  # one noise level per token
            modulation = modulation[:, self.shards.own_tokens(modulation.shape[1])]
        cosine, sine = rotary
        own = self.shards.own_tokens(cosine.shape[1])
        native = (cosine[:, own], sine[:, own])
        if isinstance(rotary, CameraRotary):
            return hidden, text, modulation, CameraRotary(native, rotary.condition, rotary.references)
        return hidden, text, modulation, native

    def _leave(self, norm: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.shards.gather(args[0], 1),)


def _check_branch(branch: CameraBranch) -> None:
    is_parallel = branch.config["integration"] == "parallel"
    if not is_parallel or branch.encoding is None or branch.encoding.content_channels:
        got = f"{branch.config['integration']}, {branch.config['encoding']}"
        fix = "use context = 1 for it"
        raise invalid("branch with parallel.context > 1", "a parallel branch of a geometric encoding", got, fix)
