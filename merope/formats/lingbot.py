"""LingBot-World's control folder: poses.npy [T, 4, 4] and intrinsics.npy [T, 4], camera-to-world with OpenCV axes.

LingBot divides translations by the longest of a clip, so their unit does not matter to it and is not stated. Its
intrinsics fx, fy, cx, cy are those of images of 480×832, whatever size it generates; one row may stand for all frames.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from merope.errors import invalid
from merope.formats.files import Sample, load_array
from merope.formats.pose_rows import pinhole_of_rows, pinhole_rows, poses_from_rows
from merope.formats.trajectory import Trajectory
from merope.formats.writing import replacing
from merope.geometry.lens_batches import resized

POSES, INTRINSICS = "poses.npy", "intrinsics.npy"
IMAGE_SIZE = (832, 480)  # width and height that the intrinsics belong to


def matches(sample: Sample) -> bool:
    return {POSES, INTRINSICS} <= sample.files


def read(path: Path, image_size: tuple[int, int] = IMAGE_SIZE) -> Trajectory:
    """A folder with both files. image_size: (width, height) of the intrinsics, if they are of another size."""
    if path.is_file():
        raise invalid(str(path), f"a folder with {POSES} and {INTRINSICS}", "a file", "name the folder")
    poses = _numbers(path / POSES, (4, 4))
    intrinsics = _numbers(path / INTRINSICS, (4,))
    count = len(poses)
    if len(intrinsics) != 1 and len(intrinsics) < count:
        expected = f"one row, or at least the {count} of {POSES}"
        raise invalid(str(path / INTRINSICS), expected, len(intrinsics), "export both files again")
    last_row = poses.new_tensor([0.0, 0.0, 0.0, 1.0])
    if bool((poses[:, 3] - last_row).abs().max() > 1e-6):
        raise invalid(str(path / POSES), "matrices with the last row 0 0 0 1", "others", "transpose them")
    return Trajectory(
        world_from_camera=poses_from_rows([f"{path / POSES}[{k}]" for k in range(count)], poses[:, :3]),
        is_metric=False,
        convention="LingBot-World: camera-to-world, OpenCV axes, of arbitrary scale, as it is in the file",
        lens=pinhole_of_rows(intrinsics[:count].expand(count, 4), *image_size),
        name=path.name,
    )


def _numbers(file: Path, shape: tuple[int, ...]) -> torch.Tensor:  # [T, *shape] float64
    array = load_array(file)
    if array.dtype.kind != "f" or array.shape[1:] != shape or not array.size:
        expected = f"floats [T, {', '.join(map(str, shape))}]"
        raise invalid(str(file), expected, f"{array.dtype} {list(array.shape)}", "is this a folder of LingBot-World?")
    return torch.from_numpy(array.astype(np.float64))


def write(trajectory: Trajectory, path: Path) -> None:
    """Both files. The lens, a pinhole, is scaled to images of 480×832; times and names have no place."""
    _, lens = pinhole_rows(trajectory, "lingbot")
    rows, _ = pinhole_rows(replace(trajectory, lens=resized(lens, *IMAGE_SIZE)), "lingbot")
    for name, array in ((POSES, trajectory.world_from_camera), (INTRINSICS, rows)):
        with replacing(path / name) as part, part.open("wb") as file:
            np.save(file, array.numpy())
