"""Stills of a row: a few frames of a few of its clips, in a file that is small enough to be kept for ever.

Beside `results/merope-seed0.json` lie `results/stills/merope-seed0.webp`, with a line per clip and a column per frame,
and a JSON file that says which. What the camera would have seen is not kept: it follows from the seed of the world.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.bench.generated import about_videos, generated_file, kept_video, known_facts
from merope.bench.result_files import results_file
from merope.bench.run_facts import latent_stride, vae_folder
from merope.errors import invalid
from merope.formats.video import as_bytes, read_image, write_image
from merope.formats.writing import replace_text, replacing
from merope.geometry.cameras import Cameras
from merope.train.build import world_clips
from merope.train.config import TrainConfig
from merope.world.clips import WorldClips
from merope.world.commanded import FIRST_TEST_SEED, MANOEUVRES, WorldTest
from merope.world.render import render
from merope.world.revisits import EarlierDrives
from merope.world.scene import World

STILL_WORLDS = 4
STILL_FRAMES = 4
STILL_QUALITY = 80
"""Of WebP: 12 clips of 144×256 take about 200 kB."""


@dataclass(frozen=True, eq=False)
class Stills:
    """What a row left behind."""

    about: dict[str, Any]  # the JSON file
    pictures: Tensor  # uint8 [worlds, manoeuvres, frames, H, W, 3]

    @property
    def row(self) -> str:
        return str(self.about["row"])

    @property
    def frames(self) -> list[int]:
        """Which frames of a clip these are; the first is the last one that was given."""
        return list(self.about["frames"])

    @property
    def clips(self) -> WorldClips:
        """What the clips are like. Drives of another version cannot be driven again."""
        data: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in self.about["data"].items()}
        drives = data.pop("drives")
        clips = WorldClips(**data)
        if drives != clips.drives:
            fix = "make the row again, or draw it with the version of merope that made it"
            raise invalid(f"drives of {self.row}", f"of version {clips.drives}", drives, fix)
        return clips

    @property
    def test(self) -> WorldTest:
        return WorldTest(**self.about["test"])

    @property
    def earlier(self) -> EarlierDrives | None:
        """What the model was shown of each path. None: nothing."""
        shown = self.about.get("earlier")
        return None if shown is None else EarlierDrives(self.clips, **shown)


def stills_file(config: TrainConfig, results: Path) -> Path:
    """Where the stills of a row lie in a results folder."""
    return results / "stills" / results_file(config, results).with_suffix(".webp").name


def still_frames(clips: WorldClips) -> list[int]:
    """The last frame that was given, the last of all, and some between them."""
    first, last = clips.prefix_frames - 1, clips.frames - 1
    return sorted({round(first + k * (last - first) / (STILL_FRAMES - 1)) for k in range(STILL_FRAMES)})


def keep_stills(config: TrainConfig, test: WorldTest, results: Path, device: torch.device) -> Path:
    """Keep stills of what a row generated in a test; those that are there already are left alone."""
    videos, vae, clips = generated_file(config, test), vae_folder(config), world_clips(config)
    frames, worlds = still_frames(clips), test.seeds[:STILL_WORLDS]
    shown = None if config.history is None else {"count": config.history.frames, "latent_stride": latent_stride(vae)}
    about = known_facts(config) | {
        "weights": about_videos(videos).get("trained", ""),
        "test": asdict(test),
        "worlds": len(worlds),
        "frames": frames,
        "earlier": shown,
    }
    file, text = stills_file(config, results), json.dumps(about, indent=1) + "\n"
    text_file = file.with_suffix(".json")
    is_kept = file.exists() and text_file.exists() and text_file.read_text() == text
    if is_kept and about["weights"]:
        return file
    names = [f"world-{seed}-{manoeuvre}" for seed in worlds for manoeuvre in MANOEUVRES]
    lines = [torch.cat(list(kept_video(videos, name, vae, device)[frames]), dim=1) for name in names]
    text_file.unlink(missing_ok=True)  # until its pictures are there
    with replacing(file) as part:
        write_image(torch.cat(lines), part, STILL_QUALITY)
    replace_text(text_file, text)
    return file


def read_stills(file: Path) -> Stills:
    """Stills of a row, cut up again."""
    about = json.loads(file.with_suffix(".json").read_text())
    height, width = about["data"]["height"], about["data"]["width"]
    worlds, manoeuvres, frames = about["worlds"], len(MANOEUVRES), len(about["frames"])
    sheet = read_image(file, worlds * manoeuvres * height, frames * width)
    cut = sheet.reshape(worlds, manoeuvres, height, frames, width, 3).movedim(3, 2)
    return Stills(about, cut.contiguous())


def true_stills(stills: Stills, world: int) -> Tensor:  # uint8 [manoeuvres, frames, H, W, 3]
    """What the commanded camera would have seen in one of the worlds."""
    return _rendered(stills, world, lambda path, _: path[stills.frames])


def earlier_stills(stills: Stills, earlier: EarlierDrives, world: int) -> Tensor:  # uint8 [manoeuvres, R, H, W, 3]
    """What an earlier drive saw along the commanded paths of one of the worlds."""
    return _rendered(stills, world, earlier.poses)


def _rendered(stills: Stills, world: int, poses: Callable[[Tensor, int], Tensor]) -> Tensor:  # [manoeuvres, N, H, W, 3]
    """One of the worlds, cleared for all of its commanded paths, from N poses for each of them."""
    clips, seed = stills.clips, FIRST_TEST_SEED + world
    paths = stills.test.paths(clips, seed)
    cleared = World(seed).cleared(torch.stack(list(paths.values())))
    seen = [
        render(cleared, Cameras(poses(paths[manoeuvre], seed), clips.lens(seed)), clips.height, clips.width).image
        for manoeuvre in MANOEUVRES
    ]
    return as_bytes(torch.stack(seen))
