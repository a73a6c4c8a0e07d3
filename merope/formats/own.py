"""This library's own JSON: everything a Trajectory knows, to the last digit. The schema is in docs/formats.md."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from merope.errors import invalid
from merope.formats.files import Sample, entry, frame_list, load_json, matrix
from merope.formats.trajectory import Trajectory
from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lenses import DoubleSphere, Equirectangular, ExtendedUnified, Lens, Pinhole, UnifiedCamera
from merope.geometry.poses import check_rigid, rigid

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value", str, float)

FORMAT = "merope-trajectory"
VERSION = 1
AXES = "x right, y down, z forward"
UNITS = {True: "metre", False: "arbitrary"}
LENSES: dict[str, Callable[..., Lens]] = {
    "Pinhole": Pinhole,
    "UnifiedCamera": UnifiedCamera,
    "ExtendedUnified": ExtendedUnified,
    "DoubleSphere": DoubleSphere,
    "BrownConrady": BrownConrady,
    "KannalaBrandt": KannalaBrandt,
    "Equirectangular": Equirectangular,
}


def matches(sample: Sample) -> bool:
    return isinstance(sample.document, Mapping) and sample.document.get("format") == FORMAT


def read(path: Path) -> Trajectory:
    """A trajectory exactly as it was written."""
    document = load_json(path)
    place = str(path)
    _expect(f"{place} format", entry(place, document, "format"), FORMAT)
    _expect(f"{place} version", entry(place, document, "version"), VERSION)
    _expect(f"{place} pose", entry(place, document, "pose"), "world_from_camera")
    _expect(f"{place} axes", entry(place, document, "axes"), AXES)
    is_metric = entry(place, document, "is_metric")
    if not isinstance(is_metric, bool):
        raise invalid(f"{place} is_metric", "true or false", repr(is_metric), "say whether the unit is the metre")
    _expect(f"{place} unit", entry(place, document, "unit"), UNITS[is_metric])
    frames = frame_list(place, document)
    poses = []
    for k, frame in enumerate(frames):
        spot = f"{place} frames[{k}].world_from_camera"
        rows = entry(f"{place} frames[{k}]", frame, "world_from_camera")
        pose = torch.tensor(matrix(spot, rows, (3, 4)), dtype=torch.float64)
        poses.append(check_rigid(rigid(pose[:, :3], pose[:, 3]), spot))
    times = _column(place, frames, "time_s", float)
    names = _column(place, frames, "name", str)
    return Trajectory(
        world_from_camera=torch.stack(poses),
        is_metric=is_metric,
        convention=str(entry(place, document, "source")),
        timestamps_s=None if times is None else torch.tensor(times, dtype=torch.float64),
        lens=_lens(place, entry(place, document, "lens")),
        frame_names=None if names is None else tuple(names),
        name=str(entry(place, document, "name")),
    )


def _expect(place: str, got: object, expected: object) -> None:
    if got != expected:
        raise invalid(place, repr(expected), repr(got), "update merope, or convert the file")


def _column(place: str, frames: list[object], key: str, kind: type[Value]) -> list[Value] | None:
    """An entry that all frames have or none."""
    values = [frame[key] for frame in frames if isinstance(frame, Mapping) and key in frame]
    if not values:
        return None
    good = (str,) if kind is str else (int, float)
    bad = [value for value in values if not isinstance(value, good) or isinstance(value, bool)]
    if len(values) != len(frames) or bad:
        got = repr(bad[0]) if bad else f"{len(values)} of {len(frames)} frames with it"
        raise invalid(f"{place} frames[].{key}", f"a {kind.__name__} in every frame or in none", got, "repair the file")
    return [kind(value) for value in values]


def _lens(place: str, document: object) -> Lens | None:
    if document is None:
        return None
    model = entry(f"{place} lens", document, "model")
    if not isinstance(model, str) or model not in LENSES or not isinstance(document, Mapping):
        raise invalid(f"{place} lens.model", f"one of {', '.join(LENSES)}", repr(model), "use a lens of the library")
    values = {
        key: torch.tensor(value, dtype=torch.float64) if isinstance(value, (float, list)) else value
        for key, value in document.items()
        if key != "model"
    }
    try:
        return LENSES[str(model)](**values)
    except (TypeError, ValueError) as error:
        raise invalid(f"{place} lens", f"the parameters of a {model}", str(error), "see docs/formats.md") from None


def write(trajectory: Trajectory, path: Path) -> None:
    """One frame per line, numbers with all their digits."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": trajectory.name,
        "source": trajectory.convention,
        "pose": "world_from_camera",
        "axes": AXES,
        "is_metric": trajectory.is_metric,
        "unit": UNITS[trajectory.is_metric],
        "lens": _lens_document(trajectory.lens),
    }
    frames: list[dict[str, object]] = [{} for _ in range(trajectory.count)]
    for k, frame in enumerate(frames):
        if trajectory.frame_names is not None:
            frame["name"] = trajectory.frame_names[k]
        if trajectory.timestamps_s is not None:
            frame["time_s"] = float(trajectory.timestamps_s[k])
        frame["world_from_camera"] = trajectory.world_from_camera[k, :3].tolist()
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
    body = ",\n".join(f"  {json.dumps(frame)}" for frame in frames)
    path.write_text("{\n" + "".join(lines) + f' "frames": [\n{body}\n ]\n}}\n', encoding="utf-8")


def _lens_document(lens: Lens | None) -> dict[str, object] | None:
    """Parameters as numbers, or as lists of one number per frame."""
    if lens is None:
        return None
    kind = type(lens).__name__
    if kind not in LENSES:
        raise invalid("trajectory.lens", f"one of {', '.join(LENSES)}", kind, "use a lens of the library")
    names = [field.name for field in fields(cast("DataclassInstance", lens)) if field.init]
    values = {name: getattr(lens, name) for name in names}
    return {"model": kind} | {
        name: value.double().tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()
    }
