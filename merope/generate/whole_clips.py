"""A Wan VAE over a whole clip in one pass.

diffusers' `AutoencoderKLWan` goes through a clip in chunks of four frames and keeps the last frames of every layer for
the next chunk. All its convolutions look back only, so one convolution over the whole clip gives the same numbers.
It is faster, and it needs the memory of all frames at once: `encode_clips` and `decode_clips` take it for small clips.

The first frame is special: strides in time leave it alone, because 4k + 1 frames have k + 1 latent frames.
"""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AutoencoderKLWan,
    WanResample,
    WanResidualDownBlock,
    patchify,
    unpatchify,
)
from torch import Tensor, nn
from torch.nn.functional import conv3d, pad

from merope.errors import invalid

FRAMES_PER_CHUNK = 4
"""Frames that `AutoencoderKLWan` encodes at once after the first one, whatever its strides."""

WHOLE_PIXELS = 1 << 22
"""Of all frames that go through a VAE together. Wan2.1's then takes about 5 GB in fp32, that of Wan2.2 less."""


def encode_clips(
    vae: Any,  # AutoencoderKLWan, or a VAE with the same calls
    video: Tensor,  # [B, 3, T, H, W] in [−1, 1]
) -> Tensor:  # [B, C, T', H', W']
    """The most likely latents, not normalised."""
    frames, rows, columns = video.shape[2:]
    at_once = _clips_at_once(vae, frames * rows * columns)
    if not at_once or (frames - 1) % FRAMES_PER_CHUNK:
        return vae.encode(video).latent_dist.mode()
    return torch.cat([encode_whole(vae, some).chunk(2, dim=1)[0] for some in video.split(at_once)])


def decode_clips(
    vae: Any,  # AutoencoderKLWan, or a VAE with the same calls
    latents: Tensor,  # [B, C, T', H', W'] not normalised
) -> Tensor:  # [B, 3, T, H, W] in [−1, 1]
    """The frames of latents."""
    frames, rows, columns = latents.shape[2:]
    size, stride = vae.config.get("scale_factor_spatial", 8), vae.config.get("scale_factor_temporal", 4)
    at_once = _clips_at_once(vae, ((frames - 1) * stride + 1) * rows * columns * size**2)
    if not at_once:
        return vae.decode(latents, return_dict=False)[0]
    return torch.cat([decode_whole(vae, some) for some in latents.split(at_once)])


