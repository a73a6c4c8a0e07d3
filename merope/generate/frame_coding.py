"""Between RGB frames and the normalised latents that a transformer works on, for whole clips and for blocks."""

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.utils.torch_utils import get_module_execution_device
from torch import Tensor

from merope.formats.video import as_bytes
from merope.generate.conditions import check_finite
from merope.generate.whole_clips import DecodedStream, decode_clips, encode_clips


def streamed_vae_dtype(device: torch.device | str) -> torch.dtype:
    """What decodes a stream as fast as it can be without a visible difference.

    On a CPU the VAE is the largest part of a block. With instructions for bfloat16 it takes half the time in it, and
    frames of the package's model are 0.1 of 255 levels away on average. CPUs with AMX are left out: some virtual
    machines announce it and do not grant it, and bfloat16 would end the process there.
    """
    is_fast = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if torch.device(device).type == "cpu" and is_fast else torch.float32


class FrameCoding:
    """What a pipeline does with its VAE; `vae` is None for a pixel-space model."""

    vae: Any

    @torch.no_grad()
    def encode_frames(
        self,
        frames: Tensor,  # uint8 [B, T, H, W, 3], T = 4k + 1 with a VAE
    ) -> Tensor:  # float32 [B, C, T_latent, h, w]
        """Normalised latents of frames: the mode of the VAE's posterior, or the frames in [−1, 1] without a VAE."""
        device = self._execution_device if self.vae is None else get_module_execution_device(self.vae)  # type: ignore[attr-defined]
        video = frames.to(device).permute(0, 4, 1, 2, 3).to(torch.float32) / 127.5 - 1.0
        if self.vae is None:
            return video
        with torch.autocast(device.type, enabled=False):  # of the transformer: training encodes outside of it
            latents = encode_clips(self.vae, video.to(self.vae.dtype)).to(torch.float32)
        mean, std = self._latent_statistics(latents)
        return (latents - mean) / std

    def decode_latents(
        self,
        latents: Tensor,  # [B, C, T_latent, h, w] normalised
    ) -> Tensor:  # [B, 3, T, H, W] in [−1, 1]
        """Frames of normalised latents; the inverse of `encode_frames` but for what the VAE loses."""
        return latents.clamp(-1.0, 1.0) if self.vae is None else decode_clips(self.vae, self._for_vae(latents))

    def decode_block(
        self,
        latents: Tensor,  # [B, C, T_latent, h, w] the next ones, normalised
        past: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:  # [B, 3, T, H, W] in [−1, 1]
        """The next frames of a stream, and what the VAE's layers remember for those after them."""
        if self.vae is None:
            return latents.clamp(-1.0, 1.0), past
        stream = DecodedStream(self.vae, past)
        return stream.decode(self._for_vae(latents)), stream.past

    def decode_block_frames(
        self,
        latents: Tensor,  # [1, C, T_latent, h, w] the next ones, normalised
        past: dict[str, Tensor],
        on_frames: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # uint8 [T, H, W, 3]
        """`decode_block` as pictures; latent frame by latent frame where `on_frames` waits for them."""
        made = []
        for part in latents.split(latents.shape[2] if on_frames is None else 1, dim=2):
            video, past = self.decode_block(part, past)
            check_finite("the decoded frames", video)
            made.append(as_bytes((video[0].permute(1, 2, 3, 0).float() + 1) / 2).cpu())
            if on_frames is not None:
                on_frames(made[-1])
        return torch.cat(made), past

    def _for_vae(self, latents: Tensor) -> Tensor:
        """As the VAE made them: not normalised, on its device and in its precision."""
        latents = latents.to(get_module_execution_device(self.vae), torch.float32)
        mean, std = self._latent_statistics(latents)
        return (latents * std + mean).to(self.vae.dtype)

    def _latent_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:  # each [1, C, 1, 1, 1]
        mean, std = (like.new_tensor(values) for values in (self.vae.config.latents_mean, self.vae.config.latents_std))
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


class VaeCoding(FrameCoding):
    """The VAE of a folder without a pipeline, in float32 on the CPU."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.vae = AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32).eval()
