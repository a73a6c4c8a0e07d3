"""Rendered training clips on disk: runs over the same clips, at the same time or later, render them once."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from merope.formats.writing import replace_tensors
from merope.world.clips import WorldClips

PACKAGE = Path(__file__).parents[1]
DRAWN_BY = ("world", "geometry")
"""Parts of the package that decide what a seed looks like."""


@dataclass(frozen=True)
class KeptRenders:
    """A folder of clips, one file for those that are asked for together: 360 kB for a clip of 13 × 72×128."""

    folder: Path

    def frames(
        self,
        clips: WorldClips,
        seeds: Sequence[int],
        render: Callable[[], Tensor],  # -> uint8 [B, T, H, W, 3], any device
    ) -> Tensor:  # uint8 [B, T, H, W, 3]
        """The clips of some seeds, rendered now if they were not before. Of several processes only one renders."""
        file = self.folder / f"{_digest(clips, seeds)}.safetensors"
        kept = _read(file)
        if kept is not None:
            return kept
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            kept = _read(file)
            if kept is not None:
                return kept
            frames = render()
            replace_tensors(file, {"frames": frames.cpu()})
        return frames


def _read(file: Path) -> Tensor | None:
    """What is kept. An incomplete file, as a crash or an interrupted copy leaves it, counts as none."""
    try:
        return load_file(file)["frames"]
    except (FileNotFoundError, SafetensorError):
        return None


def _digest(clips: WorldClips, seeds: Sequence[int]) -> str:
    return hashlib.sha256(repr((_source(), clips, tuple(seeds))).encode()).hexdigest()[:32]


@cache
def _source() -> str:
    """Digest of the code that draws: another version of it may draw the same seeds in another way."""
    files = sorted(file for part in DRAWN_BY for file in (PACKAGE / part).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
