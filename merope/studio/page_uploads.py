"""Files that a page has sent: read in the page's folder under names of ours, checked, and removed at once."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

from merope.errors import invalid
from merope.studio.given_video import MOST_VIDEO, FittedVideo, read_given
from merope.studio.street_take import DroppedPath, read_dropped
from merope.studio.studio_model import StudioModel

MOST_POSES = 4 << 20  # bytes of a pose file
MOST_BYTES = {"path": MOST_POSES, "video": MOST_VIDEO, "cameras": MOST_POSES}
"""What a page may send, and how much of it: a path to drive, a video to begin with, and its cameras."""

THING = {"path": "a pose file", "video": "a video", "cameras": "a pose file of the video's cameras"}


class PageUploads:
    """What was read is fitted to the clips of one model, and of no use for another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.turn = asyncio.Lock()  # one file at a time: together they are bounded, too
        self._read: dict[str, tuple[StudioModel, DroppedPath | FittedVideo]] = {}

    def forget(self, kind: str) -> None:
        """What was sent before: it must not stay in the place of a file that is refused."""
        self._read.pop(kind, None)

    def file_for(self, kind: str, name: str) -> Path:
        """Where to write what comes. Of its name only the ending counts, because some formats go by it."""
        ending = re.search(r"\.[A-Za-z0-9]{1,8}$", name)
        return self.folder / f"sent-{kind}{'' if ending is None else ending[0].lower()}"

    def read(self, kind: str, file: Path, model: StudioModel, is_metric: bool) -> list[str]:
        """Read a file for a model; what is odd about it, in words."""
        try:
            read = read_given(file, model) if kind == "video" else read_dropped(file, model, is_metric)
        except (ValueError, OSError) as error:
            raise ValueError(_without(file, str(error))) from None
        self._read[kind] = (model, read)
        return [_without(file, note) for note in read.notes]

    def path(self, kind: str, model: StudioModel) -> DroppedPath:
        found = self._for(kind, model)
        assert isinstance(found, DroppedPath)
        return found

    def video(self, model: StudioModel) -> FittedVideo:
        found = self._for("video", model)
        assert isinstance(found, FittedVideo)
        return found

    def _for(self, kind: str, model: StudioModel) -> DroppedPath | FittedVideo:
        fitted_to, found = self._read.get(kind, (None, None))
        if found is None:
            raise invalid(kind, "sent to the server before it is used", "none", f"drop {THING[kind]} on the page")
        if fitted_to is not model:
            raise invalid(kind, "fitted to this model", "fitted to another one", "choose the file again")
        return found


def _without(file: Path, words: str) -> str:
    """No page learns where its files lie."""
    return words.replace(str(file), "this file").replace(file.name, "this file")


async def received(parts: AsyncIterator[bytes], file: Path, most_bytes: int) -> bool:
    """Write what comes into a file; False, and no file, where it is more than so many bytes."""
    count = 0
    try:
        with file.open("wb") as target:
            async for part in parts:
                count += len(part)
                if count > most_bytes:
                    break
                target.write(part)
    except BaseException:  # the page is gone
        file.unlink(missing_ok=True)
        raise
    if count > most_bytes:
        file.unlink()
    return count <= most_bytes
