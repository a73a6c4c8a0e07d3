"""A pipeline whose streams show their frames while the rest of a block is still being decoded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from merope.formats.video import as_bytes
from merope.generate.camera_video import CameraVideoPipeline
from merope.generate.conditions import check_finite

ShowFrames = Callable[[Tensor], None]  # uint8 [T, H, W, 3], the next ones of the block


class WatchedPipeline(CameraVideoPipeline):
    """The VAE looks back only: frames of a latent frame are final before the next one is decoded."""

    _show: ShowFrames | None = None

    @contextmanager
    def watched(self, show: ShowFrames) -> Iterator[None]:
        """Frames of all blocks that are decoded here are shown, those of one latent frame after the other."""
        self._show = show
        try:
            yield
        finally:
            self._show = None

    def decode_block(
        self,
        latents: Tensor,  # [B, C, T_latent, h, w] the next ones, normalised
        past: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:  # [B, 3, T, H, W] in [−1, 1]
        if self._show is None:
            return super().decode_block(latents, past)
        parts = []
        for one in latents.split(1, dim=2):
            video, past = super().decode_block(one, past)
            check_finite("the decoded frames", video)
            self._show(as_bytes((video[0].permute(1, 2, 3, 0).float() + 1) / 2).cpu())
            parts.append(video)
        return torch.cat(parts, dim=2), past
