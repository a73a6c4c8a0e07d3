"""A judge of pictures: a VAE's decoder learns to make frames that are taken for true, so its edges are sharp.

The frames of least absolute error are a compromise: where a latent leaves open which way an edge runs, they show it
blurred, and leaves and far windows are gone. The judge sees a few frames of a clip and says for every place whether
they are true or decoded. Blur gives itself away. The decoder's gradient is that of its errors and, so many times as
large, that of being taken for true (Esser et al., 2021, weigh a whole picture so; here every frame has its own weight).
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from merope.train.judging import BELOW_ZERO, Judged, aim_of_passing, judged_pairs, unlikeness

WIDTHS = (64, 128, 256)  # channels each time the picture is halved
NUDGE = 0.05  # standard deviation, of colours in [−1, 1]
SLOPE_WEIGHT = 0.01  # of the squared slope


class PictureJudge(nn.Module):
    """Says for every 8 × 8 pixels of every frame how true it looks there, from 38 × 38 pixels of 5 frames."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv3d(3, WIDTHS[0], (1, 4, 4), stride=(1, 2, 2), padding=(0, 1, 1))]
        for narrow, wide in pairwise(WIDTHS):
            layers.append(nn.Conv3d(narrow, wide, (3, 4, 4), stride=(1, 2, 2), padding=1))
        layers.append(nn.Conv3d(WIDTHS[-1], WIDTHS[-1], (1, 3, 3), padding=(0, 1, 1)))
        self.layers = nn.ModuleList(layers)
        self.last = nn.Conv3d(WIDTHS[-1], 1, 1)

    def forward(self, frames: Tensor) -> Tensor:  # [N, 3, T, H, W] in [−1, 1] -> [N, places]
        seen = frames.contiguous(memory_format=torch.channels_last_3d)
        for layer in self.layers:
            seen = leaky_relu(layer(seen), BELOW_ZERO)
        return self.last(seen).flatten(1)


def aim_of_sharpness(
    judge: PictureJudge,
    loss: Tensor,  # [] of `decoded`
    decoded: Tensor,  # [B, 3, T, H, W]
    video: Tensor,  # [B, 3, T, H, W]
    weight: float,
) -> Tensor:  # []
    """Zero, with the gradient of being taken for true."""
    held = decoded.detach().float().requires_grad_()
    return aim_of_passing(loss, decoded, held, unlikeness(judge, video, held), weight).sum()


def judged_pictures(judge: PictureJudge, decoded: Tensor, video: Tensor, dice: torch.Generator) -> Judged:
    """What the judge learns of frames as they are and as they are decoded, [B, 3, T, H, W] both."""
    nudges = torch.randn((2, *video.shape), device=video.device, generator=dice)
    return judged_pairs(judge, video, decoded.float(), NUDGE * nudges, SLOPE_WEIGHT)
