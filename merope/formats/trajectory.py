"""Trajectory: a camera path as it came from a file, already in this library's conventions."""

from dataclasses import dataclass, replace

from torch import Tensor

from merope.errors import invalid
from merope.geometry.lens_batches import picked, require_lens
from merope.geometry.lenses import Lens
from merope.geometry.poses import check_rigid

FARTHEST = 1e12  # beyond, float64 steps by 0.1 mm and more, and squared distances may overflow


def check_near(world_from_camera: Tensor) -> None:  # [T, 4, 4]
    """Refuse poses too far from the origin to be told apart."""
    farthest = max(world_from_camera[:, :3, 3].abs().flatten().tolist(), default=0.0)
    if farthest > FARTHEST:
        fix = "check the unit and that the file is not damaged"
        raise invalid("world_from_camera", f"within {FARTHEST:g} of the origin", f"{farthest:.3g}", fix)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """T poses: camera-to-world, OpenCV axes, float64, with what is known about them.

    is_metric: the unit is the metre. False for structure from motion and the like, whose scale is arbitrary; never
        guessed from the numbers.
    convention: what the source holds and how it was converted, in words a user can check.
    time_origin_ns: seconds since 1970 in float64 are good to 240 ns only. Readers of whole nanoseconds take the first
        one off before they divide.
    """

    world_from_camera: Tensor  # [T, 4, 4] float64
    is_metric: bool
    convention: str
    timestamps_s: Tensor | None = None  # [T] float64, increasing
    lens: Lens | None = None  # one lens, or one per frame (batch_shape [T])
    frame_names: tuple[str, ...] | None = None  # image files, one per pose
    name: str = ""
    time_origin_ns: int = 0  # what the source's clock showed at timestamps_s = 0

    def __post_init__(self) -> None:
        poses = check_rigid(self.world_from_camera)
        if poses.ndim != 3 or poses.shape[0] == 0:
            raise invalid("world_from_camera", "[T, 4, 4] with T ≥ 1", list(poses.shape), "pass one path at a time")
        object.__setattr__(self, "world_from_camera", poses)
        check_near(poses)
        count = poses.shape[0]
        if self.timestamps_s is not None and not isinstance(self.timestamps_s, Tensor):
            got = type(self.timestamps_s).__name__
            raise invalid("timestamps_s", f"a torch.Tensor [{count}]", got, "use torch.as_tensor")
        if self.timestamps_s is not None and self.timestamps_s.shape != (count,):
            raise invalid("timestamps_s", f"[{count}]", list(self.timestamps_s.shape), "pass one time per pose")
        if self.frame_names is not None and len(self.frame_names) != count:
            raise invalid("frame_names", f"{count} names", len(self.frame_names), "pass one name per pose")
        if self.lens is not None:
            require_lens(self.lens)
        if self.lens is not None and tuple(self.lens.batch_shape) not in ((), (count,)):
            raise invalid("lens", f"one, or one per pose [{count}]", list(self.lens.batch_shape), "match the poses")

    @property
    def count(self) -> int:
        """Number of poses T."""
        return self.world_from_camera.shape[0]

    def at(self, rows: Tensor) -> "Trajectory":  # [N] -> N poses
        """Some of its poses, each with its time, lens and name."""
        return replace(
            self,
            world_from_camera=self.world_from_camera[rows],
            timestamps_s=None if self.timestamps_s is None else self.timestamps_s[rows],
            lens=None if self.lens is None else picked(self.lens, rows),
            frame_names=None if self.frame_names is None else tuple(self.frame_names[row] for row in rows.tolist()),
        )
