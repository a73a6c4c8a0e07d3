"""nuScenes clips from its official tables, without its devkit.

Tables are streamed and only the rows of one camera are kept, as arrays in a cache file, so that a table of millions of
rows needs little memory and is read once. Poses are ego pose ∘ sensor calibration at each image's own timestamp:
camera-to-world in the map frame, metres, OpenCV axes. Images are undistorted, so the lens is a pinhole.
"""

import logging
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merope.datasets.clip import Clip
from merope.datasets.json_stream import stream_objects
from merope.errors import invalid
from merope.formats.files import load_json
from merope.formats.trajectory import Trajectory
from merope.formats.video import read_image
from merope.formats.writing import replacing
from merope.geometry.lens_batches import resized
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import rigid
from merope.geometry.quaternions import matrix_from_quaternion

FRAME_RATE_HZ = 12.0
LARGEST_GAP_S = 1.5 / FRAME_RATE_HZ
CACHE_VERSION = "1"
PER_IMAGE = ("filename", "scene", "timestamp_us", "world_from_camera", "intrinsics", "size")
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Frames:
    """The images of one camera channel, sorted by scene and time. Arrays of length N."""

    filename: NDArray[np.str_]
    scene: NDArray[np.int64]  # index into scene_name
    timestamp_us: NDArray[np.int64]
    world_from_camera: NDArray[np.float64]  # [N, 4, 4]
    intrinsics: NDArray[np.float64]  # [N, 4] fx, fy, cx, cy in pixels
    size: NDArray[np.int64]  # [N, 2] width, height
    scene_name: NDArray[np.str_]  # [S]
    description: NDArray[np.str_]  # [S]
    location: NDArray[np.str_]  # [S]
    log: NDArray[np.str_]  # [S] the drive that a scene was cut from


@dataclass(frozen=True)
class Window:
    """A clip to be loaded: frames start, start + stride, … of the frame table."""

    scene: str
    start: int
    count: int
    stride: int

    @property
    def rows(self) -> NDArray[np.int64]:  # [count]
        """Of the frame table."""
        return self.start + self.stride * np.arange(self.count)


class NuScenes:
    """One camera channel of one version of the data set.

    root: the folder that holds samples/, sweeps/ and the folder of tables, e.g. v1.0-trainval. The compact table is
        kept in the folder of tables.
    """

    def __init__(self, root: Path, version: str, channel: str = "CAM_FRONT") -> None:
        self.root, self.version, self.channel = Path(root), version, channel
        tables = self.root / version
        if not tables.is_dir():
            found = sorted(path.name for path in self.root.glob("v1.0-*"))
            raise invalid("version", f"a folder of tables in {self.root}", repr(version), f"there are {found}")
        file = tables / f"merope-{channel}-{_fingerprint(tables)}.npz"
        cached = _load(file)
        if cached is None:
            try:
                cached = read_frames(tables, channel)
            except (KeyError, TypeError) as error:
                reason = f"lacks a field or row {error}" if isinstance(error, KeyError) else f"has a bad value: {error}"
                raise ValueError(f"the tables of {tables} cannot be joined: one {reason}; get them again") from None
            _save(cached, file)
        self.frames = cached

    def windows(self, count: int, stride: int = 1, step: int = 1, scenes: Iterable[str] | None = None) -> list[Window]:
        """All runs of `count` frames, `stride` apart, beginning every `step` frames, without a gap in time.

        scenes: names to take, for example a split (`read_split`); unknown names are refused.
        """
        for name, value in (("count", count), ("stride", stride), ("step", step)):
            if not isinstance(value, int) or value < 1:
                raise invalid(name, "an int ≥ 1", repr(value), "windows have frames and go forward")
        table = self.frames
        wanted = set(table.scene_name.tolist()) if scenes is None else set(scenes)
        unknown = wanted - set(table.scene_name.tolist())
        if unknown:
            raise invalid("scenes", f"scenes of {self.version}", sorted(unknown)[:5], "use the split of this version")
        gap = np.diff(table.timestamp_us) * 1e-6 > LARGEST_GAP_S
        breaks = np.flatnonzero((np.diff(table.scene) != 0) | gap) + 1
        windows = []
        for start, stop in zip([0, *breaks], [*breaks, len(table.scene)], strict=True):
            name = str(table.scene_name[table.scene[start]])
            if name in wanted:
                span = (count - 1) * stride + 1
                windows += [Window(name, first, count, stride) for first in range(start, stop - span + 1, step)]
        return windows

    @property
    def longest_scene(self) -> int:
        """Frames of the longest scene."""
        return int(np.bincount(self.frames.scene).max())

    def clip(self, window: Window, height: int, width: int) -> Clip:
        """A window as a clip of the given size; the lens is scaled with the images."""
        rows, table, scene = window.rows, self.frames, self.frames.scene[window.start]
        frames, poses, lens = self.seen(rows, height, width)
        times_s = torch.from_numpy((table.timestamp_us[rows] - table.timestamp_us[rows[0]]) * 1e-6)
        return Clip(
            name=self.name(window),
            world_from_camera=poses,
            lens=lens,
            timestamps_s=times_s,
            fps=FRAME_RATE_HZ / window.stride,
            frames=frames,
            caption=str(table.description[scene]),
            location=str(table.location[scene]),
            traversal=str(table.log[scene]),
        )

    def seen(
        self,
        rows: NDArray[np.int64],  # [T] of the frame table
        height: int,
        width: int,
    ) -> tuple[Tensor, Tensor, Pinhole]:  # uint8 [T, H, W, 3], [T, 4, 4]
        """Images of the given size, their poses, and the lens, which is scaled with them."""
        table = self.frames
        lens = Pinhole(*table.intrinsics[rows[0]].tolist(), *table.size[rows[0]].tolist())
        frames = torch.stack([read_image(self.root / name, height, width) for name in table.filename[rows]])
        return frames, torch.from_numpy(table.world_from_camera[rows]), resized(lens, width, height)  # type: ignore[return-value]

    def trajectory(self, window: Window) -> Trajectory:
        """The path of a window, named like its clip."""
        rows = window.rows
        return Trajectory(
            world_from_camera=torch.from_numpy(self.frames.world_from_camera[rows]),
            is_metric=True,
            convention="nuScenes ego pose ∘ calibration: camera-to-world in the map frame, OpenCV axes, metres",
            timestamps_s=torch.from_numpy(self.frames.timestamp_us[rows] * 1e-6),
            name=self.name(window),
        )

    def name(self, window: Window) -> str:
        """What a window is called in manifests and messages."""
        return f"{window.scene}/{self.channel}/{window.start}"


