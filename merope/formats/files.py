"""How pose files are opened: numbers in lines, JSON and arrays, with errors that name the file and the line."""

import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.stores import fetched

SAMPLE_LINES = 8
HEAD_BYTES = 64
GZIP = b"\x1f\x8b"
MOST_NUMBERS = 1 << 24  # of a path in an archive: a million poses
MOST_DIGITS = 20  # of 2⁶⁴
CUT_OFF = "the file is cut off, damaged or of another format"


@dataclass(frozen=True)
class Sample:
    """What formats are told apart by: the content of a path, never its name."""

    files: frozenset[str] = frozenset()  # of a folder
    document: object = None  # of a JSON file
    array_shape: tuple[int, ...] = ()  # of a NumPy file
    archive: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # names and shapes of a .npz file
    columns: frozenset[str] = frozenset()  # of a Feather or Parquet table
    lines: tuple[str, ...] = ()  # the first lines of a text that are not blank, comments included

    @property
    def data_lines(self) -> tuple[str, ...]:
        return tuple(line for line in self.lines if not line.startswith("#"))

    def first_numbers(self, separator: str | None = None) -> list[float]:
        """The first line of data; empty where it holds anything but numbers."""
        return (as_numbers(self.data_lines[0].split(separator)) or []) if self.data_lines else []


def head_of(path: Path) -> bytes:
    """The first bytes of a file, which tell what it is."""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def read_text(path: Path) -> str:
    """The text of a file, refused if empty or not UTF-8."""
    head = head_of(path)
    if head.startswith(GZIP):
        raise invalid(str(path), "UTF-8 text", "a file that is compressed with gzip", "unpack it: gunzip FILE")
    if (zero := head.find(b"\0")) >= 0:  # a video, say: it need not be read to its end
        raise invalid(str(path), "UTF-8 text", f"binary data at byte {zero}", CUT_OFF)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid(str(path), "UTF-8 text", f"binary data at byte {error.start}", CUT_OFF) from None
    if not text.strip():
        raise invalid(str(path), "a pose file", "an empty file", "export the poses again")
    return text


def load_json(path: Path) -> object:
    """The document of a JSON file."""
    try:
        with fetched(path) as local:
            return json.loads(read_text(local), parse_int=_whole_or_float)
    except json.JSONDecodeError as error:
        raise invalid(f"{path}:{error.lineno}", "valid JSON", f"{error.msg} at column {error.colno}", CUT_OFF) from None
    except RecursionError:
        raise invalid(str(path), "JSON", "brackets nested too deeply", CUT_OFF) from None


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:  # place, object
    """The objects of a JSON-lines file. Blank lines do not count."""
    with fetched(path) as local:
        for number, line in enumerate(_lines(path, local), start=1):
            if line.strip():
                place = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise invalid(place, "a JSON object", f"{line[:60]!r} ({error})", CUT_OFF) from None
                if not isinstance(row, dict):
                    raise invalid(place, "a JSON object", line.strip()[:60], CUT_OFF)
                yield place, row


