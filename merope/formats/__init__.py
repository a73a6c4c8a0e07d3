"""Pose files of other projects and our own: `read`, `write`, `detect`, `validate`. docs/formats.md lists them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from merope.errors import invalid
from merope.formats import (
    argoverse2,
    colmap,
    key_strings,
    kitti360,
    lingbot,
    nerf,
    odometry,
    own,
    panshot,
    re10k,
    recammaster,
    waymo,
)
from merope.formats.checks import Finding, validate
from merope.formats.files import SAMPLE_LINES, Sample, archive_shapes, head_of, load_array, load_json, read_text
from merope.formats.predictions import DA3, MAPANYTHING, VGGT
from merope.formats.stores import fetched
from merope.formats.tables import MAGIC, column_names
from merope.formats.trajectory import Trajectory
from merope.geometry.lenses import Lens

__all__ = ["FORMATS", "Finding", "detect", "lost_in", "read", "validate", "write"]


@dataclass(frozen=True)
class Format:
    """How one format is recognised, read and written."""

    matches: Callable[[Sample], bool]
    read: Callable[..., Trajectory]
    write: Callable[..., None]
    only_metric: bool = False  # the format means metres and has no place to say otherwise
    needs_lens: bool = False  # to be written
    keeps_lens: bool = False  # where there is one
    keeps_times: bool = False


FORMATS: dict[str, Format] = {
    "merope": Format(own.matches, own.read, own.write, keeps_lens=True, keeps_times=True),
    "re10k": Format(re10k.matches, re10k.read, re10k.write, needs_lens=True, keeps_times=True),
    "kitti": Format(odometry.matches_kitti, odometry.read_kitti, odometry.write_kitti, only_metric=True),
    "tum": Format(odometry.matches_tum, odometry.read_tum, odometry.write_tum, only_metric=True, keeps_times=True),
    "euroc": Format(
        odometry.matches_euroc, odometry.read_euroc, odometry.write_euroc, only_metric=True, keeps_times=True
    ),
    "colmap": Format(colmap.matches, colmap.read, colmap.write, needs_lens=True),
    "nerfstudio": Format(nerf.matches_nerfstudio, nerf.read_nerfstudio, nerf.write_nerfstudio, needs_lens=True),
    "blender": Format(nerf.matches_blender, nerf.read_blender, nerf.write_blender, needs_lens=True),
    "recammaster": Format(recammaster.matches, recammaster.read, recammaster.write, only_metric=True),
    "panshot": Format(panshot.matches, panshot.read, panshot.write, keeps_lens=True),
    "kitti360": Format(kitti360.matches, kitti360.read, kitti360.write, only_metric=True),
    "argoverse2": Format(
        argoverse2.matches, argoverse2.read, argoverse2.write, only_metric=True, needs_lens=True, keeps_times=True
    ),
    "waymo": Format(waymo.matches, waymo.read, waymo.write, only_metric=True, needs_lens=True, keeps_times=True),
    "lingbot": Format(lingbot.matches, lingbot.read, lingbot.write, needs_lens=True),
    "vggt": Format(VGGT.matches, VGGT.read, VGGT.write, needs_lens=True),
    "da3": Format(DA3.matches, DA3.read, DA3.write, needs_lens=True),
    "mapanything": Format(MAPANYTHING.matches, MAPANYTHING.read, MAPANYTHING.write, only_metric=True, needs_lens=True),
    "keys": Format(key_strings.matches, key_strings.read, key_strings.write, only_metric=True),
}


def read(
    path: Path | str,
    format: str | None = None,
    *,
    is_metric: bool | None = None,
    lens: Lens | None = None,
    **options: object,
) -> Trajectory:
    """A camera path from a file or folder, in this library's conventions; `.convention` says what was converted.

    format: a key of FORMATS, or None to go by the content.
    is_metric: overrules what the format implies, for example for a COLMAP model that was scaled to metres.
    lens: overrules the lens of the file, or stands in for one.
    options: what the format needs besides, such as camera="cam01" for recammaster (docs/formats.md).
    """
    with fetched(Path(path)) as local:
        format = detect(local) if format is None else format
        reader = _known(format).read
        _check_options(format, reader, options)
        trajectory = reader(local, **options)
    if is_metric is not None and is_metric != trajectory.is_metric:
        unit = "metres" if is_metric else "of arbitrary scale"
        trajectory = replace(
            trajectory, is_metric=is_metric, convention=f"{trajectory.convention}; {unit}, says the caller"
        )
    return trajectory if lens is None else replace(trajectory, lens=lens)


def write(trajectory: Trajectory, path: Path | str, format: str = "merope", **options: object) -> None:
    """Write a path; what the format has no place for is lost, what it would misstate is refused."""
    if not isinstance(trajectory, Trajectory):
        raise invalid("trajectory", "a Trajectory", type(trajectory).__name__, "make one (docs/formats.md)")
    chosen = _known(format)
    _check_options(format, chosen.write, options)
    if chosen.only_metric and not trajectory.is_metric:
        fix = "scale it to metres and say so with dataclasses.replace(trajectory, is_metric=True), or write merope JSON"
        raise invalid("trajectory.is_metric", f"True for {format}, which means metres", False, fix)
    if chosen.needs_lens and trajectory.lens is None:
        fix = "read the path with lens=…, or write merope JSON, which does without"
        raise invalid("trajectory.lens", f"given for {format}", None, fix)
    times_s = trajectory.timestamps_s
    if times_s is not None and not bool(torch.isfinite(times_s).all()):
        bad = int((~torch.isfinite(times_s)).nonzero()[0])
        raise invalid("trajectory.timestamps_s", "finite", f"NaN or inf at index {bad}", "repair or drop the times")
    chosen.write(trajectory, Path(path), **options)


def lost_in(trajectory: Trajectory, format: str) -> list[str]:
    """What a path has and a format has no place for: "times", "lens", "unit" (metres)."""
    chosen = _known(format)
    has_place = {
        "times": chosen.keeps_times or trajectory.timestamps_s is None,
        "lens": chosen.needs_lens or chosen.keeps_lens or trajectory.lens is None,
        "unit": chosen.only_metric or chosen.write is own.write or not trajectory.is_metric,
    }
    return [what for what, is_kept in has_place.items() if not is_kept]


def detect(path: Path | str) -> str:
    """The format of a file or folder, by its content."""
    path = Path(path)
    sample = _taken_from(path)
    candidates = [name for name, format in FORMATS.items() if format.matches(sample)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        expected = f"of one format, but {' and '.join(candidates)} are possible"
        raise invalid(str(path), expected, _description(sample), f"pass format={candidates[0]!r} or another of them")
    fix = "convert it to one of these"
    if sample.array_shape[1:] == (4, 4):
        fix = "an array does not say what its matrices are; make a Trajectory of it (docs/formats.md)"
    raise invalid(str(path), f"one of the formats {', '.join(FORMATS)}", _description(sample), fix)


def _taken_from(path: Path) -> Sample:
    """What a file or folder holds, as far as formats are told apart by it."""
    if path.is_dir():
        return Sample(files=frozenset(child.name for child in path.iterdir()))
    head = head_of(path)
    if head.startswith(b"\x93NUMPY"):
        return Sample(array_shape=load_array(path).shape)
    if head.startswith(b"PK\x03\x04"):
        return Sample(archive=archive_shapes(path))
    if head.startswith(MAGIC):
        return Sample(columns=column_names(path))
    text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        return Sample(document=load_json(path))
    lines = (line.strip() for line in text.splitlines())
    return Sample(lines=tuple(line for line in lines if line)[:SAMPLE_LINES])


def _description(sample: Sample) -> str:
    """What was seen, in words."""
    if sample.array_shape:
        return f"an array {list(sample.array_shape)}"
    if sample.archive:
        return f"an archive of arrays {sorted(sample.archive)[:8]}"
    if isinstance(sample.document, Mapping):
        return f"a JSON object with {sorted(map(str, sample.document))[:8]}"
    if sample.document is not None:
        return f"a JSON {type(sample.document).__name__}"
    if sample.columns:
        return f"a table with the columns {sorted(sample.columns)[:8]}"
    if sample.lines:
        return f"text that begins with {sample.lines[0][:60]!r}"
    return f"a folder with {sorted(sample.files)[:8]}"


def _known(format: str) -> Format:
    if format not in FORMATS:
        raise invalid("format", f"one of {', '.join(FORMATS)}", repr(format), "leave it out to go by the content")
    return FORMATS[format]


def _check_options(format: str, function: Callable[..., object], options: Mapping[str, object]) -> None:
    known = [p.name for p in inspect.signature(function).parameters.values() if p.name not in ("path", "trajectory")]
    for name in options:
        if name not in known:
            raise invalid(f"options of {format}", f"among {known}", repr(name), "see docs/formats.md")
