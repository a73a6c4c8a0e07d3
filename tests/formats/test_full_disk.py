"""A disk that takes no more: the file is named, and what stood there before stays."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from merope.formats.writing import replace_tensors, replace_text


@pytest.mark.parametrize(
    "overfill",
    [
        lambda file: replace_text(file, "x" * 100_000),
        lambda file: replace_tensors(file, {"x": torch.zeros(100_000)}),
    ],
    ids=["text", "tensors"],
)
def test_what_does_not_fit_is_named_and_leaves_the_old_file(tmp_path: Path, overfill: Callable[[Path], None]) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"{file} cannot be written: .*[Ff]ile too large.*; free some space"):
            overfill(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
