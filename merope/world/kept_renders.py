"""Training clips in a folder, as frames or as latents: runs over the same clips make them once.

The runs may come one after the other or work at the same time. A folder in shared memory (/dev/shm) spares the disk.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from merope.formats.writing import replace_tensors
from merope.world.clips import WorldClips
from merope.world.revisits import EarlierDrives

PACKAGE = Path(__file__).parents[1]
DRAWN_BY = ("world", "geometry")
"""Parts of the package that decide what a seed looks like."""


@dataclass(frozen=True)
class KeptRenders:
    """A folder of clips, one file for those that are asked for together: 360 kB for 13 frames of 72×128 as bytes.

    encoder: what made latents of the frames, in any words that tell it from others; empty for frames.
    """

    folder: Path
    encoder: str = ""

    def clips(
        self,
        clips: WorldClips | EarlierDrives,
        seeds: Sequence[int],
        make: Callable[[], Tensor],  # -> [B, …], any device
    ) -> Tensor:  # [B, …] on the CPU if it was kept
        """The clips of some seeds, made now if they were not before. Of several processes only one makes them."""
        found = self._clips(clips, seeds, make, is_patient=True)
        assert found is not None
        return found

    def clips_unless_busy(
        self,
        clips: WorldClips | EarlierDrives,
        seeds: Sequence[int],
        make: Callable[[], Tensor],  # -> [B, …], any device
    ) -> Tensor | None:  # [B, …] on the CPU if it was kept
        """The same, but None while another process makes them: there may be others to make."""
        return self._clips(clips, seeds, make, is_patient=False)

    def _clips(
        self, clips: WorldClips | EarlierDrives, seeds: Sequence[int], make: Callable[[], Tensor], is_patient: bool
    ) -> Tensor | None:
        file = self.folder / f"{self._digest(clips, seeds)}.safetensors"
        kept = _read(file)
        if kept is not None:
            return kept
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(file.with_suffix(".lock"), blocking=is_patient):
                kept = _read(file)
                if kept is not None:
                    return kept
                made = make()
                replace_tensors(file, {"frames": made.cpu().contiguous()})
        except Timeout:
            return None
        return made

    def _digest(self, clips: WorldClips | EarlierDrives, seeds: Sequence[int]) -> str:
        parts = (_source(), clips, tuple(seeds), *filter(None, [self.encoder]))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _read(file: Path) -> Tensor | None:
    """What is kept. An incomplete file, as a crash or an interrupted copy leaves it, counts as none."""
    try:
        return load_file(file)["frames"]
    except (FileNotFoundError, SafetensorError):
        return None


@cache
def _source() -> str:
    """Digest of the code that draws: another version of it may draw the same seeds in another way."""
    files = sorted(file for part in DRAWN_BY for file in (PACKAGE / part).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