def _clips_at_once(vae: Any, pixels: int) -> int:
    """Clips of so many pixels that may pass whole; 0 where the VAE's own way must be taken.

    That is so for tiles, which were asked for to save memory, and for weights that hooks move between devices.
    """
    if not isinstance(vae, AutoencoderKLWan) or vae.use_tiling:
        return 0
    if any(hasattr(part, hook) for part in vae.modules() for hook in ("_hf_hook", "_diffusers_hook")):
        return 0
    return min(1, WHOLE_PIXELS // pixels) if vae.use_slicing else WHOLE_PIXELS // pixels


def encode_whole(
    vae: Any,  # AutoencoderKLWan
    video: Tensor,  # [B, 3, T, H, W] in [−1, 1]
) -> Tensor:  # [B, 2·C, T', H', W']
    """Mean and log-variance of the latents, as `DiagonalGaussianDistribution` takes them."""
    frames = video.shape[2]
    if (frames - 1) % FRAMES_PER_CHUNK:
        below = (frames - 1) // FRAMES_PER_CHUNK * FRAMES_PER_CHUNK + 1
        raise invalid("video", f"{FRAMES_PER_CHUNK}k + 1 frames", frames, f"use {below} or {below + FRAMES_PER_CHUNK}")
    x = _causal(vae.encoder.conv_in, patchify(video, vae.config["patch_size"] or 1))
    for block in vae.encoder.down_blocks:
        x = _down(block, x)
    x = _head(vae.encoder, _middle(vae.encoder.mid_block, x))
    return _causal(vae.quant_conv, x)


def decode_whole(
    vae: Any,  # AutoencoderKLWan
    latents: Tensor,  # [B, C, T', H', W']
    clamp: bool = True,  # colours to [−1, 1]; training must not: beyond it there would be no gradient
) -> Tensor:  # [B, 3, T, H, W]
    """The frames of latents, which are as `encode_whole` gives them: not normalised."""
    video = _decoded(vae, latents, None)
    return video.clamp(-1.0, 1.0) if clamp else video


class DecodedStream:
    """Frames of latents that come block by block, the same as if all had been decoded at once.

        stream = DecodedStream(vae)
        frames = stream.decode(latents[:, :, :3])       # 9 frames: the first latent frame has one, the others four
        frames = stream.decode(latents[:, :, 3:6])      # the next 12, without a seam

    past: what the layers remember. It is never changed in place: put an earlier one back to undo blocks, save it to go
    on later. Its size does not grow.
    """

    def __init__(self, vae: Any, past: dict[str, Tensor] | None = None) -> None:  # AutoencoderKLWan
        self.vae, self.past = vae, past or {}
        self._names = {layer: name for name, layer in vae.named_modules()}

    def decode(
        self,
        latents: Tensor,  # [B, C, T', H', W'] the next ones, not normalised
    ) -> Tensor:  # [B, 3, T, H, W] in [−1, 1]
        past = _Past(self._names, self.past)
        frames = _decoded(self.vae, latents, past).clamp(-1.0, 1.0)
        self.past = past.after
        return frames


class _Past:
    """The last inputs of the convolutions, before and after a block of a stream."""

    def __init__(self, names: dict[nn.Module, str], before: dict[str, Tensor]) -> None:
        self.names, self.before, self.after = names, before, dict(before)

    def joined(self, conv: nn.Module, x: Tensor, count: int) -> Tensor:
        """The frames of a block, `count` earlier ones before them; zeros before the first."""
        name = self.names[conv]
        earlier = self.before.get(name)
        x = pad(x, (0, 0, 0, 0, count, 0)) if earlier is None else torch.cat((earlier.to(x.dtype), x), dim=2)
        self.after[name] = x[:, :, x.shape[2] - count :].clone()  # a view would keep the whole block
        return x


def _decoded(vae: Any, latents: Tensor, past: _Past | None) -> Tensor:  # [B, C, T', H', W'] -> [B, 3, T, H, W]
    x = _causal(vae.decoder.conv_in, _causal(vae.post_quant_conv, latents, past), past)
    x = _middle(vae.decoder.mid_block, x, past)
    for block in vae.decoder.up_blocks:
        x = _up(block, x, past)
    return unpatchify(_head(vae.decoder, x, past), vae.config["patch_size"] or 1)


def _down(block: Any, x: Tensor) -> Tensor:
    """A block of the encoder: one layer in Wan2.1, layers with a shortcut around them in Wan2.2."""
    if isinstance(block, WanResidualDownBlock):
        inner = x
        for resnet in block.resnets:
            inner = _residual(resnet, inner)
        if block.downsampler is not None:
            inner = _downsampled(block.downsampler, inner)
        return inner + block.avg_shortcut(x)
    return _downsampled(block, x) if isinstance(block, WanResample) else _residual(block, x)


def _up(block: Any, x: Tensor, past: _Past | None) -> Tensor:
    """A block of the decoder, with a shortcut around it in Wan2.2."""
    inner = x
    for resnet in block.resnets:
        inner = _residual(resnet, inner, past)
    is_wan21 = hasattr(block, "upsamplers")
    upsampler = (block.upsamplers or [None])[0] if is_wan21 else block.upsampler
    if upsampler is not None:
        inner = _upsampled(upsampler, inner, past)
    shortcut = None if is_wan21 else block.avg_shortcut
    return inner if shortcut is None else inner + shortcut(x, first_chunk=_is_first(past))


def _middle(block: Any, x: Tensor, past: _Past | None = None) -> Tensor:
    x = _residual(block.resnets[0], x, past)
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual(resnet, attention(x), past)
    return x


def _head(coder: Any, x: Tensor, past: _Past | None = None) -> Tensor:
    """The last layer of the encoder or the decoder."""
    return _causal(coder.conv_out, coder.nonlinearity(coder.norm_out(x)), past)


def _residual(block: Any, x: Tensor, past: _Past | None = None) -> Tensor:
    inner = _causal(block.conv1, block.nonlinearity(block.norm1(x)), past)
    inner = _causal(block.conv2, block.dropout(block.nonlinearity(block.norm2(inner))), past)
    return inner + block.conv_shortcut(x)


def _is_first(past: _Past | None) -> bool:
    """Whether a clip begins here: its first latent frame has one frame, all others have four."""
    return past is None or not past.before


def _causal(conv: Any, x: Tensor, past: _Past | None = None) -> Tensor:
    """A convolution of stride 1 that looks back in time; what lies before the clip and around its frames is zero."""
    time, rows, columns = conv.kernel_size
    if time > 1:
        x = pad(x, (0, 0, 0, 0, time - 1, 0)) if past is None else past.joined(conv, x, time - 1)
    return conv3d(x, conv.weight, conv.bias, padding=(0, rows // 2, columns // 2))


def _downsampled(layer: Any, x: Tensor) -> Tensor:
    """Half the size and, where the layer has a stride in time, half the frames after the first."""
    x = _frame_by_frame(layer.resample, x)
    if layer.mode != "downsample3d" or x.shape[2] == 1:
        return x
    return torch.cat([x[:, :, :1], layer.time_conv(x)], dim=2)


def _upsampled(layer: Any, x: Tensor, past: _Past | None) -> Tensor:
    """Twice the size and, where the layer has a stride in time, twice the frames after the first.

    Those see zeros in the place of the first frame: that is how Wan was trained.
    """
    alone = 1 if _is_first(past) else 0
    if layer.mode == "upsample3d" and x.shape[2] > alone:
        first, rest = x[:, :, :alone], x[:, :, alone:]
        pairs = _causal(layer.time_conv, rest, past).unflatten(1, (2, -1))  # [B, 2, C, T, H, W]
        x = torch.cat([first, pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)], dim=2)
    return _frame_by_frame(layer.resample, x)


def _frame_by_frame(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer of pictures [N, C, H, W] for video [B, C, T, H, W]."""
    return layer(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
