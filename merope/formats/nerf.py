"""The transforms.json of nerfstudio and of Blender (NeRF synthetic): camera-to-world with OpenGL axes, any scale.

OpenGL cameras have x right, y up, z backwards: their y and z columns change sign here. nerfstudio files carry
intrinsics at the top or per frame; Blender files carry one angle, `camera_angle_x`, and no image size.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import Sample, entry, frame_list, load_json, matrix, natural_order
from merope.formats.pose_rows import shared_or_per_frame
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text
from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lenses import Equirectangular, Lens, Pinhole
from merope.geometry.poses import check_rigid

OPENCV_FROM_OPENGL = (1.0, -1.0, -1.0, 1.0)
DISTORTION = ("k1", "k2", "p1", "p2", "k3")  # in the order of BrownConrady's parameters
FISHEYE = ("k1", "k2", "k3", "k4")
CONVENTION = "camera-to-world, OpenGL axes turned to OpenCV; arbitrary scale; in the natural order of file names"


def _keys(sample: Sample) -> set[str]:
    """The keys of a transforms file, of its top and its first frame; none if it is no such file."""
    document = sample.document
    frames = document.get("frames") if isinstance(document, Mapping) else None
    if not isinstance(frames, list) or not frames or not isinstance(frames[0], Mapping):
        return set()
    return {*document, *frames[0]} if isinstance(document, Mapping) and "transform_matrix" in frames[0] else set()


def matches_nerfstudio(sample: Sample) -> bool:
    """Frames with full intrinsics; without any, Blender's files match as well and the caller has to say."""
    keys = _keys(sample)
    return bool(keys & {"fl_x", "camera_model"}) or (bool(keys) and "camera_angle_x" not in keys)


def matches_blender(sample: Sample) -> bool:
    """Frames with at most the one angle."""
    keys = _keys(sample)
    return bool(keys) and not keys & {"fl_x", "camera_model"}


def read_nerfstudio(path: Path) -> Trajectory:
    """A nerfstudio (or instant-ngp) transforms.json with fl_x, fl_y, cx, cy, w, h and camera_model."""
    document = load_json(path)
    frames, names, poses = _frames(path, document)
    return Trajectory(
        world_from_camera=poses,
        is_metric=False,
        convention=f"nerfstudio: {CONVENTION}; applied_transform is left in",
        lens=_nerfstudio_lens(path, document, frames),
        frame_names=names,
        name=path.parent.name,
    )


def read_blender(path: Path, image_size: tuple[int, int] | None = None) -> Trajectory:
    """A Blender transforms file. image_size: (width, height), unless the file has w and h; without either no lens."""
    document = load_json(path)
    _, names, poses = _frames(path, document)
    angle_rad = _number(path, document, {}, "camera_angle_x")
    if not 0.0 < angle_rad < math.pi:
        raise invalid(f"{path} camera_angle_x", "between 0 and π", angle_rad, "repair the file")
    lens = None
    if image_size is None and _mentions(document, (), "w"):  # instant-ngp's files have the size
        image_size = (int(_number(path, document, {}, "w")), int(_number(path, document, {}, "h")))
    if image_size is not None:
        width, height = image_size
        focal = 0.5 * width / math.tan(0.5 * angle_rad)
        lens = Pinhole(focal, focal, width / 2, height / 2, width, height)
    return Trajectory(
        world_from_camera=poses,
        is_metric=False,
        convention=f"Blender: {CONVENTION}" + ("" if lens else "; no lens, as image_size was not given"),
        lens=lens,
        frame_names=names,
        name=path.stem,
    )


def _frames(path: Path, document: object) -> tuple[list[object], tuple[str, ...], Tensor]:
    """Frames, their names and world_from_camera [T, 4, 4] with OpenCV axes, in the natural order of names."""
    frames = frame_list(str(path), document)
    names = [str(entry(f"{path} frames[{k}]", frame, "file_path")) for k, frame in enumerate(frames)]
    poses = []
    for k, frame in enumerate(frames):
        place = f"{path} frames[{k}].transform_matrix"
        rows = matrix(place, entry(f"{path} frames[{k}]", frame, "transform_matrix"), (4, 4))
        poses.append(check_rigid(torch.tensor(rows, dtype=torch.float64), place))
    order = natural_order(names)
    turned = torch.stack(poses)[order] * torch.tensor(OPENCV_FROM_OPENGL, dtype=torch.float64)
    return [frames[k] for k in order], tuple(names[k] for k in order), turned


def _number(path: Path, document: object, frame: object, key: str, default: float | None = None) -> float:
    """A number of the frame, else of the document, else the default."""
    for place in (frame, document):
        if isinstance(place, Mapping) and key in place:
            value = place[key]
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                return float(value)
            raise invalid(f"{path} {key}", "a number", repr(value)[:40], "repair the file")
    if default is None:
        raise invalid(str(path), f"a transforms file with {key}", "none", "pass the format that the file has")
    return default


