"""A procedural driving world: a street with houses, lamps, trees and parked cars, the same from wherever it is seen.

    world = World(seed=3)                               # or World([3, 4, 5]): a batch of worlds
    world = world.cleared(world_from_camera)            # without what stands in the cameras' way
    picture = render(world, Cameras(world_from_camera, lens), height=144, width=256)     # merope.world.render

The world lives in its scene frame (`merope.world.street`): OpenCV axes, metres, the first camera usually at the origin,
looking along +z down the right lane, the ground 1.5 m below. `moved` puts it anywhere else.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from merope.errors import invalid
from merope.geometry.poses import check_rigid, relative
from merope.world.raycast import box_interval, ellipsoid_interval, turned_into
from merope.world.street import Dice, Solids, Streets, furnish, lay_streets, without_things

Tensors = TypeVar("Tensors", Streets, Solids, "Air")


@dataclass(frozen=True, eq=False)
class Air:
    """Light and sight of a world, and the tints that no solid owns; colours in [0, 1]."""

    zenith: Tensor  # [B, 3] float32 colour of the sky overhead
    horizon: Tensor  # [B, 3] colour of the sky at the horizon, and of the haze
    grass: Tensor  # [B, 3]
    sun: Tensor  # [B, 3] unit vector towards the sun, scene axes
    haze_m: Tensor  # [B] distance after which 1/e of a surface's own colour is left
    clouds: Tensor  # [B] 0 clear … 1 overcast
    grain: Tensor  # [B, 2] where in the noise the ground and the clouds begin


@dataclass(frozen=True, eq=False)
class World:
    """One world (`seed` an int) or a batch of worlds (`seed` a sequence of ints); each depends on its seed only."""

    seed: int | Sequence[int]
    device: torch.device | str = "cpu"
    streets: Streets = field(init=False, repr=False)
    solids: Solids = field(init=False, repr=False)
    air: Air = field(init=False, repr=False)
    world_from_scene: Tensor = field(init=False, repr=False)  # [B, 4, 4] float64

    def __post_init__(self) -> None:
        dice = Dice(self.seeds, self.device)
        streets = lay_streets(dice)
        object.__setattr__(self, "streets", streets)
        object.__setattr__(self, "solids", furnish(dice, streets))
        object.__setattr__(self, "air", _weather(dice))
        identity = torch.eye(4, dtype=torch.float64, device=self.device)
        object.__setattr__(self, "world_from_scene", identity.expand(len(self.seeds), 4, 4))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of all worlds, also of a single one."""
        given = tuple(self.seed) if isinstance(self.seed, Iterable) else (self.seed,)
        if not given or any(not isinstance(s, Integral) or isinstance(s, bool) or s < 0 for s in given):
            raise invalid("seed", "an int ≥ 0, or several of them", repr(self.seed), "World(0) or World(range(8))")
        return tuple(int(s) for s in given)

    @property
    def is_batch(self) -> bool:
        return isinstance(self.seed, Iterable)

    def to(self, device: torch.device | str) -> Self:
        """The same worlds on another device."""
        parts = {name: _on_device(getattr(self, name), device) for name in ("streets", "solids", "air")}
        return self._with(device=device, world_from_scene=self.world_from_scene.to(device), **parts)

    def moved(self, motion: Tensor) -> Self:  # [4, 4], or [B, 4, 4] for a batch: new_from_old, rigid
        """The worlds carried elsewhere by a rigid motion. Cameras moved with them see the same images."""
        motion = check_rigid(motion, "motion").to(self.world_from_scene.device)
        if motion.shape not in ((4, 4), (len(self.seeds), 4, 4)):
            expected = f"[4, 4] or [{len(self.seeds)}, 4, 4]"
            raise invalid("motion", expected, list(motion.shape), "pass one motion, or one per world")
        return self._with(world_from_scene=motion @ self.world_from_scene)

    def scene_from_camera(
        self,
        world_from_camera: Tensor,  # [V, 4, 4] or [B, V, 4, 4]
    ) -> Tensor:  # [B, V, 4, 4] float64; B = 1 for one world that all cameras see
        """Poses in the scene frame, centres subtracted in float64 before anything else."""
        poses = check_rigid(world_from_camera)
        if poses.ndim not in (3, 4) or (self.is_batch and (poses.ndim != 4 or len(poses) != len(self.seeds))):
            expected = f"[{len(self.seeds)}, V, 4, 4]" if self.is_batch else "[V, 4, 4] or [B, V, 4, 4]"
            raise invalid("world_from_camera", expected, list(poses.shape), "pass one path per world")
        if poses.device != self.world_from_scene.device:
            fix = f"use world.to({str(poses.device)!r}) or move the cameras"
            raise invalid("world_from_camera", f"on {self.world_from_scene.device} like the world", poses.device, fix)
        return relative(self.world_from_scene[:, None], poses if poses.ndim == 4 else poses[None])

    def cleared(
        self,
        world_from_camera: Tensor,  # [T, 4, 4] or [B, T, 4, 4]
        margin_m: float = 1.2,
    ) -> Self:
        """The same worlds without what is in the way of cameras that go straight from each pose to the next.

        A solid is in the way if the path enters it with its half sizes (radii) widened by margin_m. The rest of its
        tree, lamp or car goes with it. One world with several paths [B, T, 4, 4] is cleared for all of them.
        """
        if not margin_m >= 0.0:
            raise invalid("margin_m", "at least 0", margin_m, "pass the clearance in metres")
        centres = self.scene_from_camera(world_from_camera)[..., :3, 3]
        struck = torch.stack([_struck(self.solids, path, margin_m) for path in _paths(centres, len(self.seeds))]).any(0)
        present = without_things(self.solids.present, struck & self.solids.present, self.solids.thing)
        return self._with(solids=replace(self.solids, present=present))

    def _with(self, **values: object) -> Self:
        changed = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(changed, name, value)
        return changed


