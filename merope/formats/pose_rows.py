"""What files hold in rows of numbers, one per frame: poses, times and pinholes, and the same of a trajectory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.trajectory import Trajectory
from merope.geometry.lenses import Pinhole
from merope.geometry.poses import check_rigid, rigid
from merope.geometry.quaternions import matrix_from_quaternion, quaternion_from_matrix

QUATERNION_TOLERANCE = 1e-2  # files with four digits are off by 1e-4


def poses_from_rows(
    places: Sequence[str],
    matrices: Tensor,  # [T, 3, 4] or [T, 4, 4] as the file has them: camera-to-world or world-to-camera
) -> Tensor:  # [T, 4, 4] float64, rigid
    """Rigid motions, or an error that names the line of the first matrix that is none."""
    poses = matrices if matrices.shape[-2] == 4 else rigid(matrices[..., :3], matrices[..., 3])
    try:
        return check_rigid(poses)
    except ValueError:
        for place, pose in zip(places, poses, strict=True):
            check_rigid(pose, place)
        raise


def poses_from_quaternions(
    places: Sequence[str],
    wxyz: Tensor,  # [T, 4]
    centres: Tensor,  # [T, 3]
) -> Tensor:  # [T, 4, 4] float64, rigid
    """Rigid motions of quaternions that are of unit length but for the digits of the file."""
    norms = torch.linalg.vector_norm(wxyz, dim=-1)
    bad = (~((norms - 1).abs() < QUATERNION_TOLERANCE)).nonzero()
    if len(bad):
        k = int(bad[0])
        fix = "check the order of the columns and that no line is damaged"
        raise invalid(places[k], "a unit quaternion", f"one of length {float(norms[k]):.4g}", fix)
    rotation = matrix_from_quaternion(wxyz / norms[:, None])
    return poses_from_rows(places, torch.cat((rotation, centres[..., None]), dim=-1))


def quaternion_rows(poses: Tensor) -> Tensor:  # [T, 4, 4] -> [T, 7] w x y z, x y z
    """The inverse of `poses_from_quaternions`."""
    return torch.cat((quaternion_from_matrix(poses[:, :3, :3]), poses[:, :3, 3]), dim=-1)


def shared_or_per_frame(values: Sequence[float] | Tensor) -> Tensor:  # [T] -> [] or [T] float64
    """A lens parameter of T frames: one number if all frames agree."""
    tensor = torch.as_tensor(values, dtype=torch.float64)
    return tensor[0] if bool((tensor == tensor[0]).all()) else tensor


def required_times(trajectory: Trajectory, format: str) -> list[float]:
    """The timestamps in seconds, for a format that does not go without."""
    if trajectory.timestamps_s is None:
        raise invalid("trajectory.timestamps_s", f"given for {format}", None, "add times, such as index / frame rate")
    return trajectory.timestamps_s.tolist()


def stamps_ns(trajectory: Trajectory, format: str) -> list[int]:
    """The times on the clock of the source."""
    return [trajectory.time_origin_ns + round(1e9 * time_s) for time_s in required_times(trajectory, format)]


def pinhole_rows(trajectory: Trajectory, format: str) -> tuple[Tensor, Pinhole]:  # [T, 4] float64
    """fx, fy, cx and cy of every frame, and their lens, for a format that knows no other kind."""
    lens = trajectory.lens
    if not isinstance(lens, Pinhole):
        fix = "undistort the images first, or write merope JSON"
        raise invalid("trajectory.lens", f"a Pinhole for {format}", f"another {type(lens).__name__}", fix)
    values = [torch.as_tensor(value).double() for value in (lens.fx, lens.fy, lens.cx, lens.cy)]
    return torch.stack([value.expand(trajectory.count) for value in values], dim=-1), lens


def pinhole_of_rows(rows: Tensor, width: int, height: int) -> Pinhole:  # [T, 4] fx, fy, cx, cy
    """One lens if all frames agree, else one per frame."""
    fx, fy, cx, cy = (shared_or_per_frame(column) for column in rows.unbind(-1))
    return Pinhole(fx, fy, cx, cy, width, height)
