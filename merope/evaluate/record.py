"""What is kept of a clip once its poses are recovered: enough for every number and picture of a report, in one file."""

import base64
import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.evaluate.discover import ClipName, Problem
from merope.geometry.poses import rigid

FORMAT = "merope-recovery-1"
THUMBNAILS = 4
THUMBNAIL_WIDTH_PX = 208
JPEG_QUALITY = 62


@dataclass(frozen=True)
class Thumbnail:
    """A small picture of one frame."""

    frame: int
    jpeg_base64: str
    width: int
    height: int


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
    problems: tuple[Problem, ...] = ()
    thumbnails: tuple[Thumbnail, ...] = ()

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


def write_record(record: Record, file: Path, fingerprint: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    document = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "method": record.method,
        "clip": asdict(record.clip),
        "is_metric": record.is_metric,
        "command_is_metric": record.command_is_metric,
        "estimator": record.estimator,
        "weights_sha256": record.weights_sha256,
        "note": record.note,
        "problems": [asdict(problem) for problem in record.problems],
        "valid": record.valid.tolist(),
        "commanded": record.commanded[:, :3].flatten(1).tolist(),
        "recovered": record.recovered[:, :3].flatten(1).tolist(),
        "thumbnails": [asdict(picture) for picture in record.thumbnails],
    }
    write_whole(file, json.dumps(document, ensure_ascii=False))


def write_whole(file: Path, text: str) -> None:
    """Write a text file by way of a neighbour that is then renamed, so that an interruption leaves the old one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)


def read_record(file: Path, fingerprint: str) -> Record | None:
    """The record of an earlier run, or None if there is none made from the same files with the same settings."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(document, Mapping) or (document.get("format"), document.get("fingerprint")) != (
        FORMAT,
        fingerprint,
    ):
        return None
    return Record(
        method=document["method"],
        clip=ClipName(**document["clip"]),
        commanded=_poses(document["commanded"]),
        recovered=_poses(document["recovered"]),
        valid=torch.tensor(document["valid"], dtype=torch.bool),
        is_metric=document["is_metric"],
        command_is_metric=document["command_is_metric"],
        estimator=document["estimator"],
        weights_sha256=document["weights_sha256"],
        note=document["note"],
        problems=tuple(Problem(**problem) for problem in document["problems"]),
        thumbnails=tuple(Thumbnail(**picture) for picture in document["thumbnails"]),
    )


def _poses(rows: list[Any]) -> Tensor:  # [T, 4, 4]
    top = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3, 4)
    return rigid(top[..., :3], top[..., 3])
