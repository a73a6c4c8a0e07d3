"""Clips in OpenScene's layout: what World Engine renders and what nuPlan logs are exported to.

A meta file is a pickled list of frames. Unpickling runs code of whoever wrote the file. So it happens only on request,
and even then only NumPy arrays and plain containers are let through.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merope.datasets.clip import Clip
from merope.datasets.data_kind import FrameData, PlacedClips
from merope.datasets.loader import ClipSource
from merope.errors import invalid
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_image
from merope.geometry.distorted_lenses import BrownConrady
from merope.geometry.lens_batches import resized
from merope.geometry.lenses import Lens, Pinhole
from merope.geometry.poses import rigid

COEFFICIENTS = (4, 5, 8)
"""Lengths of OpenCV's list k1 k2 p1 p2 k3 k4 k5 k6 that a Brown–Conrady lens has a place for."""

LONGEST_STEP = 1.5
"""Between two frames of a clip, in usual steps."""

FIELDS = ("timestamp", "lidar2global", "cams")
AGAIN = "get the meta file again"
MMDET3D = 'convert it to OpenScene\'s fields; nuScenes infos of mmdet3d mix all scenes: use kind = "nuscenes" for them'

NUMPY_PARTS = (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
ALLOWED = {(f"numpy.{core}.{module}", name) for core in ("core", "_core") for module, name in NUMPY_PARTS}
ALLOWED |= {("numpy", "ndarray"), ("numpy", "dtype")}
ALLOWED |= {("_codecs", "encode"), ("__builtin__", "bytes")}  # how protocol 2 stores bytes


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"the file asks for {module}.{name}; only NumPy arrays are read")
        return super().find_class(module, name)


def read_infos(path: Path, allow_pickle: bool = False) -> list[dict[str, Any]]:
    """The frames of a meta file, in order of time."""
    if not allow_pickle:
        fix = "pass allow_pickle=True if you trust where the file came from"
        raise invalid("allow_pickle", "True to read a pickle", allow_pickle, fix)
    try:
        with Path(path).open("rb") as file:
            infos = _ArraysOnly(file).load()
    except OSError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{path} cannot be read ({error}); get the file again") from error
    frames = infos.get("infos") if isinstance(infos, dict) else infos
    if not isinstance(frames, list) or not frames:
        raise invalid("path", "a list of frames, or a dict with infos", path, "is this an OpenScene meta file?")
    for index, info in enumerate(frames):
        _check_frame(f"frame {index} of {path}", info)
    return sorted(frames, key=lambda info: info["timestamp"])


def _check_frame(name: str, info: Any) -> None:
    missing = [field for field in FIELDS if not isinstance(info, dict) or field not in info]
    if missing:
        raise invalid(name, f"a dict with {', '.join(FIELDS)}", f"no {', '.join(missing)}", MMDET3D)
    cameras = info["cams"]
    if not isinstance(cameras, dict) or not all(isinstance(camera, dict) for camera in cameras.values()):
        raise invalid(f"cams of {name}", "a dict of cameras, each a dict", repr(cameras)[:40], AGAIN)
    if not isinstance(info["timestamp"], int | float | np.integer | np.floating):
        raise invalid(f"timestamp of {name}", "a number of microseconds", repr(info["timestamp"])[:40], AGAIN)
    _shaped(info, "lidar2global", (4, 4), name)


def read_openscene(
    path: Path,
    blobs: Path,
    height: int,
    width: int,
    channel: str = "CAM_F0",
    image_size: tuple[int, int] = (1920, 1080),
    with_frames: bool = True,
    allow_pickle: bool = False,
    count: int | None = None,  # first frames to take; None takes all
) -> Clip:
    """One meta file as a clip: camera-to-world is lidar2global ∘ sensor2lidar, metres.

    blobs: folder that data_path is relative to. image_size: (width, height) that the intrinsics belong to.
    Images of nuPlan are distorted: the lens is Brown–Conrady where a frame carries coefficients.
    """
    infos = read_infos(path, allow_pickle)[:count]
    if count is not None and len(infos) < count:
        raise invalid(f"frames of {path}", f"at least {count}", len(infos), "shorten the clip")
    for info in infos:
        if channel not in info["cams"]:
            there = sorted(map(str, info["cams"]))
            raise invalid("channel", f"one of {there}", repr(channel), "pick a camera of every frame")
        if not isinstance(info["cams"][channel].get("data_path"), str):
            raise invalid(f"{channel} of {path}", "a camera with data_path", "none in a frame", AGAIN)
    cameras = [info["cams"][channel] for info in infos]
    timestamps_s = torch.tensor([float(info["timestamp"]) for info in infos], dtype=torch.float64) * 1e-6
    steps_s = timestamps_s.diff()
    if not bool((steps_s > 0).all()):
        index = int((~(steps_s > 0)).nonzero()[0])
        raise ValueError(f"{path}: frames {index} and {index + 1} are not in order of time; drop one of them")
    if len(steps_s) and bool((steps_s > LONGEST_STEP * steps_s.median()).any()):
        index, usual_s = int(steps_s.argmax()), float(steps_s.median())
        got = f"{float(steps_s[index]):.3g} s from frame {index} to the next, {usual_s:.3g} s elsewhere"
        raise invalid(f"frames of {path}", "equally far apart", got, "cut the clip there")
    frames = None
    if with_frames:
        frames = torch.stack([read_image(Path(blobs) / camera["data_path"], height, width) for camera in cameras])
    return Clip(
        name=Path(path).stem,
        world_from_camera=torch.stack([_pose(info, camera) for info, camera in zip(infos, cameras, strict=True)]),
        lens=_lens(cameras[0], image_size, height, width),
        timestamps_s=timestamps_s - timestamps_s[0],
        fps=1 / float(steps_s.median()) if len(steps_s) else 10.0,
        frames=frames,
        traversal=Path(path).stem,
    )


