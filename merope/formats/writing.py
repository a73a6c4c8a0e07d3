"""How files are written: whole or not at all, also when several processes write the same one."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to; it takes the file's place at the end. An error leaves the old file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".part-{uuid.uuid4().hex[:12]}-{file.name}")  # the suffix stays: writers go by it
    try:
        yield part
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def replace_text(file: Path, text: str) -> None:
    """Write a UTF-8 text file in one step."""
    with replacing(file) as part:
        part.write_text(text, encoding="utf-8")
