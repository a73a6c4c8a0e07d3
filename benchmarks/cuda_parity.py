"""Every encoding on a CUDA device against the CPU: the tests run without a GPU, this is their other half.

    python benchmarks/cuda_parity.py

Self- and cross-attention, with and without tokens without a camera, through a pinhole and, where a method takes it, a
fisheye. float64 must agree to 1e-9; the relative error of bfloat16 against float64 is printed beside it. Exit 1 if not.
"""

import sys
from itertools import product

import torch
from torch import Tensor

import merope
from merope import Cameras, Lens, Pinhole, UnifiedCamera
from merope.encodings import ENCODINGS
from merope.geometry.poses import rigid
from merope.geometry.quaternions import matrix_from_quaternion

LENSES: dict[str, Lens] = {
    "pinhole": Pinhole(120.0, 125.0, 128.0, 70.0, 256, 144),
    "fisheye": UnifiedCamera.from_fov(195.0, 2.13, 256, 144),
}
PINHOLE_ONLY = ("prope", "rayrope")
GRID, KEY_GRID, HEADS = (2, 3), (3, 2), 4


def random_poses(cameras: int, seed: int) -> Tensor:  # [2, cameras, 4, 4]
    """Two clips of cameras a metre or so apart."""
    generator = torch.Generator().manual_seed(seed)
    quaternions = torch.randn(2, cameras, 4, dtype=torch.float64, generator=generator)
    centres = torch.randn(2, cameras, 3, dtype=torch.float64, generator=generator)
    return rigid(matrix_from_quaternion(torch.nn.functional.normalize(quaternions, dim=-1)), centres)


def attended(name: str, lens: Lens, cross: bool, extra: int, device: str, dtype: torch.dtype) -> Tensor:
    """The output of a fixed random call, in float64 on the CPU."""
    encoding = merope.encoding(name)
    torch.manual_seed(0)
    query_tokens = 3 * GRID[0] * GRID[1] + extra
    key_tokens = 2 * KEY_GRID[0] * KEY_GRID[1] if cross else query_tokens
    q = torch.randn(2, HEADS, query_tokens, encoding.head_dim, dtype=torch.float64)
    k, v = (torch.randn(2, HEADS, key_tokens, encoding.head_dim, dtype=torch.float64) for _ in range(2))
    content, key_content = (torch.rand(2, n, 2, dtype=torch.float64).to(device) for n in (query_tokens, key_tokens))
    options: dict[str, object] = {"extra_tokens": extra}
    if cross:
        options |= {
            "key": Cameras(random_poses(2, 5), lens).to(device),
            "key_grid": KEY_GRID,
            "key_times": [100.0, 101.5],
        }
    if encoding.content_channels:
        options |= {"content": content} | ({"key_content": key_content} if cross else {})
    plan = encoding.plan(Cameras(random_poses(3, 1), lens).to(device), GRID, **options)  # type: ignore[arg-type]
    return merope.attend(*(x.to(device, dtype) for x in (q, k, v)), plan).double().cpu()


def main() -> int:
    """Compare, print, and say whether all agree."""
    agree = True
    for name, (lens_name, lens), cross, extra in product(ENCODINGS, LENSES.items(), (False, True), (0, 2)):
        if name in PINHOLE_ONLY and lens_name != "pinhole":
            continue
        exact = attended(name, lens, cross, extra, "cpu", torch.float64)
        error = float((attended(name, lens, cross, extra, "cuda", torch.float64) - exact).abs().max())
        rounded = attended(name, lens, cross, extra, "cuda", torch.bfloat16)
        relative = float((rounded - exact).norm() / exact.norm())
        agree &= error < 1e-9
        kind = f"{lens_name}, {'cross' if cross else 'self'}, {extra} extra"
        print(f"{name:<9} {kind:<26} float64 {error:.1e}  bfloat16 {relative:.1e}{'' if error < 1e-9 else '  DIFFERS'}")
    print("all agree" if agree else "some differ")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
