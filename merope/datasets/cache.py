"""Latents and text on disk, so that the VAE and the text encoder run once per clip.

    cache.json                   what was cached: model, data, sizes
    clips.jsonl                  one row per clip: id, file, caption, and what the clip was made of
    latents/<id>.safetensors     "latents" [C, T, H, W]; beside it <id>.json with the poses and the lens. Of a rig
                                 [views, C, T, H, W]; its further views are <id>.1.json, <id>.2.json, …
    text/<id>.safetensors        "text" [l, D] without its padding and "length" L with it, one file per caption; the
                                 empty prompt is one of them

Latents and text are kept in bfloat16. A model that computes in bfloat16 rounds them to it anyway: what it sees of the
clean prefix and of the text is the same to the bit. Only the target of the loss is rounded besides, by at most 2⁻⁹ of
each number, far below the noise that it is made of.

Files of tensors carry a checksum: a clip with a damaged one is not trained on, and is encoded again by the next run.
Files are written beside their place and renamed, so an interrupted run goes on where it stopped. Several processes may
write one cache at once: each encodes what it found missing at its start.
"""

import hashlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from merope.curation.curate import check_unique
from merope.datasets.checked_tensors import is_whole, read_checked, write_checked
from merope.datasets.clip import Clip
from merope.datasets.data_kind import FileData, PlacedClips
from merope.datasets.loader import MOST_STAND_INS, ClipSource
from merope.draw.progress import ProgressLine
from merope.errors import invalid
from merope.formats import read, write
from merope.formats.files import json_lines
from merope.formats.parts import Part, forget_parts, note_finished, own_or_all, say_lost_parts
from merope.formats.stores import exists, read_text, remove
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text, replacing
from merope.geometry.cameras import Cameras
from merope.geometry.lens_batches import in_row, picked, stacked
from merope.geometry.lenses import Lens


@dataclass(frozen=True, eq=False)
class CachedClip:
    """A clip as the model sees it."""

    name: str
    latents: Tensor  # [C, T, H, W], of a rig [views, C, T, H, W]
    text: Tensor  # [L, D]
    trajectory: Trajectory  # of the RGB frames, with their lens; of a rig, those of its first view
    further: tuple[Trajectory, ...] = ()  # of its other views

    @property
    def views(self) -> int:
        return 1 + len(self.further)

    def lens(self) -> Lens:
        """Of all cameras, view by view."""
        paths = (self.trajectory, *self.further)
        return in_row([path.lens for path in paths if path.lens is not None], [path.count for path in paths])


@dataclass(frozen=True, eq=False)
class CachedBatch:
    """B cached clips, as many rows of text as the text encoder gave."""

    names: tuple[str, ...]
    latents: Tensor  # [B · views, C, T, H, W]
    text: Tensor  # [B, L, D]
    cameras: Cameras  # [B, RGB frames of all views]


def write_cache(
    folder: Path,
    source: ClipSource[Clip],
    encode_frames: Callable[[Tensor], Tensor],  # uint8 [views, T, H, W, 3] -> [views, C, T, H, W]
    encode_text: Callable[[str], Tensor],  # -> [L, D]
    about: dict[str, Any],  # what decides the content; a cache of something else is not added to
    workers: int = 1,  # threads that read clips while others are encoded
    part: Part | None = None,  # of the clips; the list of clips is written by a run without one
) -> dict[str, str]:  # name -> why it was skipped
    """Encode every clip of a source that is not there yet, is damaged, or is there as something else.

    Clips that cannot be read are named and left out.
    """
    if part is None:
        say_lost_parts(folder)
    names = [source.name(index) for index in range(len(source))]
    check_unique("names of clips", names)  # a file is named after its clip
    _begin_cache(folder, about)
    _write_text(folder, "", encode_text)
    rows: list[dict[str, Any] | None] = [None] * len(names)
    indices = own_or_all(range(len(names)), part)
    checking = ProgressLine("checking", len(indices))
    for checked, index in enumerate(indices, start=1):
        rows[index] = _whole_row(folder, names[index], source.made_of(index))
        checking.show(checked)
    missing = [index for index in indices if rows[index] is None]
    progress, skipped = ProgressLine("caching", len(missing)), {}
    for done, (index, clip) in enumerate(_read_ahead(source, missing, workers), start=1):
        if isinstance(clip, Clip):
            row: dict[str, Any] = {"id": names[index], "file": _key(names[index]), "caption": clip.caption}
            row["made_of"] = source.made_of(index)
            if clip.views > 1:
                row["views"] = clip.views
            _write_clip(folder, row, clip, encode_frames, encode_text)
            rows[index] = row
        else:
            skipped[names[index]] = str(clip)
            print(f"skipped clip {names[index]}: {clip}", file=sys.stderr)
        progress.show(done)
    if part is not None:
        note_finished(folder, part)
        return skipped
    lines = [f"{json.dumps(row)}\n" for row in rows if row is not None]
    replace_text(folder / "clips.jsonl", "".join(lines))
    forget_parts(folder)
    return skipped


