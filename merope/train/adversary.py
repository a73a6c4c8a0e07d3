"""An adversary: a second network judges the blocks that a causal model predicts, and the model learns to pass.

Where several futures fit a past, the clip of least squared error is their mean: windows dissolve, outlines bend. In few
steps a model has no time to choose one of them. The judge is shown the same noisy block with its true clean frames, and
with those that the model predicts from it. It learns which are which, so a mean of several futures gives itself away.
The model's gradient is that of flow matching and, of the same size, that of being taken for true.

After every noise level that the model will be run at, what it predicts is thus a clip and not a mean of clips (Xiao et
al., Denoising Diffusion GANs, 2022; here beside flow matching, on latents, after true blocks).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from merope.train.judging import BELOW_ZERO, aim_of_passing, judged_pairs, unlikeness
from merope.train.objective import Noised

NARROW, WIDE = 64, 128  # channels before and after the grid is halved
LAYERS = 4
NUDGE = 0.1  # standard deviation of small changes that must not change a verdict much
SLOPE_WEIGHT = 0.01  # of the squared slope that they measure; at 1 a judge of the miniature's latents hardly learns

LOSS = "loss"
"""The name of what the model itself is measured by."""

Part = tuple[str, Tensor]
"""A name in the log, and a number [B] for every clip."""


class Judge(nn.Module):
    """Says for every place of a block how true it looks, after the block before it and beside its noisy state."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(2 * channels + 1, NARROW, 3, padding=1)
        self.halve = nn.Conv3d(NARROW, WIDE, 3, stride=(1, 2, 2), padding=1)
        self.layers = nn.ModuleList(nn.Conv3d(WIDE, WIDE, 3, padding=1) for _ in range(LAYERS))
        self.last = nn.Conv3d(WIDE, 1, 1)

    def forward(
        self,
        block: Tensor,  # [N, C, T, h, w]
        noisy: Tensor,  # [N, C, T, h, w]
        past: Tensor,  # [N, C, T', h, w] true frames before it
        sigma: Tensor,  # [N] noise level of `noisy`
    ) -> Tensor:  # [N, places]
        frames = block.shape[2]
        shown = torch.cat((torch.cat((past, block), 2), torch.cat((past, noisy), 2)), dim=1)
        level = sigma.to(shown.dtype)[:, None, None, None, None].expand(-1, 1, *shown.shape[2:])
        shown = torch.cat((shown, level), dim=1).float().contiguous(memory_format=torch.channels_last_3d)
        seen = self.halve(leaky_relu(self.first(shown), BELOW_ZERO))
        for layer in self.layers:
            seen = seen + layer(leaky_relu(seen, BELOW_ZERO))
        return self.last(leaky_relu(seen, BELOW_ZERO))[:, 0, -frames:].flatten(1)


class Blocks:
    """The generated blocks of clips, one by one, with what a judge sees beside each: noisy state, past, noise level."""

    def __init__(
        self,
        clean: Tensor,  # [B, C, T, h, w]
        noised: Noised,
        block: int,  # latent frames
    ) -> None:
        self.clips, self.block = len(clean), block
        self.starts = range(noised.given, clean.shape[2], block)
        past = torch.cat([clean[:, :, start - block : start] for start in self.starts])
        self.true = self.of(clean)
        self.beside = self.of(noised.latents), past, torch.cat([noised.sigma[:, start] for start in self.starts])

    def of(self, x: Tensor) -> Tensor:  # [B, C, T, h, w] -> [blocks · B, C, block, h, w]
        return torch.cat([x[:, :, start : start + self.block] for start in self.starts])

    def by_clip(self, numbers: Tensor) -> Tensor:  # [blocks · B] -> [B]
        return numbers.unflatten(0, (len(self.starts), self.clips)).mean(0)


def judged_parts(
    judge: Judge,
    blocks: Blocks,
    noised: Noised,
    prediction: Tensor,  # [B, C, T, h, w] velocity
    flow_loss: Tensor,  # [B]
    weight: float,  # of the gradient of passing, where that of flow matching has 1
    nudges: Tensor,  # [2, blocks · B, C, block, h, w] standard normal
) -> Iterator[Part]:
    """What the model learns, then what the judge learns, then how often the judge is right.

    The first part has the value of the flow-matching loss, and the gradient of both aims.
    """

    def verdicts(block: Tensor) -> Tensor:
        return judge(block, *blocks.beside)

    held = prediction.detach().float().requires_grad_()
    shown = blocks.of(noised.latents - noised.sigma[:, None, :, None, None] * held)
    unlike = unlikeness(verdicts, blocks.true, shown)
    yield LOSS, flow_loss + aim_of_passing(flow_loss, prediction, held, unlike, weight)
    judged = judged_pairs(verdicts, blocks.true, shown, NUDGE * nudges, SLOPE_WEIGHT)
    yield "judge_loss", blocks.by_clip(judged.loss)
    yield "told_apart", blocks.by_clip(judged.told_apart)