def _paths(centres_m: Tensor, worlds: int) -> list[Tensor]:  # [B, T, 3] -> each [worlds, T, 3]
    """One path per world; for a single world each of its paths in turn."""
    return [centres_m] if len(centres_m) == worlds else [path[None] for path in centres_m]


def _struck(
    solids: Solids,
    path_m: Tensor,  # [B, T, 3] scene frame
    margin_m: float,
) -> Tensor:  # bool [B, N]
    """Which solids, widened by the margin, the segments of a path enter."""
    start = path_m[:, :, None]
    step = torch.cat((path_m.diff(dim=1), torch.zeros_like(path_m[:, :1])), dim=1)[:, :, None].expand_as(start)
    yaw = torch.stack((solids.yaw_rad.cos(), solids.yaw_rad.sin()))[:, :, None]
    shape = (*path_m.shape[:2], solids.half_m.shape[1])
    origin = turned_into(yaw, (start - solids.centre_m[:, None]).movedim(-1, 0))
    step = turned_into(yaw, step.movedim(-1, 0).expand(3, *shape))
    half = (solids.half_m + margin_m).movedim(-1, 0)[:, :, None].expand(3, *shape)
    entered = []
    for interval, span in ((box_interval, slice(solids.boxes)), (ellipsoid_interval, slice(solids.boxes, None))):
        enter, leave = interval(*(t[..., span].flatten(1) for t in (origin, step, half)))
        entered.append(((leave >= enter) & (enter <= 1.0) & (leave >= 0.0)).reshape(*shape[:2], -1).any(dim=1))
    return torch.cat(entered, dim=-1)


def _weather(dice: Dice) -> Air:
    """Sun, sky and haze, from a clear morning to a grey one."""
    clouds, azimuth, height = dice.uniform(1), dice.uniform(1, 0.0, 6.2832), dice.uniform(1, 0.5, 0.85)
    level = (1.0 - height.square()).sqrt()
    sun = torch.cat((level * azimuth.cos(), -height, level * azimuth.sin()), dim=-1)
    clear, grey = dice.values.new_tensor([0.27, 0.47, 0.80]), dice.values.new_tensor([0.55, 0.62, 0.71])
    zenith = clear + clouds * (grey - clear)
    horizon = dice.pick(1, ((0.83, 0.87, 0.91), (0.88, 0.87, 0.84), (0.78, 0.83, 0.90)), 0.03)[:, 0]
    grass = dice.pick(1, ((0.36, 0.46, 0.22), (0.43, 0.47, 0.26), (0.30, 0.42, 0.20)), 0.1)[:, 0]
    haze_m = dice.uniform(1, 160.0, 420.0)[:, 0]
    values = (zenith, horizon, grass, sun, haze_m, clouds[:, 0], dice.uniform(2, 0.0, 100.0))
    return Air(*(value.float() for value in values))


def _on_device(part: Tensors, device: torch.device | str) -> Tensors:
    tensors = {f.name: getattr(part, f.name) for f in fields(part) if isinstance(getattr(part, f.name), Tensor)}
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
    return replace(part, **moved)
