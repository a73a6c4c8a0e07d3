"""What is kept of a clip once its poses are recovered: enough for every number and picture of a report, in one file."""

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Any

import torch
from torch import Tensor

from merope.errors import invalid
from merope.evaluate.discover import ClipName, Problem, printable
from merope.formats.writing import replace_text
from merope.geometry.poses import check_rigid, rigid

FORMAT = "merope-recovery-3"
THUMBNAILS = 4
THUMBNAIL_WIDTH_PX = 208
JPEG_QUALITY = 62


@dataclass(frozen=True)
class Thumbnail:
    """A small picture of one frame. It goes into a page as it is, so nothing but a picture is accepted."""

    frame: int
    jpeg_base64: str
    width: int
    height: int

    def __post_init__(self) -> None:
        base64.b64decode(self.jpeg_base64, validate=True)
        if not all(isinstance(number, int) for number in (self.frame, self.width, self.height)):
            raise invalid("thumbnail", "three whole numbers and a picture", self, "recover the clip again")


@dataclass(frozen=True, eq=False)
class Record:
    """The commanded and the recovered path of one clip of one method; poses are camera-to-world.

    A clip that failed has no valid frame. One whose commanded path cannot be read has no frames at all.
    """

    method: str
    clip: ClipName
    commanded: Tensor  # [T, 4, 4] float64
    recovered: Tensor  # [T, 4, 4] float64, the identity where not valid
    valid: Tensor  # bool [T]
    is_metric: bool  # command and estimate are both in metres
    command_is_metric: bool
    estimator: str = ""
    weights_sha256: str | None = None
    note: str = ""  # of the estimator
    inliers: int | None = None  # as in PoseEstimate
    check: str = ""  # what a second estimator said
    doubt: str = ""  # why the poses are not trusted
    problems: tuple[Problem, ...] = ()
    thumbnails: tuple[Thumbnail, ...] = ()
    video: Path | None = None  # where it is now; not kept in the file

    @property
    def trusted(self) -> bool:
        """Whether the recovered poses can be believed: a clip that is not trusted is in no mean."""
        return not self.doubt

    @property
    def is_final(self) -> bool:
        """Whether another run would find the same; an estimator that stopped may have run out of memory."""
        return all(problem.kind != "estimator stopped" for problem in self.problems)


def failed_record(
    method: str,
    clip: ClipName,
    problem: Problem,
    commanded: Tensor | None = None,  # [T, 4, 4]
    command_is_metric: bool = False,
) -> Record:
    """The record of a clip of which nothing was recovered."""
    path = torch.zeros(0, 4, 4, dtype=torch.float64) if commanded is None else commanded
    nothing = torch.eye(4, dtype=torch.float64).repeat(len(path), 1, 1)
    valid = torch.zeros(len(path), dtype=torch.bool)
    return Record(method, clip, path, nothing, valid, False, command_is_metric, problems=(problem,))


def thumbnails(frames: Tensor) -> tuple[Thumbnail, ...]:  # uint8 [T, H, W, 3]
    """Four frames evenly spread from first to last: t ∈ {0, 16, 32, 48} of 49, as in the paper's figures."""
    from PIL import Image

    pictures = []
    for t in sorted({round(k * (len(frames) - 1) / (THUMBNAILS - 1)) for k in range(THUMBNAILS)}):
        image = Image.fromarray(frames[t].numpy())
        width = min(THUMBNAIL_WIDTH_PX, image.width)
        height = max(round(image.height * width / image.width), 1)
        buffer = io.BytesIO()
        small = image.resize((width, height), Image.Resampling.LANCZOS)
        small.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
        pictures.append(Thumbnail(t, base64.b64encode(buffer.getvalue()).decode(), width, height))
    return tuple(pictures)


PLAIN_FIELDS: dict[str, type | UnionType] = {
    **dict.fromkeys(("method", "estimator", "note", "check", "doubt"), str),
    **dict.fromkeys(("is_metric", "command_is_metric"), bool),
    "weights_sha256": str | None,
    "inliers": int | None,
}


def write_record(record: Record, file: Path, fingerprint: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    document = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        **{name: getattr(record, name) for name in PLAIN_FIELDS},
        "clip": asdict(record.clip),
        "problems": [asdict(problem) for problem in record.problems],
        "valid": record.valid.tolist(),
        "commanded": record.commanded[:, :3].flatten(1).tolist(),
        "recovered": record.recovered[:, :3].flatten(1).tolist(),
        "thumbnails": [asdict(picture) for picture in record.thumbnails],
    }
    replace_text(file, printable(json.dumps(document, ensure_ascii=False)))


def read_record(file: Path, fingerprint: str) -> Record | None:
    """The record of an earlier run, or None if there is none made from the same files with the same settings.

    A file that was edited, damaged or written by another version counts as none: its clip is done again.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if (document["format"], document["fingerprint"]) != (FORMAT, fingerprint):
            return None
        return _record_of(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _record_of(document: Mapping[str, Any]) -> Record:
    """An error that `read_record` knows for anything that `write_record` does not write."""
    for name, kind in PLAIN_FIELDS.items():
        if not isinstance(document[name], kind):
            raise invalid(name, str(kind), document[name], "recover the clip again")
    commanded, recovered = _poses(document["commanded"]), _poses(document["recovered"])
    valid = torch.tensor(document["valid"], dtype=torch.bool)
    if not len(commanded) == len(recovered) == len(valid):
        raise invalid("record", "one flag and two poses per frame", "other counts", "recover the clip again")
    return Record(
        **{name: document[name] for name in PLAIN_FIELDS},
        clip=ClipName(**document["clip"]),
        commanded=commanded,
        recovered=recovered,
        valid=valid,
        problems=tuple(Problem(**problem) for problem in document["problems"]),
        thumbnails=tuple(Thumbnail(**picture) for picture in document["thumbnails"]),
    )


def _poses(rows: list[Any]) -> Tensor:  # [T, 4, 4]
    if not isinstance(rows, list) or any(len(row) != 12 for row in rows):
        raise invalid("poses", "rows of 12 numbers", "something else", "recover the clip again")
    numbers = [[float(number) for number in row] for row in rows]
    top = torch.tensor(numbers, dtype=torch.float64).reshape(-1, 3, 4)
    poses = rigid(top[..., :3], top[..., 3])
    if len(poses):
        check_rigid(poses)  # its result differs in the last bit
    return poses
