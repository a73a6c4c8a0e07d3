"""Latents and text on disk, so that the VAE and the text encoder run once per clip.

    cache.json                   what was cached: model, data, sizes
    clips.jsonl                  one row per clip: id, file, caption, and what the clip was made of
    latents/<id>.safetensors     "latents" [C, T, H, W]; beside it <id>.json with the poses and the lens
    text/<id>.safetensors        "text" [l, D] without its padding and "length" L with it, one file per caption; the
                                 empty prompt is one of them

Latents and text are kept in bfloat16. A model that computes in bfloat16 rounds them to it anyway: what it sees of the
clean prefix and of the text is the same to the bit. Only the target of the loss is rounded besides, by at most 2⁻⁹ of
each number, far below the noise that it is made of.

Files are written beside their place and renamed, so an interrupted run goes on where it stopped.
"""

import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from merope.curation.curate import check_unique
from merope.datasets.clip import Clip
from merope.datasets.data_kind import FileData
from merope.datasets.loader import MOST_STAND_INS, ClipSource
from merope.errors import invalid
from merope.formats import read, write
from merope.formats.trajectory import Trajectory
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
    """B cached clips, as many rows of text as the text encoder gave."""

    names: tuple[str, ...]
    latents: Tensor  # [B, C, T, H, W]
    text: Tensor  # [B, L, D]
    cameras: Cameras  # [B, RGB frames]


def write_cache(
    folder: Path,
    source: ClipSource[Clip],
    encode_frames: Callable[[Tensor], Tensor],  # uint8 [1, T, H, W, 3] -> [1, C, T, H, W]
    encode_text: Callable[[str], Tensor],  # -> [L, D]
    about: dict[str, Any],  # what decides the content; a cache of something else is not added to
    workers: int = 1,  # threads that read clips while others are encoded
) -> dict[str, str]:  # name -> why it was skipped
    """Encode every clip of a source that is not there yet, or is there as something else.

    Clips that cannot be read are named and left out.
    """
    names = [source.name(index) for index in range(len(source))]
    check_unique("names of clips", names)  # a file is named after its clip
    _begin(folder, about)
    _text_file(folder, "", encode_text)
    recipes = [source.made_of(index) for index in range(len(names))]
    missing = [index for index, name in enumerate(names) if not _is_there(folder, name, recipes[index])]
    started_s, skipped = time.perf_counter(), {}
    for done, (index, clip) in enumerate(_read_ahead(source, missing, workers), start=1):
        if isinstance(clip, Clip):
            _write_clip(folder, names[index], clip, encode_frames, encode_text, recipes[index])
        else:
            skipped[names[index]] = str(clip)
            print(f"skipped clip {names[index]}: {clip}", file=sys.stderr)
        _show(done, len(missing), started_s)
    rows = [_row_file(folder, name).read_text() for name in names if name not in skipped]
    _replace(folder / "clips.jsonl", lambda part: part.write_text("".join(f"{row}\n" for row in rows)))
    return skipped


@dataclass(frozen=True)
class CachedSource(ClipSource[CachedClip]):
    """A cache as a table of clips."""

    folder: Path
    rows: Sequence[dict[str, Any]]

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

    def first_readable(self) -> CachedClip:
        """The first clip that can be read, of a few: training does without those that cannot."""
        for index in range(min(len(self), MOST_STAND_INS)):
            try:
                return self.clip(index)
            except Exception as error:  # whatever a broken file sets off
                reason = f"{self.name(index)}: {error}"
        raise invalid(f"clips of {self.folder}", "such that can be read", reason, "cache them again")

    def text(self, caption: str) -> Tensor:  # [L, D]
        """The embedding of a caption that occurs in the cache, or of the empty prompt; padded with zeros as Wan does.

        The padding matters: Wan's cross-attention has no mask, so every row takes its share.
        """
        stored = load_file(self.folder / "text" / f"{_key(caption)}.safetensors")
        text = stored["text"]
        return torch.nn.functional.pad(text, (0, 0, 0, int(stored["length"]) - len(text)))


@dataclass(frozen=True)
class CachedData(FileData):
    """A folder of `merope data cache`: latents and text are read instead of computed."""

    kind: Literal["cache"]
    root: Path
    validation_root: Path | None = None

    def training_clips(self) -> CachedSource:
        return CachedSource.open(self.root)

    def validation_clips(self) -> CachedSource | None:
        return None if self.validation_root is None else CachedSource.open(self.validation_root)


