"""Files appear whole or not at all."""

import json
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merope.formats.writing import make_weights_readable, replace_tensors, replace_text, replacing


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


def test_a_file_has_the_rights_of_any_new_one(tmp_path: Path) -> None:
    """safetensors makes its own for their owner alone, and those who share a disk could not read them."""
    (tmp_path / "plain").touch()
    replace_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)})
    save_file({"a": torch.zeros(1)}, tmp_path / "b.safetensors")
    make_weights_readable(tmp_path)
    rights = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert set(rights.values()) == {rights["plain"]}


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
