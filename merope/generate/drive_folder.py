"""The folder of a drive: a video that grows, the state of its stream, the path, and a report.

A block is finished when the stream's state is written, in one step. Its frames are written before: what the video and
the report have beyond the state is dropped by `settle`. So a drive loses one block at most, however its process ended.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from torch import Tensor

from merope import formats
from merope.errors import invalid
from merope.formats.growing_video import append_frames, fragment_ends
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text
from merope.generate.camera_path import first_frames
from merope.generate.stream_file import FILE as STATE
from merope.generate.stream_file import saved_blocks

if TYPE_CHECKING:
    from merope.generate.stream import CameraStream

VIDEO, CAMERAS, PATH, REPORT = "video.mp4", "video.cameras.json", "path.json", "report.json"
LOCK = ".drive.lock"
PUT_BACK = "put it back as the drive left it, or begin another drive"


class DriveFolder:
    """The files of one drive."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.video = folder, folder / VIDEO
        self.report: dict[str, Any] = {}

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """For this process alone; another one is refused until this one ends, however it does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self.folder / LOCK, blocking=False).acquire()
        except Timeout:
            fix = "wait for it, stop it, or choose another folder"
            raise invalid("--out", "a folder that no other drive uses", f"{self.folder}, in use", fix) from None
        with lock:
            yield

    def check_new(self) -> None:
        """Refuse a folder where a drive, or anything of these names, would be overwritten."""
        there = [name for name in (STATE, VIDEO, CAMERAS, PATH, REPORT) if (self.folder / name).exists()]
        if there:
            fix = "add --resume to go on with that drive" if STATE in there else "delete what is in it"
            raise invalid("--out", "a new folder", f"{self.folder} with {there[0]}", f"{fix}, or choose another folder")

    def begin(
        self,
        stream: "CameraStream",
        path: Trajectory,
        prefix: Tensor | None,  # uint8 [T, H, W, 3]
        fps: float,
        command: Mapping[str, object],
    ) -> None:
        """All files of a drive of no block."""
        count = 0 if prefix is None else len(prefix)
        self.report = {"command": dict(command), "fps": fps, "prefix_frames": count, "path_frames": path.count}
        self.report["blocks"] = []
        formats.write(path, self.folder / PATH)
        self._write_report()
        if prefix is not None:
            append_frames(self.video, prefix, 0, fps)
        stream.save(self.folder)

    def path(self) -> Trajectory:
        """All cameras. A new drive reads them too: a file's poses are made orthonormal once more, in the last bit."""
        return formats.read(self.folder / PATH)

    def add(self, stream: "CameraStream", frames: Tensor, seconds: float) -> None:  # uint8 [T, H, W, 3]
        """A block that the stream has driven, and what it took."""
        append_frames(self.video, frames, self.frames, self.report["fps"])
        self.report["blocks"].append({"frames": len(frames), "seconds": round(seconds, 4)})
        self._write_report()
        stream.save(self.folder)

    @property
    def frames(self) -> int:
        """Of the video, as the report has them."""
        return int(self.report["prefix_frames"] + sum(block["frames"] for block in self.report["blocks"]))

    def read(self) -> int:
        """The report up to the last block whose state is on disk, and how many bytes of the video belong to it.

        Nothing is changed. Files that are missing, damaged or not of one drive are refused.
        """
        for name in (STATE, REPORT):
            if not (self.folder / name).exists():
                got = f"{self.folder} without {name}"
                raise invalid(
                    "--resume", "used with the folder of a drive", got, "run the command without it, in a new folder"
                )
        blocks = saved_blocks(self.folder)
        self.report = read_report(self.folder)
        listed = len(self.report["blocks"])
        if listed < blocks:
            raise invalid(str(self.folder / REPORT), f"the report of at least {blocks} blocks", listed, PUT_BACK)
        del self.report["blocks"][blocks:]
        wanted = blocks + (self.report["prefix_frames"] > 0)
        ends = fragment_ends(self.video) if self.video.exists() else []
        if len(ends) < wanted:
            raise invalid(str(self.video), f"the drive's video of {wanted} parts", f"{len(ends)}", PUT_BACK)
        return ends[wanted - 1] if wanted else 0

    def settle(self) -> None:
        """Bring video and report to the last block whose state is on disk. A folder without a drive is refused."""
        size = self.read()
        if size:
            os.truncate(self.video, size)
        else:
            self.video.unlink(missing_ok=True)

    def close(self, path: Trajectory, wall_s: Mapping[str, float]) -> None:
        """Leave video, cameras and report as they belong together. Seconds are added to those of earlier runs."""
        self.settle()
        before = self.report.get("wall_s", {})
        self.report["wall_s"] = before | {name: round(before.get(name, 0) + s, 3) for name, s in wall_s.items()}
        self._write_report()
        if self.frames:
            formats.write(first_frames(path, self.frames), self.folder / CAMERAS)

    def _write_report(self) -> None:
        replace_text(self.folder / REPORT, json.dumps(self.report, indent=1, default=str) + "\n")


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a drive: what it was told, and frames that can be counted."""
    file = folder / REPORT
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        counts = [report["prefix_frames"] + 1, *(block["frames"] for block in report["blocks"])]
        is_one = isinstance(report["command"], dict) and isinstance(report["blocks"], list)
        problem = f"frames {counts[:9]}" if is_one else "no command, or no list of blocks"
        is_one &= all(type(count) is int and count > 0 for count in counts)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        is_one, problem = False, f"{type(error).__name__}: {error}"
    if not is_one:
        raise invalid(str(file), "the report of a drive, with its command, prefix_frames and blocks", problem, PUT_BACK)
    wall_s = report.get("wall_s", {})
    if not isinstance(wall_s, dict) or not all(_is_time(value) for value in wall_s.values()):
        raise invalid(f"wall_s in {file}", "seconds by name", repr(wall_s)[:80], PUT_BACK)
    return dict(report)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
