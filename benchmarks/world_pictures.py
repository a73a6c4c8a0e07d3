"""The pictures of docs/world.md.

python benchmarks/world_pictures.py [--out docs/images]
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from merope.formats.video import write_image
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import UnifiedCamera
from merope.geometry.poses import rigid
from merope.world.render import render
from merope.world.scene import World
from merope.world.street import LANE_M, beside_street

LENSES = ((64.0, 0.0), (120.0, 0.6), (173.0, 1.66))  # FoV in degrees, ξ


def mosaic(rows: list[list[Tensor]]) -> Tensor:  # lists of [H, W, 3] in [0, 1] -> uint8 [H, W, 3]
    """Images side by side, row below row."""
    picture = torch.cat([torch.cat(row, dim=1) for row in rows], dim=0)
    return (255 * picture).round().to(torch.uint8)


def through_lenses(seeds: tuple[int, ...]) -> Tensor:  # uint8 [H, W, 3]
    """One row a world, one column a lens."""
    start = torch.eye(4, dtype=torch.float64)[None]
    lenses = [UnifiedCamera.from_fov(fov_deg, xi, 352, 198) for fov_deg, xi in LENSES]
    worlds = [World(seed).cleared(start) for seed in seeds]
    return mosaic([[render(w, Cameras(start, lens), 198, 352, samples=3).image[0] for lens in lenses] for w in worlds])


def driving(seed: int, length_m: float, count: int) -> Tensor:  # uint8 [H, W, 3]
    """Frames along the right lane of street 0, and their inverse depth below."""
    world = World(seed)
    along_m = torch.linspace(0, length_m, count, dtype=torch.float64)[None]
    x, z, heading = beside_street(world.streets, 0, along_m, torch.full_like(along_m, LANE_M / 2))
    cosine, sine, zero = heading[0].cos(), heading[0].sin(), torch.zeros_like(heading[0])
    turns = torch.stack((cosine, zero, sine, zero, zero + 1, zero, -sine, zero, cosine), dim=-1).reshape(-1, 3, 3)
    path = rigid(turns, torch.stack((x[0], zero, z[0]), dim=-1))
    lens = UnifiedCamera.from_fov(80.0, 0.0, 256, 144)
    seen = render(world.cleared(path), Cameras(path, lens), 144, 256, samples=3)
    near = (4 / seen.depth_m).clamp(max=1.0).sqrt()[..., None].expand(-1, -1, -1, 3)
    return mosaic([list(seen.image), list(near)])


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description="draw the pictures of docs/world.md")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    write_image(through_lenses((1, 8)), options.out / "world-lenses.png")
    write_image(driving(4, 60.0, 5), options.out / "world-drive.png")
    print(f"wrote {options.out}/world-lenses.png and world-drive.png")


if __name__ == "__main__":
    main()
