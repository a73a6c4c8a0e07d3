"""COLMAP models: a folder with cameras.txt and images.txt, or with the .bin files that COLMAP writes by itself.

images.txt has two lines per image, `ID qw qx qy qz tx ty tz CAMERA_ID NAME` (camera_from_world, OpenCV axes) and its
2-D points, which may be blank. images.bin holds the same, little-endian. COLMAP puts the centre of the top-left pixel
at (0.5, 0.5), as this library does.
"""

import os
import struct
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import (
    CUT_OFF,
    Sample,
    as_numbers,
    data_lines,
    natural_order,
    numbers,
    read_text,
    require_rows,
    shown,
)
from merope.formats.pose_rows import poses_from_quaternions, quaternion_rows, shared_or_per_frame
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replace_text
from merope.geometry.distorted_lenses import BrownConrady, KannalaBrandt
from merope.geometry.lenses import Equirectangular, ExtendedUnified, Lens, Pinhole
from merope.geometry.poses import inverse

IMAGE_LAYOUT = "id qw qx qy qz tx ty tz camera"
MODELS: dict[str, tuple[Callable[..., Lens], str]] = {
    "SIMPLE_PINHOLE": (Pinhole, "f cx cy"),
    "PINHOLE": (Pinhole, "fx fy cx cy"),
    "SIMPLE_RADIAL": (BrownConrady, "f cx cy k1"),
    "RADIAL": (BrownConrady, "f cx cy k1 k2"),
    "OPENCV": (BrownConrady, "fx fy cx cy k1 k2 p1 p2"),
    "FULL_OPENCV": (BrownConrady, "fx fy cx cy k1 k2 p1 p2 k3 k4 k5 k6"),
    "SIMPLE_FISHEYE": (KannalaBrandt, "f cx cy"),
    "FISHEYE": (KannalaBrandt, "fx fy cx cy"),
    "SIMPLE_RADIAL_FISHEYE": (KannalaBrandt, "f cx cy k1"),
    "RADIAL_FISHEYE": (KannalaBrandt, "f cx cy k1 k2"),
    "OPENCV_FISHEYE": (KannalaBrandt, "fx fy cx cy k1 k2 k3 k4"),
    "EUCM": (ExtendedUnified, "fx fy cx cy alpha beta"),
    "EQUIRECTANGULAR": (Equirectangular, "w h"),
}
NUMBERED = (
    "SIMPLE_PINHOLE", "PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "OPENCV_FISHEYE", "FULL_OPENCV", "FOV",
    "SIMPLE_RADIAL_FISHEYE", "RADIAL_FISHEYE", "THIN_PRISM_FISHEYE", "RAD_TAN_THIN_PRISM_FISHEYE", "SIMPLE_DIVISION",
    "DIVISION", "SIMPLE_FISHEYE", "FISHEYE", "EUCM", "EQUIRECTANGULAR",
)  # models as cameras.bin counts them  # fmt: skip
POINT_BYTES = 24  # x, y and the number of the 3-D point
BEST_MODEL = ("PINHOLE", "OPENCV", "FULL_OPENCV", "OPENCV_FISHEYE", "EUCM", "EQUIRECTANGULAR")  # tried for writing


@dataclass(frozen=True)
class Camera:
    """One line of cameras.txt."""

    make: Callable[..., Lens]
    size: tuple[int, int]  # width, height
    parameters: dict[str, float]


def matches(sample: Sample) -> bool:
    """A folder with both files, or the text of images.txt itself."""
    if is_model(sample.files):
        return True
    words = sample.data_lines[0].split(maxsplit=9) if sample.data_lines else []
    return len(words) == 10 and as_numbers(words[:9]) is not None and as_numbers(words[9].split()) is None


def is_model(files: Container[str]) -> bool:
    """Whether a folder with these files holds a model."""
    return any(all(f"{name}.{kind}" in files for name in ("cameras", "images")) for kind in ("txt", "bin"))


