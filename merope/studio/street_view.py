"""The street that a page drives in: what a camera would truly see there, and where a generated camera really was."""

import io
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from merope.demo.drive import WORLDS
from merope.errors import invalid
from merope.evaluate.estimators.render_anchored import RenderAnchoredEstimator
from merope.formats.video import as_bytes
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole
from merope.studio.lens_choice import LensChoice, training_notes
from merope.world.clips import WorldClips
from merope.world.commanded import FIRST_TEST_SEED
from merope.world.render import Render, render
from merope.world.scene import World

JPEG_QUALITY = 90
TILE_M, TILE_PX, FARTHEST_TILE = 100.0, 384, 100
ABOVE_M = 300.0  # of the camera that draws the map: from so high, houses hardly lean
LOOKING_DOWN = ((1, 0, 0, 0), (0, 0, 1, 0), (0, -1, 0, 0), (0, 0, 0, 1))  # the street's ahead is up in the picture


@dataclass(frozen=True)
class Where:
    """One camera on the ground, for the page's view from above."""

    frame: int
    right_m: float
    ahead_m: float
    heading_deg: float  # 0 looks ahead, 90 to the right

    def row(self) -> list[float]:
        return [self.frame, round(self.right_m, 3), round(self.ahead_m, 3), round(self.heading_deg, 2)]


def on_the_ground(world_from_camera: Tensor, frames: list[int]) -> list[Where]:  # [T, 4, 4]
    """Where cameras are and look, seen from above."""
    values = torch.cat((world_from_camera[:, [0, 2], 3], world_from_camera[:, [0, 2], 2]), dim=-1).tolist()
    return [
        Where(frame, right_m, ahead_m, math.degrees(math.atan2(look_right, look_ahead)))
        for frame, (right_m, ahead_m, look_right, look_ahead) in zip(frames, values, strict=True)
    ]


def world_seed(world: int) -> int:
    """Of a street that no model was trained on, by its number."""
    if not isinstance(world, int) or isinstance(world, bool) or not 0 <= world < WORLDS:
        raise invalid("world", f"from 0 to {WORLDS - 1}", repr(world), "try 4")
    return FIRST_TEST_SEED + world


class StreetView:
    """A street of the procedural world through one lens. It is cleared of what the driven cameras would hit."""

    def __init__(self, world: int, lens: LensChoice, clips: WorldClips) -> None:
        self.number, self.seed, self.choice, self.clips = world, world_seed(world), lens, clips
        self.lens = lens.lens(clips)

    @cached_property
    def world(self) -> World:
        return World(self.seed)

    def start(self, frames: int) -> Tensor:  # [frames, 4, 4]
        """The first cameras of the street's own drive."""
        longest = max(self.clips.frames, frames + 1)
        clips = WorldClips(longest, frame_rate_hz=self.clips.frame_rate_hz, prefix_frames=frames)
        return clips.path(self.seed)[:frames]

    def first(self, count: int) -> tuple[Tensor, Tensor]:  # uint8 [count, H, W, 3], [count, 4, 4]
        """What a drive begins with, and its cameras."""
        poses = self.start(count)
        return self.pictures(poses), poses

    def route(self, path: Tensor, count: int) -> Tensor:  # [T, 4, 4]
        """All cameras of a video along a path: the path itself, whose first `count` frames are given."""
        return path

    def frames_along(self, route: Tensor, count: int) -> Tensor:  # [T, 4, 4] -> uint8 [count, H, W, 3]
        """What a video along these cameras begins with. Nothing stands in their way."""
        self.clear(route)
        return self.pictures(route[:count])

    def clear(self, world_from_camera: Tensor) -> None:  # [T, 4, 4]
        """Take away what stands in the way of these cameras."""
        self.world = self.world.cleared(world_from_camera)

    def seen(self, world_from_camera: Tensor) -> Render:  # [T, 4, 4]
        """What these cameras would see; nothing stands in their way from now on."""
        self.clear(world_from_camera)
        cameras = Cameras(world_from_camera, self.lens, plan_dtype=torch.float32)
        return render(self.world, cameras, self.clips.height, self.clips.width)

    def pictures(self, world_from_camera: Tensor) -> Tensor:  # [T, 4, 4] -> uint8 [T, H, W, 3]
        return as_bytes(self.seen(world_from_camera).image)

    def recovered(
        self,
        frames: Tensor,  # uint8 [T, H, W, 3] generated
        world_from_camera: Tensor,  # [T, 4, 4] commanded
        seen: Render,  # by the commanded cameras
    ) -> tuple[Tensor, Tensor]:  # [T, 4, 4] world_from_camera, bool [T] where a pose was found
        """Where the cameras of generated frames really were, in metres."""
        cameras = Cameras(world_from_camera, self.lens, plan_dtype=torch.float32)
        estimate = RenderAnchoredEstimator(self.world, cameras, seen)(frames)
        return estimate.world_from_camera, estimate.valid

    def notes(self, path: Tensor | None = None) -> list[str]:  # [T, 4, 4]
        """In what the cameras differ from all that the model has seen."""
        return training_notes(self.choice, self.clips, path)

    @property
    def title(self) -> str:
        return f"world {self.number}"


def map_tile(world: int, right: int, ahead: int) -> bytes:
    """A square of the street from above as JPEG; tile (0, 0) begins at the start and lies to its right and ahead."""
    if not all(abs(place) <= FARTHEST_TILE for place in (right, ahead)):
        expected = f"within {FARTHEST_TILE} tiles of the start"
        raise invalid("tile", expected, f"{right}, {ahead}", "drive on: the map ends here")
    scene = World(world_seed(world))
    pose = torch.tensor(LOOKING_DOWN, dtype=torch.float64)
    pose[:3, 3] = pose.new_tensor([TILE_M * (right + 0.5), -ABOVE_M, TILE_M * (ahead + 0.5)])
    focal_px = TILE_PX * ABOVE_M / TILE_M
    lens = Pinhole(focal_px, focal_px, TILE_PX / 2, TILE_PX / 2, TILE_PX, TILE_PX)
    seen = render(scene, Cameras(pose[None], lens, plan_dtype=torch.float32), TILE_PX, TILE_PX, samples=2)
    left = torch.exp(-seen.depth_m[0] / scene.air.haze_m)[..., None]  # of the colours, after the haze
    clear = (seen.image[0] - (1.0 - left) * scene.air.horizon[0]) / left
    return jpeg(as_bytes(clear.clamp(0.0, 1.0)))


def jpeg(image: Tensor) -> bytes:  # uint8 [H, W, 3]
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image.cpu().numpy()).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()
