"""Every encoding on the GPU against the CPU in float64: plans and attention, through a pinhole and a fisheye."""

import pytest
import torch
from torch import Tensor

import merope
from merope.encodings import ENCODINGS
from merope.geometry.cameras import Cameras
from tests.gpu.errors import DEVICE
from tests.scenes import FISHEYE, PINHOLE, random_content, random_poses

LENSES = {"pinhole": PINHOLE, "fisheye": FISHEYE}
PINHOLE_ONLY = ("prope", "rayrope")
GRID, KEY_GRID, HEADS = (2, 3), (3, 2), 4


def attended(name: str, lens: str, cross: bool, extra: int, device: torch.device | str) -> Tensor:
    """The output of a fixed random call in float64, on the CPU."""
    encoding = merope.encoding(name)
    query_tokens = 3 * GRID[0] * GRID[1] + extra
    key_tokens = 2 * KEY_GRID[0] * KEY_GRID[1] if cross else query_tokens
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, HEADS, n, encoding.head_dim) for n in (query_tokens, key_tokens, key_tokens)]
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).to(device) for shape in shapes]
    options: dict[str, object] = {"extra_tokens": extra}
    if cross:
        key = Cameras(random_poses(2, 2, seed=5), LENSES[lens]).to(device)
        options |= {"key": key, "key_grid": KEY_GRID, "key_times": [100.0, 101.5]}
    if encoding.content_channels:
        options["content"] = random_content(2, query_tokens).to(device)
        options |= {"key_content": random_content(2, key_tokens, seed=1).to(device)} if cross else {}
    plan = encoding.plan(Cameras(random_poses(2, 3), LENSES[lens]).to(device), GRID, **options)  # type: ignore[arg-type]
    return merope.attend(*inputs, plan).cpu()


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("lens", LENSES)
@pytest.mark.parametrize("name", ENCODINGS)
def test_the_gpu_computes_what_the_cpu_does(name: str, lens: str, cross: bool) -> None:
    if name in PINHOLE_ONLY and lens != "pinhole":
        with pytest.raises(ValueError, match="Pinhole"):
            attended(name, lens, cross, 0, DEVICE)
        return
    for extra in (0, 2):
        exact = attended(name, lens, cross, extra, "cpu")
        torch.testing.assert_close(attended(name, lens, cross, extra, DEVICE), exact, rtol=1e-9, atol=1e-9)
