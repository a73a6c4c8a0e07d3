"""What the ways of telling a block numbers of its cameras have in common; each way has a file of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from merope.adapters.camera_attention import CameraProcessor
from merope.encodings.additive import AdditiveFeatures


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block, and of what is added to it.

    width, heads: channels and heads of its self-attention.
    narrow: channels inside of what is added, width // C.
    """

    width: int
    heads: int
    narrow: int

    @property
    def narrow_heads(self) -> int:
        """Heads of an attention of `narrow` channels: as wide as the block's, or wider where these do not fill it."""
        most = max(self.heads * self.narrow // self.width, 1)
        return next(count for count in range(most, 0, -1) if self.narrow % count == 0)


class ToldProcessor(CameraProcessor):
    """A block's self-attention that is told features of its tokens' cameras."""

    def __init__(self, sizes: BlockSizes, features: AdditiveFeatures) -> None:
        super().__init__()


def applied(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """layer(x) in the precision of the layer, or of autocast, as a tensor of a dtype."""
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(next(layer.parameters()).dtype)
    return layer(x).to(dtype)


def zero_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear layer that gives zeros until it has learned."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
