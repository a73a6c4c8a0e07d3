"""Which tokens lie near a query's epipolar line: CamCo's attention mask (Xu et al. 2024), for any lens.

A point on the ray of token a lies in the plane of that ray and of the two camera centres, wherever it is. So in another
frame it appears on a great circle. CamCo, and CamI2V (Zheng et al. 2024) whose code is public, measure how far a key is
from that line in pixels of a pinhole. Here it is the angle between the key's ray and the plane.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from merope.encodings.additive import RayFeatures
from merope.errors import invalid
from merope.geometry.cameras import Cameras
from merope.geometry.epipolar import epipolar_arc
from merope.geometry.rays import patch_rays

CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0))


@dataclass(frozen=True)
class EpipolarRays(RayFeatures):
    """Plücker coordinates of every token, and the keys that its epipolar lines pass.

    key_frames: "first", queries of all frames see the clip's first frame as in CamCo; "all", they see every frame as in
        CamI2V.
    reach: how far from the line a key's centre may be, in diagonals of its patch as seen from the camera; half of one
        is CamI2V's.
    """

    key_frames: Literal["first", "all"] = "first"
    reach: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.reach < math.inf:
            raise invalid("reach", "positive and finite, in diagonals of a patch", self.reach, "0.5 is CamI2V's")

    @torch.no_grad()
    def mask(
        self,
        cameras: Cameras,
        grid: tuple[int, int],  # rows, columns
    ) -> Tensor:  # bool [B or 1, N, P or N]
        """Which keys each query sees, in float64.

        Without a baseline, in its own frame too, and for a ray along the baseline, there is no line: every point of the
        ray appears in one direction, and the query sees the keys there. Tokens without a camera see nothing and are
        seen by nobody.
        """
        rays, valid = cameras.rays(grid)
        poses, given = cameras.relative_to(cameras.origin()), cameras.world_from_camera
        rounding_m = torch.finfo(cameras.given_dtype).eps * given[..., :3, 3].norm(dim=-1)
        reach_rad = 2 * self.reach * half_diagonals_rad(cameras, grid)
        if poses.ndim == 3:
            rays, valid, poses, rounding_m, reach_rad = (x[None] for x in (rays, valid, poses, rounding_m, reach_rad))
        directions, centres_m = rays @ poses[..., :3, :3].mT, poses[..., :3, 3]  # [B, V, P, 3], [B, V, 3]
        keys = slice(0, 1) if self.key_frames == "first" else slice(None)
        rows = []
        for camera in range(cameras.count):  # one at a time: all pairs in float64 are eight times the mask
            baselines_m = centres_m[:, camera, None] - centres_m[:, keys]
            rounding = rounding_m[:, camera, None] + rounding_m[:, keys]
            near = _near(directions[:, camera], baselines_m, rounding, directions[:, keys], reach_rad[:, keys])
            near &= valid[:, camera, :, None, None] & valid[:, None, keys]
            rows.append(near.flatten(2))
        return torch.cat(rows, dim=1)


def _near(
    query: Tensor,  # [B, P, 3] unit, in one frame with all others
    baselines_m: Tensor,  # [B, V, 3] from every key's camera to the query's
    rounding_m: Tensor,  # [B, V]
    keys: Tensor,  # [B, V, K, 3] unit
    reach_rad: Tensor,  # [B, V, K]
) -> Tensor:  # bool [B, P, V, K]
    """Keys within reach of the plane of a query's ray and the baseline; where there is none, of the ray's direction."""
    arc = epipolar_arc(query[:, :, None], baselines_m[:, None], rounding_m[:, None])
    normal = torch.linalg.cross(arc.far_direction, arc.tangent)
    sine = torch.einsum("bpvc,bvkc->bpvk", normal, keys).abs()
    cosine = torch.einsum("bpc,bvkc->bpvk", query, keys)
    largest_sine, least_cosine = reach_rad.clamp(max=math.pi / 2).sin(), reach_rad.clamp(max=math.pi).cos()
    return torch.where(arc.defined[..., None], sine <= largest_sine[:, None], cosine >= least_cosine[:, None])


def half_diagonals_rad(
    cameras: Cameras,
    grid: tuple[int, int],  # rows, columns
) -> Tensor:  # [(B,) V, P]
    """The angle from every patch's centre to its farthest corner; the camera's largest where a corner is not seen."""
    centres, whole = cameras.rays(grid)
    angles = []
    for offset in CORNERS:
        corners, seen = patch_rays(cameras.lens, grid, cameras.device, offset)
        across = torch.linalg.cross(centres, corners.expand_as(centres)).norm(dim=-1)
        angle = torch.atan2(across, (centres * corners).sum(-1))
        angles.append(torch.where(seen, angle, 0.0))
        whole = whole & seen
    largest = torch.stack(angles).amax(0)
    return torch.where(whole, largest, largest.amax(-1, keepdim=True))