def collate_cached(clips: Sequence[CachedClip], clusters: Sequence[int]) -> CachedBatch:
    """Cached clips of one shape as a batch."""
    shapes = {tuple(clip.latents.shape) for clip in clips}
    if len(shapes) != 1:
        raise invalid("latents of a batch", "of one shape", sorted(shapes), "cache clips of one size and length")
    lenses = [clip.trajectory.lens for clip in clips if clip.trajectory.lens is not None]
    return CachedBatch(
        names=tuple(clip.name for clip in clips),
        latents=torch.stack([clip.latents for clip in clips]).float(),
        text=torch.stack([clip.text for clip in clips]).float(),
        cameras=Cameras(torch.stack([clip.trajectory.world_from_camera for clip in clips]), stacked(lenses)),
    )


def _begin(folder: Path, about: dict[str, Any]) -> None:
    for name in ("latents", "text"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    file = folder / "cache.json"
    if file.exists() and json.loads(file.read_text()) != about:
        raise invalid(str(folder), f"a cache of {json.loads(file.read_text())}", about, "use another folder")
    _replace(file, lambda part: part.write_text(json.dumps(about, indent=1)))


def _read_ahead(
    source: ClipSource[Clip], indices: Sequence[int], workers: int
) -> Iterator[tuple[int, Clip | Exception]]:
    """Clips in order, read by threads ahead of their use; one that cannot be read comes as its error."""

    def read_clip(index: int) -> Clip | Exception:
        try:
            clip = source.clip(index)
            if clip.frames is None:
                return invalid(f"frames of {clip.name}", "decoded", None, "use a source that reads images")
            return clip
        except Exception as error:  # whatever a broken file sets off
            return error

    waiting: deque[tuple[int, Future[Clip | Exception]]] = deque()
    with ThreadPoolExecutor(max(workers, 1)) as threads:
        for index in indices:
            waiting.append((index, threads.submit(read_clip, index)))
            if len(waiting) > workers:
                first, clip = waiting.popleft()
                yield first, clip.result()
        for last, clip in waiting:
            yield last, clip.result()


def _write_clip(
    folder: Path,
    name: str,
    clip: Clip,
    encode_frames: Callable[[Tensor], Tensor],
    encode_text: Callable[[str], Tensor],
    recipe: Any,
) -> None:
    """The files of a clip. Its row is written last: where there is one, the clip is complete."""
    assert clip.frames is not None
    _row_file(folder, name).unlink(missing_ok=True)  # of another clip of this name
    latents = encode_frames(clip.frames[None])[0].to(torch.bfloat16).contiguous().cpu()
    place = folder / "latents" / _key(name)
    _replace(place.with_suffix(".safetensors"), lambda part: save_file({"latents": latents}, part))
    path = Trajectory(clip.world_from_camera, clip.is_metric, "merope", clip.timestamps_s, clip.lens, name=name)
    _replace(place.with_suffix(".json"), lambda part: write(path, part))
    _text_file(folder, clip.caption, encode_text)
    row = {"id": name, "file": _key(name), "caption": clip.caption, "made_of": recipe}
    _replace(_row_file(folder, name), lambda part: part.write_text(json.dumps(row)))


def _is_there(folder: Path, name: str, recipe: Any) -> bool:
    """Whether a clip is cached as it is now; rows of older versions do not say what they were made of."""
    file = _row_file(folder, name)
    return file.exists() and json.loads(file.read_text()).get("made_of", recipe) == recipe


def _text_file(folder: Path, caption: str, encode_text: Callable[[str], Tensor]) -> None:
    file = folder / "text" / f"{_key(caption)}.safetensors"
    if not file.exists():
        padded = encode_text(caption)
        text = without_padding(padded).to(torch.bfloat16).contiguous().cpu()
        _replace(file, lambda part: save_file({"text": text, "length": torch.tensor(len(padded))}, part))


def without_padding(text: Tensor) -> Tensor:  # [L, D] -> [l, D]
    """Wan pads text with zero vectors; at least one row stays."""
    used = text.abs().amax(dim=-1).nonzero()
    return text[: int(used.max()) + 1 if len(used) else 1]


def _show(done: int, total: int, started_s: float) -> None:
    """One line that is rewritten on a terminal, one in a hundred clips in a file."""
    is_terminal = sys.stderr.isatty()
    if is_terminal or done % 100 == 0 or done == total:
        left_min = (time.perf_counter() - started_s) / done * (total - done) / 60
        end = "\r" if is_terminal and done < total else "\n"
        print(f"cached {done} of {total} clips, {left_min:.0f} min left", end=end, file=sys.stderr, flush=True)


def _row_file(folder: Path, name: str) -> Path:
    return folder / "latents" / f"{_key(name)}.row.json"


def _key(name: str) -> str:
    """A file name for any name."""
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _replace(file: Path, make: Callable[[Path], object]) -> None:
    part = file.with_name(f"part-{os.getpid()}-{file.name}")
    make(part)
    os.replace(part, file)
