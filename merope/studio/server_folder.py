"""The folder for all files of one server. What a server that was killed has left, the next one removes."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX, LOCK = "merope-studio-", ".lock"
NEW_S = 10.0  # a folder that is younger may be about to be locked


class ServerFolder:
    """`pages` is for the pages' folders. The lock beside it is held as long as the server lives, however it ends."""

    def __init__(self) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = FileLock(self.path / LOCK)
        self._lock.acquire(timeout=0)
        self.pages = self.path / "pages"
        self.pages.mkdir()

    def remove(self) -> None:
        shutil.rmtree(self.pages, ignore_errors=True)
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned(root: Path) -> None:
    """Folders of this user's servers that live no more."""
    for folder in root.glob(f"{PREFIX}*"):
        try:
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # another server was faster
            continue


def _is_abandoned(folder: Path) -> bool:
    file, found = folder / LOCK, folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or not file.is_file():
        return False
    if time.time() - found.st_mtime < NEW_S:
        return False
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    lock.release()
    return True
