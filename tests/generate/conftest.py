"""Files that `merope generate` reads, and frames that it writes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters.wan_models import perturb, tiny_config
from diffusers import WanPipeline
from family_folders import FOLDERS, write_folder
from generate_files import path_of
from PIL import Image
from scenes import curved_drive, straight_drive
from tiny_pipelines import HEIGHT, LENS, WIDTH, tiny_pipeline

import merope
from merope import formats
from merope.adapters.attachment import attach, detach
from merope.formats.video import write_video


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary Wan folder, a perturbed branch, two paths in two formats, and a video."""
    root = tmp_path_factory.mktemp("generate")
    pipe = tiny_pipeline(with_branch=False)
    WanPipeline(**pipe.components, expand_timesteps=True).save_pretrained(root / "model")
    perturb(attach(pipe.transformer, tiny_config()), scale=1.0)
    detach(pipe.transformer).save_pretrained(root / "branch")
    formats.write(path_of(straight_drive(60, step_m=0.4), rate_hz=10.0), root / "straight.tum", "tum")
    formats.write(path_of(curved_drive(60, step_m=0.4), lens=LENS), root / "bend.json")
    smooth = Image.effect_mandelbrot((WIDTH, HEIGHT), (-2, -1.5, 1, 1.5), 20)
    picture = torch.from_numpy(np.array(smooth.convert("RGB")))
    write_video(torch.stack([picture.roll(k, 1) for k in range(24)]), root / "street.mp4", 12.0)
    write_video(torch.stack([255 - picture.roll(k, 0) for k in range(24)]), root / "night.mp4", 12.0)
    return root


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by its name, or with "-branch" behind it that of a branch which acts."""
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        model = name.removesuffix("-branch")
        if not (root / model).is_dir():
            write_folder(root, model)
            pipe = FOLDERS[model]()
            for branch in merope.attach(pipe, tiny_config()).values():
                perturb(branch, scale=1.0)
            branches = merope.detach(pipe)
            alone = branches["transformer"] if len(branches) == 1 else branches
            alone.save_pretrained(root / f"{model}-branch")
        return root / name

    return folder


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Frames by the name of the clip, before the codec changes them."""
    frames: dict[str, torch.Tensor] = {}

    def spy(clip: torch.Tensor, path: Path, fps: float) -> None:
        frames[path.name.split(".")[0]] = clip
        write_video(clip, path, fps)

    monkeypatch.setattr("merope.generate.command.write_video", spy)
    return frames