def read_split(path: Path, name: str) -> list[str]:
    """Scene names of a split from a JSON file {"train": [...], "val": [...]}."""
    splits = load_json(Path(path))
    if not isinstance(splits, dict) or not isinstance(splits.get(name), list):
        there = sorted(splits) if isinstance(splits, dict) else "splits"
        raise invalid("name", f"one of {there} in {path}", repr(name), "check the split's name")
    return list(splits[name])


def read_frames(tables: Path, channel: str) -> Frames:
    """Join the tables for one camera channel, streaming the large ones."""
    calibrations = _calibrations(tables, channel)
    scenes = list(stream_objects(_file(tables, "scene")))
    logs = {row["token"]: row for row in stream_objects(_file(tables, "log"))}
    images = _images(tables, calibrations, {row["token"]: index for index, row in enumerate(scenes)})
    if not images:
        raise invalid("channel", f"a camera with images in {tables}", repr(channel), "for example CAM_FRONT")
    _refuse_duplicates(images)
    ego = _ego_poses(tables, {image.ego_pose for image in images})
    of_image = [calibrations[image.calibration] for image in images]
    world_from_ego = _poses([ego[image.ego_pose] for image in images])
    return Frames(
        filename=np.array([image.filename for image in images]),
        scene=np.array([image.scene for image in images], dtype=np.int64),
        timestamp_us=np.array([image.timestamp_us for image in images], dtype=np.int64),
        world_from_camera=world_from_ego @ _poses([calibration.ego_from_camera for calibration in of_image]),
        intrinsics=np.array([calibration.intrinsics for calibration in of_image]),
        size=np.array([image.size for image in images], dtype=np.int64),
        scene_name=np.array([row["name"] for row in scenes]),
        description=np.array([row["description"] for row in scenes]),
        location=np.array([logs[row["log_token"]]["location"] for row in scenes]),
        log=np.array([logs[row["log_token"]]["logfile"] for row in scenes]),
    )


class _Image(NamedTuple):
    """A row of sample_data; sorts by scene and time."""

    scene: int
    timestamp_us: int
    filename: str
    ego_pose: str
    calibration: str
    size: tuple[int, int]


class _RigidRow(NamedTuple):
    """Translation (metres) and quaternion (w, x, y, z) as a table holds them."""

    translation: list[float]
    rotation: list[float]


class _Calibration(NamedTuple):
    ego_from_camera: _RigidRow
    intrinsics: tuple[float, float, float, float]  # fx, fy, cx, cy


