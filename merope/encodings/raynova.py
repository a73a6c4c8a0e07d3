"""RayNova: rotary phases of every ray's six coordinates in a fixed world frame (Xie et al. 2026)."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from merope.attention.plan import Block
from merope.encodings.protocol import Encoding
from merope.encodings.rotary import check_head_dim, check_positive, phase_block, rotary_frequencies, rotary_phases
from merope.encodings.tokens import Tokens


@dataclass(frozen=True)
class RayNova(Encoding):
    """Rot(key phase − query phase): two eighths of the head for time, one each for six coordinates of the ray.

    The coordinates are the ray's direction in the world (x, y, z) and where it lies (x, y, z). Each slice of n channels
    has the phases scale · coordinate · base^(−2m / n) on adjacent pairs. U is orthogonal, but it depends on the world
    frame: pass poses in the frame the model was trained with (RayNova's is that of the clip's first vehicle pose),
    since phases of coordinates far from the origin wrap around. A camera branch takes that of the clip's first camera.

    transform_values: False as in RayNova, where values stay as they are.
    position: "plucker" is the ray's moment o × d (m), as the MeRoPE paper describes the method; "centre" is the camera
        centre o (m), the default of the released code.
    seconds_per_frame: turns `times`, which are latent frames, into RayNova's seconds. The default is four frames per
        latent frame at the 12 Hz of nuScenes, 1/3 s; 1.0 if your times are seconds.
    time_scale, direction_scale, position_scale: radians per second, per unit of direction and per metre of the highest
        frequency.
    rope_base: base of the frequencies.
    """

    in_world: ClassVar[bool] = True

    transform_values: bool = field(default=False, kw_only=True)
    position: Literal["plucker", "centre"] = "plucker"
    seconds_per_frame: float = 4 / 12
    time_scale: float = 30.0
    direction_scale: float = 50.0
    position_scale: float = 2.0
    rope_base: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_dim(self.head_dim, 16)
        fix = "divide the frames per latent frame by the frame rate"
        check_positive("seconds_per_frame", self.seconds_per_frame, fix)
        for name in ("time_scale", "direction_scale", "position_scale", "rope_base"):
            check_positive(name, getattr(self, name), f"RayNova has {getattr(RayNova, name):g}")

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """Time, then the six coordinates of the ray."""
        return (
            phase_block("time", 0, query, key, self._time_phases),
            phase_block("ray", self.head_dim // 4, query, key, self._ray_phases, camera=True),
        )

    def _time_phases(self, tokens: Tokens) -> Tensor:  # [B, N, head_dim / 8]
        scaled = self.time_scale * self.seconds_per_frame * tokens.positions[..., :1]
        return rotary_phases(scaled, (self.head_dim // 4,), self.rope_base)

    def _ray_phases(self, tokens: Tokens) -> Tensor:  # [B, N, 6 · head_dim / 16]
        """Phases of direction x, y, z and position x, y, z; 0 for tokens without a camera."""
        rotation, centre_m = tokens.world_from_camera[..., :3, :3], tokens.world_from_camera[..., None, :3, 3]
        directions = tokens.rays @ rotation.mT  # [B, V, P, 3] world frame
        centre_m = centre_m.expand_as(directions)
        position_m = centre_m if self.position == "centre" else torch.linalg.cross(centre_m, directions)
        scaled = torch.cat((self.direction_scale * directions, self.position_scale * position_m), dim=-1)
        frequencies = rotary_frequencies(self.head_dim // 8, self.rope_base, scaled.device)
        phases = (scaled[..., None] * frequencies).flatten(-2)
        return tokens.per_token(phases, torch.zeros(phases.shape[-1]), entry_dims=1)