def read(path: Path) -> Trajectory:
    """The images of a COLMAP model in the natural order of their names. path: the folder, or images.txt in it.

    Of a folder with both kinds of files the binary ones are read, as COLMAP does.
    """
    folder = path if path.is_dir() else path.parent
    has_text, has_binary = ((folder / f"images.{kind}").is_file() for kind in ("txt", "bin"))
    is_binary = has_binary and not (has_text and (path.name == "images.txt" or not (folder / "cameras.bin").is_file()))
    kind, read_cameras, read_images = (
        ("bin", _binary_cameras, _binary_images) if is_binary else ("txt", _text_cameras, _text_images)
    )
    if (folder / f"images.{kind}").is_file() and not (folder / f"cameras.{kind}").is_file():
        fix = "keep the files of a COLMAP model together, and name their folder"
        raise invalid(str(folder), f"a folder with cameras.{kind} and images.{kind}", f"no cameras.{kind}", fix)
    cameras, headers = read_cameras(folder / f"cameras.{kind}"), read_images(folder / f"images.{kind}")
    require_rows(folder / f"images.{kind}", headers, IMAGE_LAYOUT + " name")
    headers = [headers[k] for k in natural_order([name for _, _, name in headers])]
    places = [place for place, _, _ in headers]
    rows = torch.tensor([values for _, values, _ in headers], dtype=torch.float64)
    camera_from_world = poses_from_quaternions(places, rows[:, 1:5], rows[:, 5:8])
    used = []
    for place, values, _ in headers:
        if values[8] not in cameras:
            expected = f"an image of a camera in cameras.{kind} ({sorted(cameras)[:12]})"
            raise invalid(place, expected, f"{values[8]:g}", "export both files together")
        used.append(cameras[int(values[8])])
    return Trajectory(
        world_from_camera=inverse(camera_from_world),
        is_metric=False,
        convention="COLMAP: world-to-camera, inverted; OpenCV axes; SfM scale; in the natural order of image names",
        lens=_lens(folder, used),
        frame_names=tuple(name for _, _, name in headers),
        name=folder.name,
    )


def _binary_cameras(path: Path) -> dict[int, Camera]:
    cameras = {}
    with path.open("rb") as file:
        for _ in range(_unpack(file, "<Q")[0]):
            number, model, width, height = _unpack(file, "<iiQQ")
            place = f"{path} camera {number}"
            name = NUMBERED[model] if 0 <= model < len(NUMBERED) else f"number {model}"
            values = _unpack(file, f"<{len(_layout(place, name).split())}d")
            cameras[number] = _camera(name, (width, height), values)
    return cameras


def _binary_images(path: Path) -> list[tuple[str, list[float], str]]:  # place, nine numbers, name
    headers = []
    with path.open("rb") as file:
        for _ in range(_unpack(file, "<Q")[0]):
            number, *pose, camera = _unpack(file, "<I7dI")
            name = bytearray()
            while (letter := _unpack(file, "<c")[0]) != b"\0":
                name += letter
            headers.append((f"{path} image {number}", [number, *pose, camera], name.decode("utf-8", "replace")))
            _skip(file, POINT_BYTES * _unpack(file, "<Q")[0])
    return headers


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    """The next numbers of a binary file."""
    data = file.read(size := struct.calcsize(layout))
    if len(data) < size:
        raise invalid(file.name, "a whole COLMAP file", f"one that ends after {file.tell()} bytes", CUT_OFF)
    return struct.unpack(layout, data)


def _skip(file: BinaryIO, count: int) -> None:
    left = os.fstat(file.fileno()).st_size - file.tell()
    if count > left:
        raise invalid(file.name, f"a whole COLMAP file, with {count} more bytes", f"{left} of them", CUT_OFF)
    file.seek(count, os.SEEK_CUR)


def _text_cameras(path: Path) -> dict[int, Camera]:
    cameras = {}
    for place, text in data_lines(path):
        words = text.split()
        if len(words) < 4 or not all(word.isdecimal() for word in (words[0], *words[2:4])):
            raise invalid(place, "CAMERA_ID MODEL WIDTH HEIGHT PARAMS", repr(text[:60]), CUT_OFF)
        values = numbers(place, words[4:], _layout(place, words[1]))
        cameras[int(words[0])] = _camera(words[1], (int(words[2]), int(words[3])), values)
    return cameras


def _layout(place: str, model: str) -> str:
    """The names of a model's parameters."""
    if model not in MODELS:
        fix = "undistort the images with COLMAP, or fit one of these models"
        raise invalid(place, f"one of the models {', '.join(MODELS)}", model, fix)
    return MODELS[model][1]


def _camera(model: str, size: tuple[int, int], parameters: Sequence[float]) -> Camera:
    make, layout = MODELS[model]
    values = dict(zip(layout.split(), parameters, strict=True))
    if "f" in values:
        values["fx"] = values["fy"] = values.pop("f")
    return Camera(make, size, {name: value for name, value in values.items() if name not in ("w", "h")})


