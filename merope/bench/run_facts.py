"""What the results of a row say of its training.

Videos of a row carry it, so that they can be scored on a machine that has neither the weights nor the log.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from merope.adapters.families.wan_clips import wan_vae_strides
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.train.provenance import provenance


def facts_of_run(config: TrainConfig, rows_at_once: int | None) -> dict[str, Any]:
    """Of a run whose folder is here. `rows_at_once`: as many were trained side by side; None: it is not known."""
    about = {"rows_at_once": rows_at_once, "data": about_clips(config), "vae": vae_digest(config)}
    return provenance(config) | about


def about_clips(config: TrainConfig) -> dict[str, Any]:
    """The clips of a row, as its results file has them."""
    return json.loads(json.dumps(asdict(world_clips(config))))


def vae_folder(config: TrainConfig) -> Path | None:
    """What the latents of a row are decoded with: what it wrote, or what it began with. None: it has frames."""
    start = [] if config.model.pretrained is None else [Path(config.model.pretrained)]
    folders = [folder / "vae" for folder in (config.run.out / "trained", *start)]
    return next((folder for folder in folders if folder.is_dir()), None)


def latent_stride(vae: Path | None) -> int:
    """Frames of a clip per latent frame of the VAE in a folder."""
    return 1 if vae is None else wan_vae_strides(json.loads((vae / "config.json").read_text()))[0]


def vae_digest(config: TrainConfig) -> str:
    """Which VAE decodes a row's clips: the same latents are other pictures by another one. Empty for pixels."""
    folder = vae_folder(config)
    return "" if folder is None else weights_digest(folder)


def weights_digest(folder: Path) -> str:
    """SHA-256 of all weight files of a folder: it tells the weights of one training from those of any other."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