@dataclass(frozen=True)
class CachedSource(ClipSource[CachedClip]):
    """A cache as a table of clips."""

    folder: Path
    rows: Sequence[dict[str, Any]]

    @classmethod
    def open(cls, folder: Path) -> "CachedSource":
        file = Path(folder) / "clips.jsonl"
        if not exists(file):
            raise invalid("cache", "a folder of `merope data cache`", f"{folder} without clips.jsonl", "finish caching")
        return cls(Path(folder), [row for _, row in json_lines(file)])

    def about(self) -> dict[str, Any]:
        """What was cached."""
        return json.loads(read_text(self.folder / "cache.json"))

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return self.rows[index]["id"]

    def trajectory(self, index: int) -> Trajectory:
        return read(_path_files(self.folder, self.rows[index])[0], "merope")

    def clip(self, index: int) -> CachedClip:
        row = self.rows[index]
        return CachedClip(
            name=row["id"],
            latents=read_checked(self.folder / "latents" / f"{row['file']}.safetensors")["latents"],
            text=self.text(row["caption"]),
            trajectory=self.trajectory(index),
            further=tuple(read(file, "merope") for file in _path_files(self.folder, row)[1:]),
        )

    def first_readable(self) -> CachedClip:
        """The first clip that can be read, of a few: training does without those that cannot."""
        reason = "none"
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
        stored = read_checked(_text_file(self.folder, caption))
        text = stored["text"]
        return torch.nn.functional.pad(text, (0, 0, 0, int(stored["length"]) - len(text)))


@dataclass(frozen=True)
class CachedData(PlacedClips, FileData):
    """A folder of `merope data cache`: latents and text are read instead of computed."""

    kind: Literal["cache"]
    root: Path
    validation_root: Path | None = None
    places = ("root", "validation_root")

    @property
    def is_encoded(self) -> bool:
        return True

    def clips_of(self, place: Path) -> CachedSource:
        return CachedSource.open(place)


def collate_cached(clips: Sequence[CachedClip]) -> CachedBatch:
    """Cached clips of one shape as a batch."""
    shapes = {tuple(clip.latents.shape) for clip in clips}
    if len(shapes) != 1:
        raise invalid("latents of a batch", "of one shape", sorted(shapes), "cache clips of one size and length")
    poses = [torch.cat([path.world_from_camera for path in (clip.trajectory, *clip.further)]) for clip in clips]
    return CachedBatch(
        names=tuple(clip.name for clip in clips),
        latents=torch.stack([clip.latents for clip in clips]).flatten(0, -5).float(),
        text=torch.stack([clip.text for clip in clips]).float(),
        cameras=Cameras(torch.stack(poses), stacked([clip.lens() for clip in clips]), views=clips[0].views),
    )


def _begin_cache(folder: Path, about: dict[str, Any]) -> None:
    file = folder / "cache.json"
    if exists(file) and json.loads(read_text(file)) != about:
        raise invalid(str(folder), f"a cache of {json.loads(read_text(file))}", about, "use another folder")
    replace_text(file, json.dumps(about, indent=1))


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
    row: dict[str, Any],
    clip: Clip,
    encode_frames: Callable[[Tensor], Tensor],
    encode_text: Callable[[str], Tensor],
) -> None:
    """Write the files of a clip. Its row comes last: where there is one, the clip is complete."""
    assert clip.frames is not None
    place, row_file = folder / "latents" / row["file"], _row_file(folder, row["id"])
    remove(row_file)  # of another clip of this name
    latents = encode_frames(clip.frames.unflatten(0, (clip.views, -1))).to(torch.bfloat16).contiguous().cpu()
    write_checked(place.with_suffix(".safetensors"), {"latents": latents if clip.views > 1 else latents[0]})
    for file, cameras in zip(_path_files(folder, row), _views(clip), strict=True):
        poses, lens = cameras.world_from_camera, cameras.lens
        with replacing(file) as part:
            write(Trajectory(poses, clip.is_metric, "merope", clip.timestamps_s, lens, name=row["id"]), part)
    _write_text(folder, clip.caption, encode_text)
    replace_text(row_file, json.dumps(row))


def _views(clip: Clip) -> list[Cameras]:
    """The cameras of each view, with the clip's own lens where there is one view."""
    if clip.views == 1:
        return [clip.cameras()]
    count = len(clip.world_from_camera) // clip.views
    rows = torch.arange(len(clip.world_from_camera)).split(count)
    return [Cameras(clip.world_from_camera[row], picked(clip.lens, row)) for row in rows]


def _path_files(folder: Path, row: dict[str, Any]) -> list[Path]:
    """The pose file of every view."""
    further = [f".{view}" for view in range(1, row.get("views", 1))]
    return [folder / "latents" / f"{row['file']}{view}.json" for view in ("", *further)]


def _whole_row(folder: Path, name: str, recipe: Any) -> dict[str, Any] | None:
    """The row of a clip that is cached as it is now, with whole files; None where it must be encoded."""
    try:
        row: dict[str, Any] = json.loads(read_text(_row_file(folder, name)))
        for file in _path_files(folder, row):
            json.loads(read_text(file))
        is_same = row.get("made_of", recipe) == recipe  # rows of older versions do not say what they were made of
        files = (folder / "latents" / f"{row['file']}.safetensors", _text_file(folder, row["caption"]))
        return row if is_same and all(is_whole(file) for file in files) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whatever a damaged file sets off
        return None


def _write_text(folder: Path, caption: str, encode_text: Callable[[str], Tensor]) -> None:
    """Write the embedding of a caption, unless it is there."""
    file = _text_file(folder, caption)
    if not is_whole(file):
        padded = encode_text(caption)
        text = without_padding(padded).to(torch.bfloat16).contiguous().cpu()
        write_checked(file, {"text": text, "length": torch.tensor(len(padded))})


def without_padding(text: Tensor) -> Tensor:  # [L, D] -> [l, D]
    """Wan pads text with zero vectors; at least one row stays."""
    used = text.abs().amax(dim=-1).nonzero()
    return text[: int(used.max()) + 1 if len(used) else 1]


def _row_file(folder: Path, name: str) -> Path:
    return folder / "latents" / f"{_key(name)}.row.json"


def _text_file(folder: Path, caption: str) -> Path:
    return folder / "text" / f"{_key(caption)}.safetensors"


def _key(name: str) -> str:
    """A file name for any name."""
    return hashlib.sha256(name.encode()).hexdigest()[:24]
