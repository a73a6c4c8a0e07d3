"""Stills of a row that nobody has made: every frame of every clip has a grey of its own."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from merope.bench.generated import generated_file
from merope.bench.scores import with_seed
from merope.bench.stills import keep_stills
from merope.world.commanded import MANOEUVRES, WorldTest
from tests.train.tiny_runs import tiny_config

HEIGHT, WIDTH = 48, 64


def write_grey_stills(
    folder: Path,
    row: str,
    greys: Tensor,  # [worlds, manoeuvres, 4 frames], 0 to 255
    *changes: str,
) -> Path:
    """Keep them in `results` in the folder, as the benchmark does."""
    size = (f"data.height={HEIGHT}", f"data.width={WIDTH}")
    config, test = with_seed(tiny_config(folder / row, *size, *changes), 0), WorldTest(worlds=len(greys), steps=1)
    videos = greys.to(torch.uint8)[..., None, None, None].expand(-1, -1, -1, HEIGHT, WIDTH, 3)
    clips = {
        f"world-{seed}-{manoeuvre}": video.contiguous()
        for seed, of_world in zip(test.seeds, videos, strict=True)
        for manoeuvre, video in zip(MANOEUVRES, of_world, strict=True)
    }
    config.run.out.mkdir()
    save_file(clips, generated_file(config, test))
    return keep_stills(config, test, folder / "results", torch.device("cpu"))
