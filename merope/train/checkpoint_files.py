"""The files of a checkpoint: read without running code, and checked against the checksums saved with them.

torch writes the list of tensors (`.metadata`) and the optimiser's settings as pickles, and its own loader runs whatever
a pickle says. The readers here let only those names through that such files need.
"""

import hashlib
import io
import json
import pickle
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"
CHECKSUMS = "sha256-*.json"
"""Each rank keeps the checksums of the files that it wrote: file name -> SHA-256."""

ALLOWED = {
    *(("torch", "Size"), ("torch.serialization", "_get_layout")),
    *(("pathlib", "PosixPath"), ("pathlib", "WindowsPath")),
    *(("pathlib._local", "PosixPath"), ("pathlib._local", "WindowsPath")),  # of Python 3.13
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
            *("TensorStorageMetadata", "TensorProperties", "BytesStorageMetadata"),
        )
    ),
}
"""Modules and names in them that a `.metadata` file may use, beside torch's dtypes. None of them has an effect."""


class Damaged(ValueError):
    """A checkpoint that cannot be read as it was written."""

    def __init__(self, place: Path, reason: str, whole: Path | None = None) -> None:
        """`whole`: another checkpoint of the run, which can be read."""
        super().__init__(place, reason, whole)
        self.place, self.reason, self.whole = place, reason, whole

    def __str__(self) -> str:
        fix = "name a step-… folder that is whole" if self.whole is None else f"{self.whole} is whole, name that one"
        return f"{self.place} cannot be read: {self.reason}; {fix}"


class _NotAllowed(Exception):
    """A pickle asks for something that it has no business with."""


class _MetadataUnpickler(pickle._Unpickler):
    """The unpickler that is written in Python: only there single opcodes can be refused."""

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise _NotAllowed(f"it asks for {module}.{name}, which no checkpoint needs and which was not run")

    def load_build(self) -> None:
        """Attributes are set on new objects alone: classes, functions and members of enums belong to the process."""
        target = self.stack[-2]  # type: ignore[attr-defined]  # none of this is in the type stubs
        if isinstance(target, type) or not is_dataclass(target):
            raise _NotAllowed(f"it sets attributes of {target!r:.80}, which no checkpoint needs and which was not done")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build
    del dispatch[pickle.BYTEARRAY8[0]]  # nine bytes of it ask for any amount of memory


class SafeReader(FileSystemReader):
    """torch's reader of files, whose metadata cannot run code. Tensors torch reads with weights_only already."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """torch's planner, whose values that are no tensors cannot run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        *above, last = self.mappings[read_item.dest_index.fqn]
        table: Any = self.original_state_dict
        for key in above:
            table = table[key]
        table[last] = torch.load(value, weights_only=True)


def read_metadata(place: Path) -> Metadata:
    """The list of a checkpoint's tensors, refused if it is anything else."""
    try:
        with (place / METADATA).open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        files = {Path(info.relative_path) for info in metadata.storage_data.values()}
    except _NotAllowed as error:
        raise Damaged(place, f"{METADATA} is not safe: {error}") from None
    except Exception as error:  # a broken pickle can raise anything
        raise Damaged(place, f"{METADATA} cannot be read: {_reason(error)}") from None
    outside = [str(file) for file in files if file.name != str(file)]
    if not isinstance(metadata, Metadata) or outside:
        raise Damaged(place, f"{METADATA} does not list files of this folder: {outside or type(metadata).__name__}")
    return metadata


def write_checksums(place: Path, rank: int) -> Path:
    """Write the checksums of what a rank wrote; the first rank also wrote the files of all."""
    shared = [place / METADATA, place / "progress.json"] if rank == 0 else []
    files = [*shared, *sorted(place.glob(f"__{rank}_*"))]
    file = place / CHECKSUMS.replace("*", str(rank))
    file.write_text(json.dumps({path.name: _sha256(path) for path in files}, indent=1))
    return file


def has_checksums(place: Path) -> bool:
    return any(place.glob(CHECKSUMS))


def find_damage(place: Path, rank: int, ranks: int) -> str:  # "" if there is none
    """What is wrong with a checkpoint. Ranks share the work of the checksums; each returns what it found."""
    try:
        read_metadata(place)
        expected: dict[str, str] = {}
        for file in place.glob(CHECKSUMS):
            expected |= json.loads(file.read_text())
        if not expected:
            return ""
        present = {file.name for file in place.iterdir()} - {file.name for file in place.glob(CHECKSUMS)}
        for name in sorted(expected.keys() ^ present):
            return f"{name} is missing" if name in expected else f"{name} has no checksum"
        for name in sorted(expected)[rank::ranks]:
            if _sha256(place / name) != expected[name]:
                return f"{name} is not what was written: its checksum differs"
    except Damaged as error:
        return error.reason
    except (ValueError, TypeError, RecursionError, OSError) as error:
        return f"its checksums cannot be read: {_reason(error)}"
    return ""


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