def _text_images(path: Path) -> list[tuple[str, list[float], str]]:  # place, nine numbers, name
    """Every other line, counted from the first that is no comment: the lines of points may be blank."""
    lines = enumerate(read_text(path).splitlines(), start=1)
    headers = []
    for number, text in lines:
        if not text.strip() or text.startswith("#"):
            continue
        words = text.split(maxsplit=9)
        place = f"{path}:{number}"
        values = numbers(place, words[:9], IMAGE_LAYOUT)
        if len(words) < 10:
            raise invalid(place, f"{IMAGE_LAYOUT} NAME", "no image name", CUT_OFF)
        headers.append((place, values, words[9].strip()))
        _check_points(path, *next(lines, (number + 1, "")))
    return headers


def _check_points(path: Path, number: int, text: str) -> None:
    """Refuse another image where the 2-D points of one belong: it would be skipped as if it were points."""
    words = text.split()
    if len(words) % 3 or as_numbers(words[-1:]) is None:
        expected = "the 2-D points (X Y POINT3D_ID …) of the image above, or blank"
        raise invalid(f"{path}:{number}", expected, repr(text[:60]), "put a blank line after every image")


def _lens(folder: Path, cameras: Sequence[Camera]) -> Lens:
    """One lens, or one per frame; all frames must share the kind of lens and the image size."""
    kinds = {(camera.make, camera.size, tuple(camera.parameters)) for camera in cameras}
    if len(kinds) > 1:
        fix = "split the model by camera (image_deleter) and read each part"
        raise invalid(str(folder / "cameras.txt"), "one camera model and image size for all images", len(kinds), fix)
    (make, (width, height), names) = next(iter(kinds))
    parameters = {name: shared_or_per_frame([camera.parameters[name] for camera in cameras]) for name in names}
    return make(**parameters, width=width, height=height)


def write(trajectory: Trajectory, path: Path) -> None:
    """A folder with cameras.txt, images.txt and an empty points3D.txt, which COLMAP and pycolmap open."""
    _check_folder(path)
    camera_lines = _camera_lines(trajectory)
    rows = quaternion_rows(inverse(trajectory.world_from_camera))
    names = trajectory.frame_names or tuple(f"frame_{k:05d}.png" for k in range(trajectory.count))
    images = [
        f"{k} {shown(row)} {min(k, len(camera_lines))} {name}\n\n"
        for k, (row, name) in enumerate(zip(rows.tolist(), names, strict=True), start=1)
    ]
    replace_text(path / "cameras.txt", "# CAMERA_ID MODEL WIDTH HEIGHT PARAMS\n" + "".join(camera_lines))
    replace_text(path / "images.txt", "# IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME\n" + "".join(images))
    replace_text(path / "points3D.txt", "# POINT3D_ID X Y Z R G B ERROR TRACK\n")


def _check_folder(path: Path) -> None:
    """Refuse to write into a reconstruction: it has points, or a binary model that would stay beside the new one."""
    binary = [name for name in ("cameras.bin", "images.bin", "points3D.bin") if (path / name).exists()]
    points = path / "points3D.txt"
    has_points = points.exists() and any(line[0] != "#" for line in points.read_text().splitlines() if line.strip())
    if binary or has_points:
        got = ", ".join(binary) or "points in points3D.txt"
        raise invalid(str(path), "a folder without a reconstruction", got, "choose another name")


def _camera_lines(trajectory: Trajectory) -> list[str]:
    """One line for a lens that all frames share, else one per frame."""
    lens = trajectory.lens
    model = next((name for name in BEST_MODEL if lens is not None and _holds(name, lens)), None)
    if lens is None or model is None:
        fix = "COLMAP has Pinhole, BrownConrady, KannalaBrandt, ExtendedUnified and Equirectangular"
        raise invalid("trajectory.lens", "a lens that COLMAP has", type(lens).__name__, fix)
    names = MODELS[model][1].split()
    values = {"w": torch.tensor(lens.width), "h": torch.tensor(lens.height)}
    columns = [values[name] if name in values else _parameter(lens, name) for name in names]
    table = torch.stack([column.double().expand(lens.batch_shape) for column in columns], dim=-1)
    rows = table.reshape(-1, len(names)).tolist()
    return [f"{k} {model} {lens.width} {lens.height} {shown(row)}\n" for k, row in enumerate(rows, start=1)]


def _holds(model: str, lens: Lens) -> bool:
    """Whether a model is of the lens's kind and has a place for each of its parameters that is not 0."""
    make, layout = MODELS[model]
    left_out = {"k3", "k4", "k5", "k6"} - set(layout.split())
    return type(lens) is make and not any(
        bool((_parameter(lens, name) != 0).any()) for name in left_out if hasattr(lens, name)
    )


def _parameter(lens: Lens, name: str) -> Tensor:  # [*batch]
    return torch.as_tensor(getattr(lens, name))
