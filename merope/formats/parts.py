"""Work on many clips in several parts, on any machines that see one folder: who takes what, and what was lost.

A part does its own clips and leaves their files. The same command without a part joins them: it takes what is there,
makes what is missing, and writes the files that speak of all clips. So its result is that of one run, whatever became
of the parts. How many cores one machine gives to the work is said here too.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from merope.errors import invalid
from merope.formats.stores import names_in, remove_folder
from merope.formats.writing import replace_text

FOLDER = ".parts"
"""In the folder of a command: what parts leave for the run that joins them, which removes it."""

FINISHED = re.compile(r"(\d+)-of-(\d+)")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """Part `number` (from 1) of `count`."""

    number: int
    count: int

    @classmethod
    def of(cls, text: str) -> Self:
        """The part that is written as 2/3."""
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise invalid("part", "I/N with I from 1 to N", repr(text), "write it as 2/3")
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def own(self, items: Sequence[Item]) -> list[Item]:
        """Every `count`-th item: neighbours take alike, so they go to different parts."""
        return list(items[self.number - 1 :: self.count])


def own_or_all(items: Sequence[Item], part: Part | None) -> list[Item]:
    """Of a part its own items; without a part all."""
    return list(items) if part is None else part.own(items)


def usable_cores() -> int:
    """Cores that this process may use: a scheduler or a container may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def part_folder(folder: Path) -> Path:
    """Where parts leave what the joining run needs."""
    return folder / FOLDER


def note_finished(folder: Path, part: Part) -> None:
    """Note that a part is done."""
    replace_text(part_folder(folder) / f"{part.number}-of-{part.count}", "")


def say_lost_parts(folder: Path) -> None:
    """Name the parts that did not finish, where others did: what they left out is made by this run."""
    found = [FINISHED.fullmatch(name) for name in names_in(part_folder(folder))]
    notes = [(int(note[1]), int(note[2])) for note in found if note is not None]
    for count in sorted({count for _, count in notes}):
        done = {number for number, of in notes if of == count}
        lost = [f"{number}/{count}" for number in range(1, count + 1) if number not in done]
        if lost:
            text = f"part {', '.join(lost)} did not finish in {folder}: what is missing of it is made now"
            print(f"merope: {text}", file=sys.stderr)


def forget_parts(folder: Path) -> None:
    """Remove what parts left, when all is joined."""
    remove_folder(part_folder(folder))
