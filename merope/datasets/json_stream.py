"""Read a huge JSON list one object at a time, in a few megabytes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from merope.errors import invalid

CHUNK_CHARACTERS = 1 << 20
LONGEST_OBJECT = 16 * CHUNK_CHARACTERS
BETWEEN = " \t\r\n,"


def stream_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that holds one JSON list. Raises ValueError with file and place where it is not."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(CHUNK_CHARACTERS).lstrip()
        if not text.startswith("["):
            raise ValueError(f"{path}: expected a JSON list of objects, got {text[:20]!r}; is this a table?")
        place, count = 1, 0
        while True:
            while place < len(text) and text[place] in BETWEEN:
                place += 1
            if place < len(text) and text[place] == "]":
                return
            try:
                value, place = decoder.raw_decode(text, place)
            except json.JSONDecodeError:
                more = file.read(CHUNK_CHARACTERS)
                if not more or len(text) - place > LONGEST_OBJECT:
                    problem = f"{path}: broken off or malformed after {count} objects; get the file again"
                    raise ValueError(problem) from None
                text, place = text[place:] + more, 0
                continue
            except RecursionError:
                raise _no_object(path, count, "brackets without end") from None
            if not isinstance(value, dict):
                raise _no_object(path, count, repr(value)[:40])
            count += 1
            yield value


def _no_object(path: Path, item: int, got: str) -> ValueError:
    return invalid(f"item {item} of {path}", "a JSON object", got, "get the file again")
