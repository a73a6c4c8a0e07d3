"""Clip: a few seconds of video with the camera of every frame, as every dataset reader delivers it."""

from dataclasses import dataclass

from torch import Tensor

from merope.errors import invalid
from merope.geometry.cameras import LATENT_STRIDE, Cameras
from merope.geometry.lenses import Lens
from merope.geometry.poses import check_rigid


@dataclass(frozen=True, eq=False)
class Clip:
    """T frames, their poses (camera-to-world, OpenCV axes, float64) and what is known about them.

    is_metric: translations are metres. location and traversal name the map and the drive, for retrieving history.
    A rig has several `views` of T frames each. Poses and frames stand view by view, as in `Cameras`.
    """

    name: str
    world_from_camera: Tensor  # [views · T, 4, 4] float64
    lens: Lens  # for the size of `frames`
    timestamps_s: Tensor  # [T] float64
    fps: float
    frames: Tensor | None = None  # uint8 [views · T, H, W, 3]
    caption: str = ""
    is_metric: bool = True
    location: str = ""
    traversal: str = ""
    views: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_from_camera", check_rigid(self.world_from_camera, f"poses of {self.name}"))
        count = self.world_from_camera.shape[0]
        if self.frames is not None and self.frames.shape != (count, self.lens.height, self.lens.width, 3):
            expected = [count, self.lens.height, self.lens.width, 3]
            raise invalid(
                f"frames of {self.name}", str(expected), list(self.frames.shape), "scale frames and lens alike"
            )

    def cameras(self) -> Cameras:
        """The camera of every RGB frame."""
        return Cameras(self.world_from_camera, self.lens, views=self.views)

    def latent_cameras(self) -> Cameras:
        """The cameras of the latent frames: those of RGB frames 0, 4, 8, …"""
        return self.cameras().at(slice(None, None, LATENT_STRIDE))
