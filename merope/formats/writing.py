"""How files are written: whole or not at all, also when several processes write the same one."""

import errno
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from merope.errors import invalid
from merope.formats.stores import is_remote, put


def require_writable(name: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, before the work whose result goes there. Nothing is left."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise invalid(name, "in a folder that can be written to", f"{folder} ({error.strerror})", "check it") from None
    finally:
        for place in missing:
            with suppress(OSError):  # it was not made, or another process uses it
                place.rmdir()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


UMASK = _umask()
"""Read once: it can only be read by being set, which threads that write a file would notice."""


def make_readable(file: Path) -> None:
    """Give a file the rights of any new one. safetensors makes its files for their owner alone."""
    file.chmod(0o666 & ~UMASK)


def make_weights_readable(folder: Path) -> None:
    """The same for all weights below a folder, which others wrote."""
    for file in folder.rglob("*.safetensors"):
        make_readable(file)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to; it takes the file's place at the end. An error leaves the old file.

    For a file in a store the path is on the disk.
    """
    if is_remote(file):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / file.name
            put(Path(folder) / file.name, file)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".part-{uuid.uuid4().hex[:12]}-{file.name}")  # the suffix stays: writers go by it
    try:
        yield part
        if part.is_file():
            make_readable(part)
        os.replace(part, file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # these come without the name of the file
            problem = f"{file} cannot be written: {error.strerror}"
            raise OSError(f"{problem}; free some space, or write to another disk") from None
        raise
    finally:
        part.unlink(missing_ok=True)


def replace_tensors(file: Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> None:
    """Write a safetensors file, with text in its head, in one step. A full disk is an OSError, as elsewhere."""
    with replacing(file) as part:
        try:
            save_file(tensors, part, about)
        except SafetensorError as error:
            raise OSError(f"{file} cannot be written: {error}; free some space, or write to another disk") from None


def replace_text(file: Path, text: str) -> None:
    """Write a UTF-8 text file in one step."""
    with replacing(file) as part:
        part.write_text(text, encoding="utf-8")
