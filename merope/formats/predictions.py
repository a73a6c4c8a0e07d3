"""Cameras that a network estimated, in an .npz file under its own names: VGGT, Depth Anything 3 and MapAnything.

VGGT has `extrinsic` and `intrinsic`, Depth Anything 3 `extrinsics` and `intrinsics`: both world-to-camera, of arbitrary
scale. MapAnything has `camera_poses` and `intrinsics`: camera-to-world, in metres. Its app writes the same under VGGT's
names. All have OpenCV axes, matrices of intrinsics for the size of the images that the network saw, and arrays beside
them that tell that size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import Sample, archive_shapes, load_archived
from merope.formats.pose_rows import pinhole_of_rows, pinhole_rows, poses_from_rows
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replacing
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import inverse

SIZES = {"depth": (1, 2), "images": (2, 3), "image": (1, 2), "img_no_norm": (1, 2), "depth_z": (1, 2)}
"""Arrays beside the cameras, with the places of height and width in their shapes."""


@dataclass(frozen=True)
class Network:
    """How a network names its cameras."""

    title: str
    poses: str
    intrinsics: str
    is_inverted: bool  # world-to-camera
    is_metric: bool
    first_pixel_px: float = 0.5  # where its intrinsics have the centre of the first pixel; ours is at 0.5
    app: "Network | None" = None  # the same network under the names of its app

    def matches(self, sample: Sample) -> bool:
        network, shapes = self._of(sample.archive), sample.archive
        if network is None or not {network.poses, network.intrinsics} <= shapes.keys():
            return False
        return len(shapes[network.poses]) == 3

    def read(self, path: Path, image_size: tuple[int, int] | None = None) -> Trajectory:
        """image_size: (width, height) of the intrinsics, if no array tells."""
        shapes = archive_shapes(path)
        return _read(self._of(shapes) or self, path, shapes, image_size)

    def write(self, trajectory: Trajectory, path: Path) -> None:
        """The cameras alone, and an empty depth map of their image size."""
        _write(self, trajectory, path)

    def _of(self, shapes: Mapping[str, tuple[int, ...]]) -> "Network | None":
        return self.app if _is_of_app(shapes) else self


VGGT = Network("VGGT", "extrinsic", "intrinsic", is_inverted=True, is_metric=False)
"""predictions.npz of VGGT's demos."""
DA3 = Network("Depth Anything 3", "extrinsics", "intrinsics", is_inverted=True, is_metric=False)
"""results.npz of Depth Anything 3 (`npz`, `mini_npz`)."""
_APP = Network("MapAnything's app", "extrinsic", "intrinsic", False, is_metric=True, first_pixel_px=0.0)
MAPANYTHING = replace(_APP, title="MapAnything", poses="camera_poses", intrinsics="intrinsics", app=_APP)
"""MapAnything's views stacked under their own names, or predictions.npz of its app."""


def _is_of_app(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """MapAnything's app has whole matrices and one mask; VGGT has 3×4 and none."""
    return "final_mask" in shapes and shapes.get("extrinsic", ())[1:] == (4, 4)


def _read(
    network: Network, path: Path, shapes: dict[str, tuple[int, ...]], image_size: tuple[int, int] | None
) -> Trajectory:
    for name in (network.poses, network.intrinsics):
        if name not in shapes:
            expected = f"an archive of {network.title} with {name}"
            raise invalid(str(path), expected, f"only {sorted(shapes)[:8]}", "export the cameras too")
    matrices, calibrations = (load_archived(path, name) for name in (network.poses, network.intrinsics))
    count = matrices.shape[0] if matrices.ndim else 0
    if matrices.shape not in ((count, 3, 4), (count, 4, 4)) or calibrations.shape != (count, 3, 3) or not count:
        got = f"{list(matrices.shape)} and {list(calibrations.shape)}"
        raise invalid(str(path), "matrices [N, 3, 4] or [N, 4, 4] and [N, 3, 3]", got, "leave out the batch dimension")
    places = [f"{path} {network.poses}[{k}]" for k in range(count)]
    poses = poses_from_rows(places, _float64(matrices))
    size = image_size or _image_size(shapes, count)
    direction = "world-to-camera, inverted" if network.is_inverted else "camera-to-world"
    scale = "metres, as the network estimates them" if network.is_metric else "arbitrary scale"
    return Trajectory(
        world_from_camera=inverse(poses) if network.is_inverted else poses,
        is_metric=network.is_metric,
        convention=f"{network.title}: {direction}; OpenCV axes; {scale}" + ("" if size else "; no lens, as no size"),
        lens=None if size is None else _lens(_float64(calibrations), size, 0.5 - network.first_pixel_px),
        name=path.stem,
    )


def _float64(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    return torch.from_numpy(array.astype(np.float64))


def _image_size(shapes: dict[str, tuple[int, ...]], count: int) -> tuple[int, int] | None:  # width, height
    for name, (row, column) in SIZES.items():
        shape = shapes.get(name, ())
        if name == "images" and shape[3:] == (3,):  # MapAnything's app has the channels last
            row, column = 1, 2
        if len(shape) > column and shape[0] == count:
            return shape[column], shape[row]
    return None


def _lens(calibrations: Tensor, size: tuple[int, int], shift_px: float) -> Pinhole:  # [N, 3, 3]
    focal_px, centre_px = calibrations.diagonal(dim1=-2, dim2=-1)[:, :2], calibrations[:, :2, 2] + shift_px
    return pinhole_of_rows(torch.cat((focal_px, centre_px), dim=-1), *size)


def _write(network: Network, trajectory: Trajectory, path: Path) -> None:
    rows, lens = pinhole_rows(trajectory, network.title)
    count = trajectory.count
    calibrations = torch.zeros(count, 3, 3, dtype=torch.float64)
    calibrations[:, [0, 1, 0, 1], [0, 1, 2, 2]] = rows
    calibrations[:, :2, 2] -= 0.5 - network.first_pixel_px
    calibrations[:, 2, 2] = 1.0
    poses = trajectory.world_from_camera
    matrices = inverse(poses)[:, :3] if network.is_inverted else poses
    depth = np.broadcast_to(np.float16(0), (count, lens.height, lens.width))
    arrays: dict[str, Any] = {network.poses: matrices.numpy(), network.intrinsics: calibrations.numpy(), "depth": depth}
    with replacing(path) as part, part.open("wb") as file:  # savez would append .npz to other names
        np.savez_compressed(file, **arrays)