def _lines(path: Path, local: Path) -> Iterator[str]:
    """The lines of a file `local`, which the user knows as `path`."""
    try:
        with local.open(encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise invalid(str(path), "UTF-8 text", f"binary data ({error.reason})", CUT_OFF) from None


def _whole_or_float(digits: str) -> int | float:
    """Numbers with more digits than any count, size or time has are floats, which may be inf."""
    return int(digits) if len(digits) <= MOST_DIGITS else float(digits)


def load_array(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """The array of a NumPy file. It is mapped, so that a header which promises more than the file has costs nothing."""
    try:
        return np.array(np.lib.format.open_memmap(path, mode="r"))
    except OSError:
        raise
    except Exception as error:  # headers are Python literals: what damaged ones raise is not documented
        raise invalid(str(path), "a NumPy array of numbers", f"{type(error).__name__}: {error}", CUT_OFF) from None


def archive_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The arrays of a .npz file by their headers; the numbers are not read."""
    with _members(path) as members:
        return {name: _read_header(stream)[0] for name, stream in members}


def load_archived(path: Path, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """One array of floats of a .npz file, refused if it is larger than any path."""
    with _members(path, name) as members:
        (_, stream), *_ = members
        shape, has_columns_first, dtype = _read_header(stream)
        count = math.prod(shape)
        if dtype.kind != "f" or not count <= MOST_NUMBERS:
            raise invalid(f"{path} {name}", f"at most {MOST_NUMBERS:,} floats", f"{dtype} {list(shape)}", CUT_OFF)
        content = stream.read(count * dtype.itemsize)
        if len(content) < count * dtype.itemsize:
            raise invalid(f"{path} {name}", f"{count} numbers", f"{len(content) // dtype.itemsize}", CUT_OFF)
        return np.frombuffer(content, dtype).reshape(shape, order="F" if has_columns_first else "C")


@contextmanager
def _members(path: Path, name: str | None = None) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    """Arrays of an archive as streams, or the one of a name. Whatever a damaged archive sets off is a ValueError."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [one for one in archive.namelist() if one.endswith(".npy") and name in (None, one[:-4])]
            yield ((one[:-4], archive.open(one)) for one in names)
    except OSError:
        raise
    except Exception as error:  # zip, zlib and NumPy have errors of their own
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise invalid(str(path), "an archive of NumPy arrays", f"{type(error).__name__}: {error}", CUT_OFF) from None


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Shape, whether columns come first, and type of the array that a stream begins with."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def data_lines(path: Path) -> Iterator[tuple[str, str]]:  # place, text
    """The lines of a text that are neither blank nor comments."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield f"{path}:{number}", line.strip()


def data_words(path: Path, separator: str | None = None) -> list[tuple[str, list[str]]]:  # place, words
    """The same lines, each cut into words."""
    return [(place, text.split(separator)) for place, text in data_lines(path)]


def as_numbers(texts: Sequence[str]) -> list[float] | None:
    """The numbers that texts spell, None if one of them is no number."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def numbers(place: str, texts: Sequence[str], layout: str) -> list[float]:
    """The numbers of a line, which `layout` names one by one."""
    values = as_numbers(texts)
    expected = f"{len(layout.split())} numbers ({layout})"
    if values is None:
        word = next(text for text in texts if as_numbers([text]) is None)
        raise invalid(place, expected, repr(word), CUT_OFF)
    if len(values) != len(layout.split()):
        raise invalid(place, expected, f"{len(values)} of them", CUT_OFF)
    return values


def number_table(
    path: Path,
    lines: Sequence[tuple[str, Sequence[str]]],  # place, words
    layout: str,
) -> tuple[list[str], Tensor]:  # places, [T, columns] float64
    """The numbers of all lines of a file, of which there must be one at least."""
    require_rows(path, lines, layout)
    rows = [numbers(place, words, layout) for place, words in lines]
    return [place for place, _ in lines], torch.tensor(rows, dtype=torch.float64)


def require_rows(path: Path, rows: Sequence[object], layout: str) -> None:
    """Refuse a file without a single line of data."""
    if not rows:
        raise invalid(str(path), f"lines of {layout}", "no line of data", CUT_OFF)


def entry(place: str, document: object, key: str) -> object:
    """document[key] of a JSON object, or an error that says where and what is missing."""
    if not isinstance(document, Mapping):
        raise invalid(place, f"a JSON object with {key!r}", type(document).__name__, CUT_OFF)
    if key not in document:
        raise invalid(place, f"a JSON object with {key!r}", f"only {sorted(document)[:12]}", CUT_OFF)
    return document[key]


def frame_list(place: str, document: object) -> list[object]:
    """The non-empty list under "frames"."""
    frames = entry(place, document, "frames")
    if not isinstance(frames, list) or not frames:
        raise invalid(f"{place} frames", "a list with at least one frame", repr(frames)[:40], CUT_OFF)
    return frames


def matrix(place: str, rows: object, shape: tuple[int, int]) -> list[list[float]]:
    """A matrix of numbers of a JSON document."""
    try:
        array = np.array(rows, dtype=np.float64)
    except (OverflowError, TypeError, ValueError):
        array = np.zeros(0)
    if array.shape != shape:
        got = list(array.shape) if array.size else repr(rows)[:60]
        raise invalid(place, f"a {shape[0]} × {shape[1]} matrix of numbers", got, CUT_OFF)
    return array.tolist()


def natural_order(names: Sequence[str]) -> list[int]:
    """Indices that sort names as people do: frame_9 before frame_10."""
    keys = [
        [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", n)] for n in names
    ]
    return sorted(range(len(names)), key=keys.__getitem__)


def shown(values: Sequence[float], separator: str = " ") -> str:
    """Numbers with all their digits: what is read back is what was written."""
    return separator.join(repr(float(value)) for value in values)
