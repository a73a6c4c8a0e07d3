"""Files with random damage: never anything but a ValueError or an OSError, in little memory."""

import contextlib
import ctypes
import json
import math
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import FOLDERS, NEEDS, random_trajectory

from merope import formats

MANY_BYTES = 2**31
NASTY: list[Any] = [
    None, True, -1, 0, 10**400, 1e308, math.inf, math.nan, "", "x", "[1 2", [], [[]], [None], {}, {"": 0},
    [[math.nan] * 4] * 4, [1e200] * 3,
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """Two gigabytes more than is in use: a reader that believes a damaged count does not get what it asks for."""
    ctypes.CDLL(None).malloc_trim(0)  # what conftest.py keeps is not in use
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MANY_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def written(folder: Path, format: str) -> Path:
    """A good file of a format; of COLMAP, the folder."""
    path = folder / "path"
    formats.write(random_trajectory(format, count=3), path, format, **NEEDS[format][1])
    return path


def read_or_refuse(path: Path, format: str | None) -> None:
    """Whatever the file holds: a path, or an error that a user can act on."""
    options = {} if format is None else NEEDS[format][2]
    with contextlib.suppress(ValueError, OSError):
        formats.validate(formats.read(path, format, **options))


@pytest.mark.parametrize("format", formats.FORMATS)
@given(data=st.data())
@settings(max_examples=60)
def test_random_bytes_in_good_files(tmp_path_factory: pytest.TempPathFactory, format: str, data: st.DataObject) -> None:
    path = written(tmp_path_factory.mktemp("damaged"), format)
    file = path / data.draw(st.sampled_from(FOLDERS[format])) if format in FOLDERS else path
    whole = file.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 40)))
    file.write_bytes(whole[:start] + data.draw(st.binary(max_size=20)) + whole[end:])
    read_or_refuse(path, format)
    read_or_refuse(path, None)


@pytest.mark.parametrize("format", formats.FORMATS)
@given(content=st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "ignore")))
@settings(max_examples=40)
def test_anything_but_a_pose_file(tmp_path_factory: pytest.TempPathFactory, format: str, content: bytes) -> None:
    path = tmp_path_factory.mktemp("strange") / "path"
    for head in (b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"{", b"ARROW1\0\0", b"PAR1"):
        path.write_bytes(head + content)
        read_or_refuse(path, format)
        read_or_refuse(path, None)


@pytest.mark.parametrize("format", ["merope", "nerfstudio", "blender", "recammaster"])
@given(data=st.data())
@settings(max_examples=150)
def test_other_values_in_good_json(tmp_path_factory: pytest.TempPathFactory, format: str, data: st.DataObject) -> None:
    path = written(tmp_path_factory.mktemp("json"), format)
    document = json.loads(path.read_text())
    place = document
    while True:  # to some entry at some depth
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(st.sampled_from(NASTY))
    path.write_text(json.dumps(document))
    read_or_refuse(path, format)
    read_or_refuse(path, None)


@pytest.mark.parametrize("format", ["re10k", "kitti", "tum", "euroc", "kitti360"])
@given(data=st.data())
@settings(max_examples=100)
def test_other_words_in_good_lines(tmp_path_factory: pytest.TempPathFactory, format: str, data: st.DataObject) -> None:
    path = written(tmp_path_factory.mktemp("lines"), format)
    separator = "," if format == "euroc" else " "
    lines = [line.split(separator) for line in path.read_text().splitlines()]
    line = data.draw(st.sampled_from([line for line in lines if len(line) > 7]))
    nasty = ["", "nan", "inf", "-inf", "1e400", "1e300", "1" * 400, "0x10", "1_0", "٣", "-", "."]
    line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.sampled_from(nasty))
    path.write_text("\n".join(separator.join(words) for words in lines))
    read_or_refuse(path, format)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "9" * 10_000, "[" + "9" * 10_000])
@pytest.mark.parametrize("format", ["merope", "nerfstudio", "blender", "recammaster"])
def test_json_that_is_too_deep_or_too_long_is_refused(tmp_path: Path, format: str, text: str) -> None:
    (tmp_path / "path.json").write_text(text)
    with pytest.raises(ValueError, match=r"path.json(:1)? must be"):
        formats.read(tmp_path / "path.json", format)


def npy(header: bytes, version: int = 1) -> bytes:
    length = struct.pack("<H", len(header)) if version == 1 else struct.pack("<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header


@pytest.mark.parametrize(
    "content",
    [
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 3, 4), }\n"),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3, 4), }\n"),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999, 3, 4), }\n"),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3, 4), }\n") + bytes(8),
        npy(b"{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (0, 3, 4), }\n"),
        npy(b"(" * 9000),
        npy(b"{" * 50_000, version=2),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"\x93NUMPY\x01",
    ],
)
def test_numpy_headers_that_promise_too_much_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "path.npy").write_bytes(content)
    for format in ("panshot", None):
        with pytest.raises(ValueError, match=r"path.npy must be"):
            formats.read(tmp_path / "path.npy", format)


def test_archives_of_arrays_are_no_paths(tmp_path: Path) -> None:
    np.savez(tmp_path / "path.npz", poses=np.zeros((3, 3, 4)))
    with pytest.raises(ValueError, match=r"path.npz must be a NumPy array"):
        formats.read(tmp_path / "path.npz", "panshot")


@pytest.mark.parametrize("format", ["kitti", "tum"])
def test_coordinates_beyond_all_reason_are_refused(tmp_path: Path, format: str) -> None:
    row = {"kitti": "1 0 0 {0} 0 1 0 0 0 0 1 0", "tum": "{1} {0} 0 0 0 0 0 1"}[format]
    (tmp_path / "path.txt").write_text("\n".join(row.format(f"{k}e160", k) for k in range(3)))
    with pytest.raises(ValueError, match=r"world_from_camera must be within 1e\+12 of the origin, got 2e\+160"):
        formats.read(tmp_path / "path.txt")


@pytest.mark.parametrize("format", [*formats.FORMATS, None])
def test_large_binary_files_are_not_read(tmp_path: Path, format: str | None) -> None:
    """A terabyte of zeros, which takes no place on the disk."""
    path = tmp_path / "images.txt"
    path.touch()
    os.truncate(path, 2**40)
    (tmp_path / "cameras.txt").write_text("1 PINHOLE 640 480 500 500 320 240\n")
    options = {} if format is None else NEEDS[format][2]
    with pytest.raises(ValueError, match=r"images.txt must be"):
        formats.read(path, format, **options)