def _pose(info: dict[str, Any], camera: dict[str, Any]) -> Tensor:  # [4, 4]
    image = camera["data_path"]
    lidar_from_camera = rigid(
        torch.from_numpy(_shaped(camera, "sensor2lidar_rotation", (3, 3), image)),
        torch.from_numpy(_shaped(camera, "sensor2lidar_translation", (3,), image)),
    )
    return torch.from_numpy(_shaped(info, "lidar2global", (4, 4), image)) @ lidar_from_camera


def _shaped(table: dict[str, Any], field: str, shape: tuple[int, ...], where: str) -> NDArray[np.float64]:
    values = _numbers(table, field, where)
    if values.shape != shape:
        got = f"{values.shape}" if field in table else "none"
        raise invalid(f"{field} of {where}", f"numbers of shape {shape}", got, AGAIN)
    return values


def _numbers(table: dict[str, Any], field: str, where: str) -> NDArray[np.float64]:
    """A field of a frame or of a camera, empty where there is none."""
    try:
        return np.array(table.get(field, ()), dtype=np.float64)
    except (ValueError, TypeError):
        raise invalid(f"{field} of {where}", "numbers", repr(table[field])[:40], AGAIN) from None


def _lens(camera: dict[str, Any], image_size: tuple[int, int], height: int, width: int) -> Lens:
    matrix = _shaped(camera, "cam_intrinsic", (3, 3), camera["data_path"])
    intrinsics = (matrix[0, 0], matrix[1, 1], matrix[0, 2], matrix[1, 2])
    distortion = _numbers(camera, "distortion", camera["data_path"]).ravel()
    if not distortion.any():
        return resized(Pinhole(*intrinsics, *image_size), width, height)
    if len(distortion) not in COEFFICIENTS:
        name, got = f"distortion of {camera['data_path']}", f"{len(distortion)} of them"
        raise invalid(name, "k1 k2 p1 p2 [k3 [k4 k5 k6]]", got, "undistort the images")
    return resized(BrownConrady(*intrinsics, *image_size, *distortion.tolist()), width, height)


@dataclass(frozen=True)
class OpenSceneSource(ClipSource[Clip]):
    """The beginnings of meta files as clips of one length and size."""

    files: Sequence[Path]
    data: "OpenSceneData"

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return self.files[index].stem

    def clip(self, index: int) -> Clip:
        return self._clip(index, with_frames=True)

    def trajectory(self, index: int) -> Trajectory:
        clip = self._clip(index, with_frames=False)
        convention = "OpenScene: camera-to-world in the map frame, OpenCV axes, metres"
        return Trajectory(clip.world_from_camera, clip.is_metric, convention, clip.timestamps_s, name=self.name(index))

    def _clip(self, index: int, with_frames: bool) -> Clip:
        data = self.data
        size = (data.height, data.width, data.channel, data.image_size)
        return read_openscene(self.files[index], data.root, *size, with_frames, data.allow_pickle, data.frames)


@dataclass(frozen=True)
class OpenSceneData(PlacedClips, FrameData):
    """Meta files in OpenScene's layout. A clip is the first frames of one file; there are no captions."""

    kind: Literal["openscene"]
    root: Path  # folder of the images
    meta: Path  # folder of meta files, *.pkl
    validation_meta: Path | None = None
    channel: str = "CAM_F0"
    image_size: tuple[int, int] = (1920, 1080)  # width and height that the intrinsics belong to
    allow_pickle: bool = False  # whether you trust where the meta files came from
    places = ("meta", "validation_meta")

    def clips_of(self, place: Path) -> OpenSceneSource:
        if not self.allow_pickle:
            fix = "set it if you trust where the meta files came from: they are pickles"
            raise invalid("data.allow_pickle", "true to read OpenScene", False, fix)
        return OpenSceneSource(sorted(place.glob("*.pkl")), self)
