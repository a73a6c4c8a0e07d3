"""The VAE in training: how it is built, what it learns from a clip, and what it is worth."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.nn.functional import avg_pool3d

from merope.adapters.families.wan_clips import wan_vae_strides
from merope.errors import invalid
from merope.formats.video import as_bytes, write_image
from merope.formats.writing import make_weights_readable
from merope.generate.whole_clips import decode_clips, decode_whole, encode_clips, encode_whole
from merope.train.clip_pool import ClipPool
from merope.train.export import SHARD
from merope.train.pretrained import forget_origin
from merope.train.vae_config import VaeTrainConfig

AT_ONCE = 4
"""Whole clips that are encoded or decoded together where no gradients are wanted."""

CLIPS_FOR_STATISTICS = 256
SHOWN_WORLDS, SHOWN_FRAMES = 3, 4
LOG_VARIANCE = (-30.0, 20.0)
"""Within which diffusers keeps it."""


def build_vae(config: VaeTrainConfig, device: torch.device) -> Any:  # AutoencoderKLWan in fp32
    """The VAE of a config with fresh or saved weights."""
    torch.manual_seed(config.run.seed)
    sizes, folder = config.vae.architecture, config.vae.pretrained
    channels = sizes.get("z_dim", 16)
    neutral = {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}
    try:
        vae: Any = AutoencoderKLWan(**neutral | sizes)
    except (TypeError, ValueError) as error:
        fix = "use the argument names of diffusers' AutoencoderKLWan"
        raise invalid("vae.architecture", "sizes of an AutoencoderKLWan", str(error), fix) from None
    unit = wan_vae_strides(vae.config)[1] * (2 if config.objective.half_size else 1)
    for name in ("height", "width"):
        if getattr(config.data, name) % unit:
            raise invalid(f"data.{name}", f"a multiple of {unit}", getattr(config.data, name), "change it")
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise invalid("vae.pretrained", "the folder of a saved VAE", folder, "name `trained/vae` of a run")
        vae = AutoencoderKLWan.from_pretrained(folder, dtype=torch.float32)
        for key, size in sizes.items():
            if json.dumps(vae.config[key]) != json.dumps(size):
                fix = "make vae.architecture the same"
                raise invalid("vae.pretrained", f"a VAE with {key} = {size}", vae.config[key], fix)
    for parameter in vae.parameters():
        if parameter.ndim > 3:  # tensor cores want a pixel's channels side by side
            order = torch.channels_last_3d if parameter.ndim == 5 else torch.channels_last
            parameter.data = parameter.data.contiguous(memory_format=order)
    if config.vae.trainable == "decoder":
        for part in (vae.encoder, vae.quant_conv):
            part.requires_grad_(False)
    return vae.train().to(device)


class Reconstruction(NamedTuple):
    """A clip after the VAE."""

    decoded: Tensor  # [B, 3, T, H, W], not clamped
    video: Tensor  # what it should be
    kl: Tensor  # [] of its latents' distribution


def reconstructed(vae: Any, video: Tensor, noise: Tensor, half_size: bool = False) -> Reconstruction:
    """A clip [B, 3, T, H, W] in [−1, 1], from latents that are drawn with the noise.

    Latents that mean the same picture when they are shrunk have no detail without a meaning from place to place. A
    transformer learns such latents sooner (Kouzelis et al., EQ-VAE, 2025).
    """
    mean, log_variance = encode_whole(vae, video).float().chunk(2, dim=1)
    log_variance = log_variance.clamp(*LOG_VARIANCE)
    latents = mean + (0.5 * log_variance).exp() * noise
    if half_size:
        latents, video = (avg_pool3d(x, (1, 2, 2)) for x in (latents, video))
    kl = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).mean()
    return Reconstruction(decode_whole(vae, latents, clamp=False), video, kl)


def loss_terms(clip: Reconstruction) -> dict[str, Tensor]:
    """The terms of the loss by their names in [objective]."""
    error = clip.decoded.float() - clip.video
    return {
        "absolute": error.abs().mean(),
        "squared": error.square().mean(),
        "edges": error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean(),
        "kl": clip.kl,
    }


class Worth(NamedTuple):
    """Of reconstructed clips, each from its most likely latents."""

    psnr_db: list[float]
    sharpness: list[float]  # squared differences of neighbouring pixels, over those of the clip itself


@torch.no_grad()
def worth(vae: Any, videos: Iterable[Tensor]) -> Worth:
    """Of every clip. Colours are in [−1, 1]."""
    of = Worth([], [])
    for video in videos:
        decoded = decode_clips(vae, encode_clips(vae, video)).float()
        squared = (decoded - video).square().mean(dim=(1, 2, 3, 4))
        of.psnr_db.extend((10.0 * (4.0 / squared).log10()).tolist())
        of.sharpness.extend((squared_steps(decoded) / squared_steps(video)).tolist())
    return of


def squared_steps(video: Tensor) -> Tensor:  # [B, 3, T, H, W] -> [B]
    """Mean squares of the steps from a pixel to its neighbours."""
    across, down = (video.diff(dim=dim).square().mean(dim=(1, 2, 3, 4)) for dim in (-1, -2))
    return across + down


@torch.no_grad()
def write_statistics(vae: Any, pool: ClipPool) -> None:
    """Put mean and standard deviation of every latent channel into the VAE's config: pipelines normalise with them."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for video in pool.videos(AT_ONCE, CLIPS_FOR_STATISTICS):
        latents = encode_clips(vae, video).double().transpose(0, 1).flatten(1).cpu()
        count, total, squares = count + latents.shape[1], total + latents.sum(1), squares + latents.square().sum(1)
    mean = total / count
    std = (squares / count - mean.square()).sqrt()
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def write_sheet(vae: Any, pool: ClipPool, file: Path) -> None:
    """Frames of the first clips, below each row what the VAE makes of it."""
    rows = []
    for video in pool.videos(1, SHOWN_WORLDS):
        frames = torch.linspace(0, video.shape[2] - 1, SHOWN_FRAMES).long().tolist()
        for shown in (video, decode_clips(vae, encode_clips(vae, video))):
            picture = torch.cat([shown[0, :, frame] for frame in frames], dim=-1)  # [3, H, frames · W]
            rows.append(as_bytes(picture.permute(1, 2, 0).float() / 2.0 + 0.5))
    write_image(torch.cat(rows), file)


def export_vae(vae: Any, pool: ClipPool, unseen: ClipPool, about: dict[str, Any], folder: Path) -> dict[str, float]:
    """Write the VAE in bf16, what it is worth, and a sheet of pictures. Returns the means over unseen worlds.

    All is measured on what was written, in fp32 as pipelines run it.
    """
    vae.bfloat16().float()
    if next(vae.encoder.parameters()).requires_grad:  # else models were trained with the present statistics
        write_statistics(vae, pool)
    forget_origin(vae.bfloat16()).save_pretrained(folder / "vae", max_shard_size=SHARD)
    make_weights_readable(folder)
    vae.float()
    of_worlds = worth(vae, unseen.videos(AT_ONCE))
    means = mean_worth(of_worlds)
    report = means | {f"{name}_of_worlds": values for name, values in of_worlds._asdict().items()} | about
    (folder / "vae-report.json").write_text(json.dumps(report, indent=1))
    write_sheet(vae, unseen, folder / "vae-sheet.png")
    return means


def mean_worth(of_clips: Worth) -> dict[str, float]:
    return {name: sum(values) / len(values) for name, values in of_clips._asdict().items()}
