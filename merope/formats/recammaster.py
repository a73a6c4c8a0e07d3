"""ReCamMaster camera JSON: {"frame0": {"cam01": "[a b c d] [..] [..] [x y z 1] "}, ...}, ten cameras of 81 frames.

Unreal Engine: matrices for row vectors (their rows are the camera's forward, right and up, then its place), in
centimetres, in a left-handed world. Picking right, down, forward gives OpenCV camera axes, but of determinant −1: only
relative poses of such matrices are proper. Mirroring the world's y axis makes it right-handed and changes no relative
pose; all cameras of a file keep sharing one world.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import CUT_OFF, Sample, load_json, numbers, shown
from merope.formats.pose_rows import poses_from_rows
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text

FRAME_KEY = re.compile(r"frame(\d+)")
CM_PER_M = 100.0
ROW_LAYOUT = "x y z w"
ROWS = ("forward", "right", "up", "position")


def matches(sample: Sample) -> bool:
    document = sample.document
    if not isinstance(document, Mapping) or not document or not all(FRAME_KEY.fullmatch(str(key)) for key in document):
        return False
    first = next(iter(document.values()))
    return isinstance(first, Mapping) and bool(first) and isinstance(next(iter(first.values())), str)


def read(path: Path, camera: str | None = None) -> Trajectory:
    """One camera of a file, such as "cam01"; may be left out if there is only one."""
    document = load_json(path)
    if not isinstance(document, Mapping) or not document:
        raise invalid(str(path), 'an object of "frame0", "frame1", …', type(document).__name__, CUT_OFF)
    bad = next((key for key in document if not FRAME_KEY.fullmatch(key)), None)
    if bad is not None:
        raise invalid(str(path), 'an object of "frame0", "frame1", …', repr(bad), CUT_OFF)
    names = sorted(document, key=lambda key: int(key.removeprefix("frame")))
    camera = _choose(path, document[names[0]], camera)
    places = [f"{path} {name}.{camera}" for name in names]
    matrices = torch.stack([_parse(place, document[name], camera) for place, name in zip(places, names, strict=True)])
    return Trajectory(
        world_from_camera=poses_from_rows(places, opencv_from_unreal(matrices)),
        is_metric=True,
        convention="ReCamMaster: Unreal camera-to-world for row vectors in cm, left-handed; now OpenCV axes, metres, "
        "and the world's y axis mirrored to make it right-handed",
        frame_names=tuple(names),
        name=camera,
    )


def _choose(path: Path, cameras: object, camera: str | None) -> str:
    known = sorted(cameras) if isinstance(cameras, Mapping) else []
    if camera is None and len(known) == 1:
        return str(known[0])
    if camera not in known:
        raise invalid("camera", f"one of {known} for {path}", camera, "pass camera='cam01' or another of them")
    return str(camera)


def _parse(place: str, cameras: object, camera: str) -> Tensor:  # [4, 4] as it stands in the file
    text = cameras.get(camera) if isinstance(cameras, Mapping) else None
    rows = re.findall(r"\[([^\]]*)\]", text) if isinstance(text, str) else []
    if len(rows) != len(ROWS):
        raise invalid(place, "four rows [x y z w]", repr(text)[:60], CUT_OFF)
    return torch.tensor([numbers(place, row.split(), ROW_LAYOUT) for row in rows], dtype=torch.float64)


def opencv_from_unreal(
    rows: Tensor,  # [T, 4, 4] rows forward, right, up, position in cm; left-handed world
) -> Tensor:  # [T, 3, 4] world_from_camera, OpenCV axes, metres; world's y mirrored
    """Columns right, down, forward and the centre."""
    forward, right, up, centre_cm = rows[..., :3].unbind(-2)
    columns = torch.stack((right, -up, forward, centre_cm / CM_PER_M), dim=-1)
    return columns * columns.new_tensor([1.0, -1.0, 1.0])[:, None]


def unreal_from_opencv(
    world_from_camera: Tensor,  # [T, 4, 4]
) -> Tensor:  # [T, 4, 4] rows forward, right, up, position in cm
    """Inverse of `opencv_from_unreal`."""
    mirrored = world_from_camera[:, :3] * world_from_camera.new_tensor([1.0, -1.0, 1.0])[:, None]
    right, down, forward, centre = mirrored.unbind(-1)
    rows = torch.stack((forward, right, -down, CM_PER_M * centre), dim=-2)
    last = rows.new_tensor([0.0, 0.0, 0.0, 1.0]).expand(rows.shape[0], 4)
    return torch.cat((rows, last[..., None]), dim=-1)


def write(trajectory: Trajectory, path: Path, camera: str = "cam01") -> None:
    """A file with the one camera; times, lens and image names have no place in it."""
    matrices = unreal_from_opencv(trajectory.world_from_camera).tolist()
    frames = {f"frame{k}": {camera: "".join(f"[{shown(row)}] " for row in rows)} for k, rows in enumerate(matrices)}
    replace_text(path, json.dumps(frames, indent=1) + "\n")
