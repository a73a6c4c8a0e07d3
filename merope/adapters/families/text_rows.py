"""All that a caption gives to a transformer, as one tensor [L, D]: it is cached, dropped and batched like any other.

Masks are one more column, at the end. Texts of several encoders stand below each other, as wide as the widest.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def masked_rows(
    embeddings: Tensor,  # [L, d]
    mask: Tensor,  # [L]
    width: int,  # of the widest text
) -> Tensor:  # [L, width + 1]
    """A text and its mask."""
    padded = pad(embeddings, (0, width - embeddings.shape[-1]))
    return torch.cat((padded, mask[:, None].to(padded)), dim=-1)


def one_empty_row(
    rows: Tensor,  # [L, width + 1] zeros
) -> Tensor:  # [L, width + 1]
    """No text, for models that take the mean of the rows in the mask: the first one is in it."""
    rows[0, -1] = 1.0
    return rows


def text_and_mask(
    rows: Tensor,  # [B, L, width + 1]
    width: int,  # of this text
) -> tuple[Tensor, Tensor]:  # [B, L, width], [B, L]
    """The inverse of `masked_rows`."""
    return rows[..., :width], rows[..., -1]
