"""Latents and text on disk, so that the VAE and the text encoder run once per clip.

    cache.json                   what was cached: model, size, frames, number of clips
    clips.jsonl                  one row per clip: id, files, caption and whatever the loader needs besides
    latents/<id>.safetensors     "latents" [C, T, H, W] and, beside it, <id>.json with the poses and the lens
    text/<id>.safetensors        "text" [L, D] without padding, one file per caption; the empty prompt is one of them

Files are written beside their place and renamed, so an interrupted run goes on where it stopped.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from merope.data.clip import Clip
from merope.data.formats import read, write
from merope.data.loader import ClipSource
from merope.data.trajectory import Trajectory
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import stacked


@dataclass(frozen=True, eq=False)
class CachedClip:
    """A clip as the model sees it."""

    name: str
    latents: Tensor  # [C, T, H, W]
    text: Tensor  # [L, D]
    trajectory: Trajectory  # of the RGB frames, with their lens


@dataclass(frozen=True, eq=False)
class CachedBatch:
    """B cached clips; text is padded with zeros, which is how Wan pads."""

    names: tuple[str, ...]
    latents: Tensor  # [B, C, T, H, W]
    text: Tensor  # [B, L, D]
    cameras: Cameras  # [B, RGB frames]


def write_cache(
    folder: Path,
    source: ClipSource[Clip],
    encode_frames: Callable[[Tensor], Tensor],  # uint8 [1, T, H, W, 3] -> [1, C, T, H, W]
    encode_text: Callable[[str], Tensor],  # -> [L, D]
    about: dict[str, Any],  # model and sizes; a cache of something else is not added to
) -> dict[str, str]:  # name -> why it was skipped
    """Encode every clip of a source that is not there yet. Clips that cannot be read are named, not lost."""
    _begin(folder, about)
    _text_file(folder, "", encode_text)
    rows, skipped = [], {}
    for index in range(len(source)):
        name = source.name(index)
        print(f"caching clip {index + 1} of {len(source)}", end="\r", file=sys.stderr, flush=True)
        try:
            rows.append(_cached(folder, source, index, encode_frames, encode_text))
        except (ValueError, OSError) as error:
            skipped[name] = str(error)
            print(f"skipped clip {name}: {error}", file=sys.stderr)
    print(file=sys.stderr)
    _replace(folder / "clips.jsonl", lambda part: part.write_text("".join(f"{json.dumps(row)}\n" for row in rows)))
    return skipped


@dataclass(frozen=True)
class CachedSource:
    """A cache as a table of clips."""

    folder: Path
    rows: Sequence[dict[str, str]]

    @classmethod
    def open(cls, folder: Path) -> "CachedSource":
        file = Path(folder) / "clips.jsonl"
        if not file.is_file():
            raise invalid("cache", "a folder of `merope data cache`", f"{folder} without clips.jsonl", "finish caching")
        return cls(Path(folder), [json.loads(line) for line in file.read_text().splitlines() if line.strip()])

    def about(self) -> dict[str, Any]:
        """What was cached."""
        return json.loads((self.folder / "cache.json").read_text())

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return self.rows[index]["id"]

    def clip(self, index: int) -> CachedClip:
        row = self.rows[index]
        return CachedClip(
            name=row["id"],
            latents=load_file(self.folder / "latents" / f"{row['file']}.safetensors")["latents"],
            text=self.text(row["caption"]),
            trajectory=read(self.folder / "latents" / f"{row['file']}.json", "merope"),
        )

    def text(self, caption: str) -> Tensor:  # [L, D]
        """The embedding of a caption that occurs in the cache, or of the empty prompt."""
        return load_file(self.folder / "text" / f"{_key(caption)}.safetensors")["text"]


def collate_cached(clips: Sequence[CachedClip], clusters: Sequence[int]) -> CachedBatch:
    """Cached clips of one shape as a batch."""
    shapes = {tuple(clip.latents.shape) for clip in clips}
    if len(shapes) != 1:
        raise invalid("latents of a batch", "of one shape", sorted(shapes), "cache clips of one size and length")
    lenses = [clip.trajectory.lens for clip in clips if clip.trajectory.lens is not None]
    return CachedBatch(
        names=tuple(clip.name for clip in clips),
        latents=torch.stack([clip.latents for clip in clips]).float(),
        text=torch.nn.utils.rnn.pad_sequence([clip.text.float() for clip in clips], batch_first=True),
        cameras=Cameras(torch.stack([clip.trajectory.world_from_camera for clip in clips]), stacked(lenses)),
    )


def _begin(folder: Path, about: dict[str, Any]) -> None:
    for name in ("latents", "text"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    file = folder / "cache.json"
    if file.exists() and json.loads(file.read_text()) != about:
        raise invalid(str(folder), f"a cache of {json.loads(file.read_text())}", about, "use another folder")
    _replace(file, lambda part: part.write_text(json.dumps(about, indent=1)))


def _cached(
    folder: Path,
    source: ClipSource[Clip],
    index: int,
    encode_frames: Callable[[Tensor], Tensor],
    encode_text: Callable[[str], Tensor],
) -> dict[str, str]:
    """The row of a clip, its files made unless they are there."""
    name = source.name(index)
    row_file = folder / "latents" / f"{_key(name)}.row.json"
    if row_file.exists():  # written last: the clip is complete
        row: dict[str, str] = json.loads(row_file.read_text())
        return row
    clip = source.clip(index)
    if clip.frames is None:
        raise invalid(f"frames of {name}", "decoded", None, "use a source that reads images")
    latents = encode_frames(clip.frames[None])[0].to(torch.bfloat16).contiguous().cpu()
    place = folder / "latents" / _key(name)
    _replace(place.with_suffix(".safetensors"), lambda part: save_file({"latents": latents}, part))
    path = Trajectory(clip.world_from_camera, clip.is_metric, "merope", clip.timestamps_s, clip.lens, name=name)
    _replace(place.with_suffix(".json"), lambda part: write(path, part))
    _text_file(folder, clip.caption, encode_text)
    row = {"id": name, "file": _key(name), "caption": clip.caption}
    _replace(row_file, lambda part: part.write_text(json.dumps(row)))
    return row


def _text_file(folder: Path, caption: str, encode_text: Callable[[str], Tensor]) -> None:
    file = folder / "text" / f"{_key(caption)}.safetensors"
    if not file.exists():
        text = encode_text(caption).to(torch.bfloat16).contiguous().cpu()
        _replace(file, lambda part: save_file({"text": text}, part))


def _key(name: str) -> str:
    """A file name for any name."""
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _replace(file: Path, make: Callable[[Path], object]) -> None:
    part = file.with_name(f"part-{os.getpid()}-{file.name}")
    make(part)
    os.replace(part, file)