def _nerfstudio_lens(path: Path, document: object, frames: Sequence[object]) -> Lens:
    model = _camera_model(path, document, frames)
    sizes = {tuple(int(_number(path, document, frame, key)) for key in ("w", "h")) for frame in frames}
    if len(sizes) > 1:
        raise invalid(f"{path} w, h", "one image size", sorted(sizes)[:4], "split the file by camera")
    width, height = next(iter(sizes))
    if model == "EQUIRECTANGULAR":
        return Equirectangular(width, height)
    if model not in ("SIMPLE_PINHOLE", "PINHOLE", "OPENCV", "OPENCV_FISHEYE"):
        expected = "PINHOLE, OPENCV, OPENCV_FISHEYE or EQUIRECTANGULAR"
        raise invalid(f"{path} camera_model", expected, model, "undistort the images first")

    def column(key: str, default: float | None = None) -> Tensor:  # [] or [T]
        return shared_or_per_frame([_number(path, document, frame, key, default) for frame in frames])

    fx = column("fl_x")
    fy = column("fl_y") if _mentions(document, frames, "fl_y") else fx
    focal_and_centre = (fx, fy, column("cx", width / 2), column("cy", height / 2), width, height)
    if model == "OPENCV_FISHEYE":
        return KannalaBrandt(*focal_and_centre, *(column(key, 0.0) for key in FISHEYE))
    if bool((column("k4", 0.0) != 0).any()):
        # nerfstudio's k4 belongs to r⁸; a BrownConrady's k4 is the first coefficient of a denominator.
        raise invalid(f"{path} k4", "0 for an OPENCV camera", column("k4").tolist(), "undistort the images first")
    distortion = [column(key, 0.0) for key in DISTORTION]
    if not any(bool(value.any()) for value in distortion):
        return Pinhole(*focal_and_centre)
    return BrownConrady(*focal_and_centre, *distortion)


def _camera_model(path: Path, document: object, frames: Sequence[object]) -> str:
    """nerfstudio's camera_model, or what instant-ngp's is_fisheye, of the file or of its frames, says instead."""
    places = [{**document, **frame} for frame in frames if isinstance(document, Mapping) and isinstance(frame, Mapping)]
    models = {
        str(place.get("camera_model", "OPENCV_FISHEYE" if place.get("is_fisheye", False) else "OPENCV"))
        for place in places
    }
    if len(models) > 1:
        expected = "the same in all frames"
        raise invalid(f"{path} camera_model, is_fisheye", expected, sorted(models), "split the file by camera")
    return next(iter(models), "OPENCV")


def _mentions(document: object, frames: Sequence[object], key: str) -> bool:
    return any(isinstance(place, Mapping) and key in place for place in (document, *frames))


def write_nerfstudio(trajectory: Trajectory, path: Path) -> None:
    """transforms.json with intrinsics at the top, or per frame where they differ."""
    lens = trajectory.lens
    model, names = _nerfstudio_model(lens)
    shared: dict[str, object] = {"camera_model": model}
    per_frame: list[dict[str, object]] = [{} for _ in range(trajectory.count)]
    if lens is not None:
        shared |= {"w": lens.width, "h": lens.height}
    for name in names:
        key = {"fx": "fl_x", "fy": "fl_y"}.get(name, name)
        value = torch.as_tensor(getattr(lens, name)).double()
        if value.ndim == 0:
            shared[key] = float(value)
        else:
            for frame, number in zip(per_frame, value.tolist(), strict=True):
                frame[key] = number
    _write(trajectory, path, shared, per_frame)


def _nerfstudio_model(lens: Lens | None) -> tuple[str, tuple[str, ...]]:
    """The camera_model of a lens and the parameters that it carries."""
    focal_and_centre = ("fx", "fy", "cx", "cy")
    if isinstance(lens, Pinhole):
        return "PINHOLE", focal_and_centre
    if isinstance(lens, KannalaBrandt):
        return "OPENCV_FISHEYE", focal_and_centre + FISHEYE
    if isinstance(lens, Equirectangular):
        return "EQUIRECTANGULAR", ()
    if isinstance(lens, BrownConrady) and not any(bool(torch.as_tensor(k).any()) for k in (lens.k4, lens.k5, lens.k6)):
        return "OPENCV", focal_and_centre + DISTORTION
    expected = "a Pinhole, BrownConrady without k4 to k6, KannalaBrandt or Equirectangular for nerfstudio"
    fix = "undistort the images first, or write merope JSON"
    raise invalid("trajectory.lens", expected, f"another {type(lens).__name__}", fix)


def write_blender(trajectory: Trajectory, path: Path) -> None:
    """One angle for all frames: needs a centred pinhole with square pixels."""
    lens = trajectory.lens
    fits = isinstance(lens, Pinhole) and lens.batch_shape == () and lens.fx == lens.fy
    if not isinstance(lens, Pinhole) or not fits or (lens.cx, lens.cy) != (lens.width / 2, lens.height / 2):
        expected, got = "one centred Pinhole with fx = fy for blender", f"another {type(lens).__name__}"
        raise invalid("trajectory.lens", expected, got, "write nerfstudio instead, which keeps all intrinsics")
    angle_rad = 2.0 * math.atan(0.5 * lens.width / float(lens.fx))
    _write(trajectory, path, {"camera_angle_x": angle_rad}, [{} for _ in range(trajectory.count)])


def _write(
    trajectory: Trajectory, path: Path, shared: Mapping[str, object], per_frame: Sequence[Mapping[str, object]]
) -> None:
    matrices = (trajectory.world_from_camera * torch.tensor(OPENCV_FROM_OPENGL, dtype=torch.float64)).tolist()
    names = trajectory.frame_names or tuple(f"images/frame_{k:05d}.png" for k in range(trajectory.count))
    frames = [
        {"file_path": name, **extra, "transform_matrix": rows}
        for name, extra, rows in zip(names, per_frame, matrices, strict=True)
    ]
    replace_text(path, json.dumps({**shared, "frames": frames}, indent=1) + "\n")
