"""Files in object stores: a path that begins with a scheme, such as s3://bucket/clips, is read and written by fsspec.

Such a path is an ordinary `Path`, which writes it as s3:/bucket/clips; folders and names are joined to it as to any
other. Files are fetched when they are read and put when they are whole. Stores need their own package, s3fs or gcsfs.
"""

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from merope.errors import invalid

SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):")
ON_DISK = ("file", "local")


def is_remote(path: Path) -> bool:
    """Whether a path names something in a store."""
    return len(path.parts) > 1 and SCHEME.fullmatch(path.parts[0]) is not None


def url_of(path: Path) -> str:
    """As fsspec and people write it."""
    scheme, rest = path.parts[0][:-1], "/".join(path.parts[1:])
    return f"{scheme}:///{rest}" if scheme in ON_DISK else f"{scheme}://{rest}"


def _opened(path: Path) -> tuple[Any, str]:  # a file system of fsspec, the place in it
    import fsspec

    try:
        return fsspec.core.url_to_fs(url_of(path))
    except (ImportError, ValueError) as error:
        raise invalid(url_of(path), "in a store that can be opened", str(error), "install its package") from None


def exists(path: Path) -> bool:
    """Whether there is such a file or folder."""
    if not is_remote(path):
        return path.exists()
    store, place = _opened(path)
    return bool(store.exists(place))


@contextmanager
def fetched(path: Path) -> Iterator[Path]:
    """A file or folder on the disk: the path itself, or a copy that goes when it has been read."""
    if not is_remote(path):
        yield path
        return
    store, place = _opened(path)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.parent.name / path.name
        copy.parent.mkdir(parents=True)
        if store.isdir(place):
            store.get(place, str(copy), recursive=True)
        elif store.exists(place):
            store.get_file(place, str(copy))
        else:
            raise FileNotFoundError(f"{url_of(path)} is missing; check the path")
        try:
            yield copy
        except ValueError as error:  # what is wrong is said of the file, not of its copy
            if str(copy) not in str(error):
                raise
            raise ValueError(str(error).replace(str(copy), url_of(path))) from None


def put(file: Path, path: Path) -> None:
    """Copy a file into a store, whole or not at all. Object stores see to that; on a disk it is renamed when whole."""
    store, place = _opened(path)
    store.makedirs(place.rpartition("/")[0], exist_ok=True)
    if path.parts[0][:-1] not in ON_DISK:
        store.put_file(str(file), place)
        return
    part = f"{place}.part-{uuid.uuid4().hex[:12]}"
    store.put_file(str(file), part)
    os.replace(part, place)


def read_text(path: Path) -> str:
    """The text of a file, wherever it is."""
    with fetched(path) as local:
        return local.read_text(encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    if not is_remote(path):
        path.unlink(missing_ok=True)
        return
    store, place = _opened(path)
    if store.exists(place):
        store.rm_file(place)


def names_in(folder: Path) -> list[str]:
    """What a folder lists; nothing where there is none."""
    if not is_remote(folder):
        return [child.name for child in folder.iterdir()] if folder.is_dir() else []
    store, place = _opened(folder)
    return [child.rstrip("/").rsplit("/", 1)[-1] for child in store.ls(place, detail=False)] if exists(folder) else []


def remove_folder(folder: Path) -> None:
    """Remove a folder and what is in it, if it is there."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    store, place = _opened(folder)
    if store.exists(place):
        store.rm(place, recursive=True)
