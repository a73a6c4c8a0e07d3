"""This library's own JSON: everything a Trajectory knows, to the last digit. The schema is in docs/formats.md.

`format`, `version`, `is_metric` and `frames` are required. All else may be left out by people who write such files by
hand; what is there must be right.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from merope.errors import invalid
from merope.formats.files import Sample, frame_list, load_json, matrix
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text
from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lenses import DoubleSphere, Equirectangular, ExtendedUnified, Lens, Pinhole, UnifiedCamera
from merope.geometry.poses import check_rigid, rigid

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value", str, float)

FORMAT = "merope-trajectory"
VERSION = 1
UNITS = {True: "metre", False: "arbitrary"}
FIXED = {"format": FORMAT, "version": VERSION, "pose": "world_from_camera", "axes": "x right, y down, z forward"}
KINDS = {bool: "true or false", str: "text", int: "a whole number"}
REQUIRED = ("format", "version", "is_metric", "frames")
KNOWN = (Pinhole, UnifiedCamera, ExtendedUnified, DoubleSphere, BrownConrady, KannalaBrandt, Equirectangular)
LENSES: dict[str, Callable[..., Lens]] = {lens.__name__: lens for lens in KNOWN}


def matches(sample: Sample) -> bool:
    return isinstance(sample.document, Mapping) and sample.document.get("format") == FORMAT


def read(path: Path) -> Trajectory:
    """A trajectory exactly as it was written."""
    document, place = load_json(path), str(path)
    if not isinstance(document, Mapping):
        expected = f"a JSON object with {', '.join(REQUIRED)}"
        raise invalid(place, expected, type(document).__name__, "see docs/formats.md")
    _check_entries(place, document)
    frames = frame_list(place, document)
    poses = []
    for k, frame in enumerate(frames):
        spot = f"{place} frames[{k}].world_from_camera"
        if not isinstance(frame, Mapping) or "world_from_camera" not in frame:
            got = f"only {sorted(frame)}" if isinstance(frame, Mapping) else repr(frame)[:40]
            fix = "give every frame its pose, three rows of four numbers (docs/formats.md)"
            raise invalid(f"{place} frames[{k}]", "an object with world_from_camera", got, fix)
        pose = torch.tensor(matrix(spot, frame["world_from_camera"], (3, 4)), dtype=torch.float64)
        poses.append(check_rigid(rigid(pose[:, :3], pose[:, 3]), spot))
    times = _column(place, frames, "time_s", float)
    names = _column(place, frames, "name", str)
    return Trajectory(
        world_from_camera=torch.stack(poses),
        is_metric=document["is_metric"],
        convention=document.get("source", "merope: camera-to-world, OpenCV axes"),
        timestamps_s=None if times is None else torch.tensor(times, dtype=torch.float64),
        lens=read_lens(place, document.get("lens")),
        frame_names=None if names is None else tuple(names),
        name=document.get("name", ""),
        time_origin_ns=document.get("time_origin_ns", 0),
    )


def _check_entries(place: str, document: Mapping[str, Any]) -> None:
    """Refuse a document with entries that are missing or wrong, naming all of them at once."""
    missing = [key for key in REQUIRED if key not in document]
    problems = [f"{', '.join(missing)} must be there, got only {sorted(document)[:12]}"] if missing else []
    is_metric = document.get("is_metric")
    expected = FIXED | ({"unit": UNITS[is_metric]} if isinstance(is_metric, bool) else {})
    problems += [
        f"{key} must be {value!r}, got {document[key]!r}"
        for key, value in expected.items()
        if key in document and document[key] != value
    ]
    kinds = {"is_metric": bool, "name": str, "source": str, "time_origin_ns": int}
    problems += [
        f"{key} must be {KINDS[kind]}, got {document[key]!r}"
        for key, kind in kinds.items()
        if key in document and type(document[key]) is not kind
    ]
    if problems:
        raise ValueError(f"{place}: {'; '.join(problems)}; see docs/formats.md, and update merope for a newer version")


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


def read_lens(place: str, document: object) -> Lens | None:
    """The lens that a document describes; `place` is where it stands."""
    if document is None:
        return None
    if not isinstance(document, Mapping):
        raise invalid(f"{place} lens", "an object with model", repr(document)[:40], "see docs/formats.md")
    model = document.get("model")
    if not isinstance(model, str) or model not in LENSES:
        raise invalid(f"{place} lens.model", f"one of {', '.join(LENSES)}", repr(model), "use a lens of the library")
    given = {key: value for key, value in document.items() if key != "model"}
    _check_parameters(f"{place} lens", model, given)
    try:
        values = {
            key: torch.tensor(value, dtype=torch.float64) if isinstance(value, (float, list)) else value
            for key, value in given.items()
        }
        return LENSES[model](**values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise invalid(f"{place} lens", f"the parameters of a {model}", str(error), "see docs/formats.md") from None


def _check_parameters(place: str, model: str, given: Mapping[str, object]) -> None:
    """Refuse a lens with parameters that are missing or that it does not have, naming all of them at once."""
    known = [field for field in fields(cast("type[DataclassInstance]", LENSES[model])) if field.init]
    needed = [field.name for field in known if field.default is MISSING]
    missing = [name for name in needed if name not in given]
    unknown = sorted(given.keys() - {field.name for field in known})
    if missing or unknown:
        got = [f"no {', '.join(missing)}"] * bool(missing) + [f"also {', '.join(unknown)}"] * bool(unknown)
        expected = f"a {model} with {', '.join(needed)}"
        raise invalid(place, expected, " and ".join(got), "see docs/formats.md")


def write(trajectory: Trajectory, path: Path) -> None:
    """One frame per line, numbers with all their digits."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": trajectory.name,
        "source": trajectory.convention,
        "pose": FIXED["pose"],
        "axes": FIXED["axes"],
        "is_metric": trajectory.is_metric,
        "unit": UNITS[trajectory.is_metric],
        "lens": lens_document(trajectory.lens),
    }
    if trajectory.time_origin_ns:
        head["time_origin_ns"] = trajectory.time_origin_ns
    frames: list[dict[str, object]] = [{} for _ in range(trajectory.count)]
    for k, frame in enumerate(frames):
        if trajectory.frame_names is not None:
            frame["name"] = trajectory.frame_names[k]
        if trajectory.timestamps_s is not None:
            frame["time_s"] = float(trajectory.timestamps_s[k])
        frame["world_from_camera"] = trajectory.world_from_camera[k, :3].tolist()
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
    body = ",\n".join(f"  {json.dumps(frame)}" for frame in frames)
    replace_text(path, "{\n" + "".join(lines) + f' "frames": [\n{body}\n ]\n}}\n')


def lens_document(lens: Lens | None) -> dict[str, object] | None:
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
