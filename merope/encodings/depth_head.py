"""The depth head: what a model predicts of every token for the encodings that read `content`."""

import torch
from torch import Tensor, nn

from merope.encodings.tokens import PREDICT_CONTENT, Tokens
from merope.errors import invalid


class DepthHead(nn.Module):
    """Two numbers per token from its hidden state: the centre and half-width of an interval of log depths.

    RayRoPE (Wu et al. 2026) reads them as log depth and raw sigma, CRePE (Jin et al. 2026) as the same of the log
    range. The weight starts at zero and the bias at `initial`, so that at first every token has the interval
    e^±3 (0.05 … 20 m), as in RayRoPE. One head per attention layer, shared by its heads, on the layer's input.
    """

    def __init__(self, width: int, initial: tuple[float, float] = (0.0, 3.0)) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)
        nn.init.zeros_(self.linear.weight)
        with torch.no_grad():
            self.linear.bias.copy_(torch.tensor(initial))

    def forward(
        self,
        hidden: Tensor,  # [B, N, width]
    ) -> Tensor:  # [B, N, 2]
        """The `content` of `Encoding.plan`."""
        return self.linear(hidden)


def content_by_camera(tokens: Tokens) -> Tensor:  # [B or 1, V, P, c] float64
    """The content of the tokens that belong to cameras; that of extra tokens is not read."""
    if tokens.content is None:
        raise invalid("content", "given", None, PREDICT_CONTENT)
    of_cameras = tokens.content[:, : tokens.cameras * tokens.patches]
    return of_cameras.to(torch.float64).unflatten(1, (tokens.cameras, tokens.patches))
