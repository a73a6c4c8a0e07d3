"""PanShot (UCPE) poses: a .npy of [T, 3, 4] float32, camera-to-world, OpenCV axes, in the unit of a SLAM run.

A sidecar JSON lists the unified lens of many clips. In a sample list of UCPE's demo every row has {pose_path, x_fov
(degrees, horizontal), xi, caption}; in a meta file of the data set {pose, x_fov, xi} are in the `videos` of every row,
and `pose` is the name without its suffix. Near-depth normalisation and the turn to yaw 0 belong to the data set, not
to the file format.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from merope.errors import invalid
from merope.formats.files import CUT_OFF, Sample, entry, load_array, load_json
from merope.formats.pose_rows import poses_from_rows
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text, replacing
from merope.geometry.lenses import Lens, Pinhole, UnifiedCamera


def matches(sample: Sample) -> bool:
    return len(sample.array_shape) == 3 and sample.array_shape[1:] == (3, 4)


def read(path: Path, sidecar: Path | str | None = None, image_size: tuple[int, int] | None = None) -> Trajectory:
    """A path in SLAM units, with its lens if the image size (width, height) is given.

    sidecar: the sample list or meta file that names this file; by default the file of the same name that ends in
    .json, if any.
    """
    array = load_array(path)
    if array.ndim != 3 or array.shape[1:] != (3, 4) or array.dtype.kind != "f" or array.shape[0] == 0:
        raise invalid(str(path), "floats [T, 3, 4]", f"{array.dtype} {list(array.shape)}", CUT_OFF)
    places = [f"{path}[{k}]" for k in range(array.shape[0])]
    matrices = torch.from_numpy(array.astype(np.float64))
    beside = path.with_suffix(".json")
    sidecar = beside if sidecar is None and beside.exists() else sidecar
    has_lens = sidecar is not None and image_size is not None
    return Trajectory(
        world_from_camera=poses_from_rows(places, matrices),
        is_metric=False,
        convention="PanShot: camera-to-world, OpenCV axes, SLAM scale"
        + ("" if has_lens else "; no lens, which takes a sidecar and image_size"),
        lens=_lens(Path(sidecar), path, image_size) if sidecar is not None and image_size is not None else None,
        name=path.stem,
    )


def _lens(sidecar: Path, path: Path, image_size: tuple[int, int]) -> Lens:
    rows = list(_named_rows(sidecar))
    lenses = set()
    for place, name, row in rows:
        if name == path.name:
            x_fov_deg, xi = entry(place, row, "x_fov"), entry(place, row, "xi")
            if not isinstance(x_fov_deg, (int, float)) or not isinstance(xi, (int, float)):
                raise invalid(place, "numbers x_fov and xi", (x_fov_deg, xi), CUT_OFF)
            lenses.add((float(x_fov_deg), float(xi)))
    if not lenses:
        raise invalid(str(sidecar), f"a list with {path.name}", f"{len(rows)} others", "pass the list of this split")
    if len(lenses) > 1:
        fix = "leave one of them in the list, or pass lens=…"
        raise invalid(str(sidecar), f"one lens for {path.name}", f"x_fov and xi {sorted(lenses)}", fix)
    return UnifiedCamera.from_fov(*lenses.pop(), *image_size)


def _named_rows(sidecar: Path) -> Iterator[tuple[str, str, object]]:
    """Place, name of the pose file and row, of a sample list or of the videos in a meta file."""
    rows = load_json(sidecar)
    if not isinstance(rows, list):
        raise invalid(str(sidecar), "a JSON list of samples", type(rows).__name__, CUT_OFF)
    for k, row in enumerate(rows):
        place = f"{sidecar}[{k}]"
        videos = row.get("videos") if isinstance(row, dict) else None
        if isinstance(videos, list):
            for j, video in enumerate(videos):
                yield f"{place} videos[{j}]", f"{entry(f'{place} videos[{j}]', video, 'pose')}.npy", video
        else:
            yield place, PurePosixPath(str(entry(place, row, "pose_path"))).name, row


def write(trajectory: Trajectory, path: Path, sidecar: Path | str | None = None) -> None:
    """float32 poses, and a sidecar of one row if the trajectory has a lens (by default <name>.json)."""
    lens = trajectory.lens
    x_fov_deg = None if lens is None else _x_fov_deg(lens)  # before anything is written
    target = path.with_suffix(".json") if sidecar is None else Path(sidecar)
    if lens is not None:
        _check_sidecar(target, path.name)
    with replacing(path) as part, part.open("wb") as file:  # np.save would append .npy to other names
        np.save(file, trajectory.world_from_camera[:, :3].to(torch.float32).numpy())
    if x_fov_deg is None:
        return
    row = {"pose_path": path.name, "x_fov": x_fov_deg, "xi": float(getattr(lens, "xi", 0.0)), "caption": ""}
    replace_text(target, json.dumps([row], indent=1) + "\n")


def _check_sidecar(file: Path, name: str) -> None:
    """Refuse to replace a file that is no sidecar of this path alone: another path, or a list of many clips."""
    if not file.exists():
        return
    try:
        names = [named for _, named, _ in _named_rows(file)]
    except (OSError, ValueError):
        names = []
    if names != [name]:
        fix = "choose another name for the path, or pass sidecar=…"
        raise invalid(str(file), f"absent, or the sidecar of {name} alone, which says its lens", "another file", fix)


def _x_fov_deg(lens: Lens) -> float:
    """Horizontal field of view of a centred unified lens with square pixels; a pinhole is one with xi = 0."""
    is_centred = (
        isinstance(lens, (UnifiedCamera, Pinhole))
        and lens.batch_shape == ()
        and (lens.cx, lens.cy) == (lens.width / 2, lens.height / 2)
        and lens.fx == lens.fy
    )
    if not is_centred:
        expected = "one centred Pinhole or UnifiedCamera with fx = fy for panshot"
        fix = "write merope JSON, which keeps any lens"
        raise invalid("trajectory.lens", expected, f"another {type(lens).__name__}", fix)
    ray, seen = lens.unproject(torch.tensor([lens.width, lens.height / 2], dtype=torch.float64))
    if not bool(seen):
        expected = "a lens that sees the right edge of its image for panshot"
        raise invalid("trajectory.lens", expected, "a circle inside it", "write merope JSON, which keeps any lens")
    return 2.0 * math.degrees(math.atan2(float(ray[0]), float(ray[2])))
