"""Rig files: where the cameras of a rig are fixed and their lenses, as JSON. The schema is in docs/formats.md."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from merope.errors import invalid
from merope.formats.files import entry, load_json, matrix
from merope.formats.own import lens_document, read_lens
from merope.formats.writing import replace_text
from merope.geometry.lens_batches import in_row, picked_view
from merope.geometry.lenses import Lens
from merope.geometry.poses import check_rigid, rigid
from merope.geometry.rigs import Rig

HEAD = {"format": "merope-rig", "version": 1, "pose": "rig_from_camera", "axes": "x right, y down, z forward"}


def read_rig(path: Path) -> Rig:
    """A rig as it was written."""
    document, place = load_json(path), str(path)
    if not isinstance(document, Mapping) or any(document.get(key) != HEAD[key] for key in ("format", "version")):
        fix = "write it as in docs/formats.md, or with merope.formats.rig_file.write_rig"
        raise invalid(place, 'a JSON object with "format": "merope-rig", "version": 1', "another file", fix)
    for key in ("pose", "axes"):
        if document.get(key, HEAD[key]) != HEAD[key]:
            raise invalid(f"{place} {key}", repr(HEAD[key]), repr(document[key])[:60], "convert the poses of the views")
    views = entry(place, document, "views")
    if not isinstance(views, list) or not views:
        raise invalid(f"{place} views", "a list of at least one view", repr(views)[:60], "add the views")
    poses, lenses, names = [], list[Lens](), list[str]()
    for number, view in enumerate(views):
        spot = f"{place} views[{number}]"
        rows = entry(spot, view, "rig_from_camera")
        pose = torch.tensor(matrix(f"{spot}.rig_from_camera", rows, (3, 4)), dtype=torch.float64)
        poses.append(check_rigid(rigid(pose[:, :3], pose[:, 3]), f"{spot}.rig_from_camera"))
        lens = read_lens(spot, entry(spot, view, "lens"))
        if lens is None or lens.batch_shape:
            raise invalid(f"{spot}.lens", "one lens with numbers", "none, or lists", "give every view its own lens")
        lenses.append(lens)
        names.append(str(entry(spot, view, "name")))
    return Rig(torch.stack(poses), in_row(lenses, [1] * len(lenses)), tuple(names))


def write_rig(rig: Rig, path: Path) -> None:
    """One view per line, numbers with all their digits."""
    lines = [
        json.dumps(
            {
                "name": name,
                "rig_from_camera": pose[:3].tolist(),
                "lens": lens_document(picked_view(rig.lens, rig.views, view)),
            }
        )
        for view, (name, pose) in enumerate(zip(rig.names, rig.rig_from_camera, strict=True))
    ]
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in HEAD.items())
    replace_text(path, "{\n" + head + ' "views": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")
