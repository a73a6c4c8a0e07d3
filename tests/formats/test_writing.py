"""Files appear whole or not at all."""

import json
from multiprocessing import get_context
from pathlib import Path

import pytest

from merope.formats.writing import replace_text, replacing


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "new" / "result.json"
    replace_text(file, "old")
    with pytest.raises(OSError, match="disk is full"):
        write_half_of(file)
    assert file.read_text() == "old"
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def write_half_of(file: Path) -> None:
    with replacing(file) as part:
        part.write_text("half")
        raise OSError("disk is full")


def test_writers_that_go_by_the_suffix_see_it(tmp_path: Path) -> None:
    with replacing(tmp_path / "picture.png") as part:
        assert part.suffix == ".png"
        assert part.parent == tmp_path
        part.write_bytes(b"")


def test_processes_that_write_the_same_file_leave_a_whole_one(tmp_path: Path) -> None:
    file = tmp_path / "floor.json"
    with get_context("spawn").Pool(2) as pool:
        assert sum(pool.map(failed_writes, [file, file], chunksize=1)) == 0
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def failed_writes(file: Path) -> int:
    failed = 0
    for _ in range(300):
        try:
            replace_text(file, json.dumps("x" * 200_000))
            json.loads(file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            failed += 1
    return failed