def _images(tables: Path, calibrations: dict[str, _Calibration], scene_index: dict[str, int]) -> list[_Image]:
    scene_of_sample = {row["token"]: scene_index[row["scene_token"]] for row in stream_objects(_file(tables, "sample"))}

    def scene_of(row: dict[str, str]) -> int:
        if row["sample_token"] not in scene_of_sample:
            raise ValueError(f"{tables}/sample.json lacks {row['sample_token']}, the sample of {row['filename']}")
        return scene_of_sample[row["sample_token"]]

    images = [
        _Image(
            scene_of(row),
            row["timestamp"],
            row["filename"],
            row["ego_pose_token"],
            row["calibrated_sensor_token"],
            (row["width"], row["height"]),
        )
        for row in stream_objects(_file(tables, "sample_data"))
        if row["calibrated_sensor_token"] in calibrations
    ]
    return sorted(images)


def _calibrations(tables: Path, channel: str) -> dict[str, _Calibration]:
    """The calibrations of a channel, by token."""
    sensors = {row["token"] for row in stream_objects(_file(tables, "sensor")) if row["channel"] == channel}
    found = {}
    for row in stream_objects(_file(tables, "calibrated_sensor")):
        if row["sensor_token"] in sensors:
            if len(row.get("camera_intrinsic", ())) != 3:
                fix = f"see calibrated_sensor {row['token']}"
                raise invalid("channel", "a camera with intrinsics", repr(channel), fix)
            (fx, _, cx), (_, fy, cy), _ = row["camera_intrinsic"]
            found[row["token"]] = _Calibration(_RigidRow(row["translation"], row["rotation"]), (fx, fy, cx, cy))
    return found


def _ego_poses(tables: Path, tokens: set[str]) -> dict[str, _RigidRow]:
    rows = stream_objects(_file(tables, "ego_pose"))
    found = {row["token"]: _RigidRow(row["translation"], row["rotation"]) for row in rows if row["token"] in tokens}
    if len(found) < len(tokens):
        missing = min(tokens - found.keys())
        problem = f"{tables}/ego_pose.json lacks {len(tokens) - len(found)} poses, first {missing}"
        raise ValueError(f"{problem}; get the table again")
    return found


def _poses(rows: list[_RigidRow]) -> NDArray[np.float64]:  # [N, 4, 4]
    quaternions = torch.tensor([row.rotation for row in rows], dtype=torch.float64)
    norms = torch.linalg.vector_norm(quaternions, dim=-1)
    if not bool(((norms - 1).abs() < 1e-3).all()):
        bad = rows[int((~((norms - 1).abs() < 1e-3)).nonzero()[0])]
        raise invalid("rotation in the tables", "a unit quaternion (w, x, y, z)", bad.rotation, "get the tables again")
    rotations = matrix_from_quaternion(torch.nn.functional.normalize(quaternions, dim=-1))
    return rigid(rotations, torch.tensor([row.translation for row in rows], dtype=torch.float64)).numpy()


def _refuse_duplicates(images: list[_Image]) -> None:
    for before, after in pairwise(images):
        if before[:2] == after[:2]:
            problem = f"{before.filename} and {after.filename} have the same timestamp {after.timestamp_us}"
            raise ValueError(f"{problem}; drop one of them")


def _file(tables: Path, name: str) -> Path:
    path = tables / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; nuScenes needs its table {name}")
    return path


def _fingerprint(tables: Path) -> str:
    """Of the tables as they are now: a cache of other tables is not used."""
    parts = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sorted(tables.glob("*.json"))]
    return f"{zlib.crc32(' '.join([CACHE_VERSION, *parts]).encode()):08x}"


def _save(frames: Frames, file: Path) -> None:
    try:
        with replacing(file) as part:
            np.savez_compressed(part, **{field.name: getattr(frames, field.name) for field in fields(frames)})
    except OSError as error:
        LOG.warning("the tables are read anew each time, as the compact one cannot be kept beside them (%s)", error)


def _load(file: Path) -> Frames | None:
    """The cached table; None where there is none that can be read."""
    if not file.exists():
        return None
    try:
        with np.load(file) as arrays:
            frames = Frames(**{field.name: arrays[field.name] for field in fields(Frames)})
        lengths = {field.name: len(getattr(frames, field.name)) for field in fields(Frames)}
        if len({lengths[name] for name in PER_IMAGE}) > 1:
            raise ValueError(f"its columns have {lengths} rows")
        return frames
    except Exception as error:  # whatever a damaged file sets off
        LOG.warning("kept tables %s cannot be read (%s); they are made again", file, error)
        return None
