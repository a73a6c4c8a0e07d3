"""The examples of the page on encodings work as printed."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scenes import PINHOLE, random_poses, random_qkv, random_rotations

import merope
from merope import Cameras
from merope.encodings import ENCODINGS
from merope.geometry.poses import rigid

PAGE = (Path(__file__).parents[1] / "docs" / "encodings.md").read_text()


def example_below(heading: str) -> str:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


@pytest.fixture
def example() -> Iterator[None]:
    code = example_below("Add one")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    exec(code, {"__name__": "example"})
    yield
    del ENCODINGS["ground"]


@pytest.mark.usefixtures("example")
def test_added_encoding_works() -> None:
    poses = random_poses(3)
    encoding = merope.encoding("ground", head_dim=16)
    plan = encoding.plan(Cameras(poses, PINHOLE), (2, 2), extra_tokens=1)
    q, k, v = random_qkv(1, 2, 13, 16)
    out = merope.attend(q, k, v, plan)
    assert (out - merope.attend(q, k, v, plan, backend="reference")).abs().max() < 1e-12
    world = rigid(random_rotations(seed=3), torch.tensor([10.0, -4.0, 7.0], dtype=torch.float64))
    moved = encoding.plan(Cameras(world @ poses, PINHOLE), (2, 2), extra_tokens=1)
    assert (out - merope.attend(q, k, v, moved)).abs().max() < 1e-9


def test_the_example_of_visibility_works() -> None:
    cameras = Cameras(random_poses(12), PINHOLE)
    made = {"merope": merope, "enc": merope.encoding("ucpe", head_dim=16), "cameras": cameras, "grid": (1, 2)}
    exec(example_below("Which cameras see which"), made)
    q, k, v = random_qkv(1, 2, 24, 16)
    window = made["enc"].plan(cameras, (1, 2), sees=made["window"])
    streamed = merope.attend(q[:, :, 18:], k, v, made["stream"])
    assert (streamed - merope.attend(q, k, v, window)[:, :, 18:]).abs().max() < 1e-12
    assert len(made["copies"].intervals) == 12
    assert made["own"].table().tolist() == [[[0, 2], [2, 2]], [[0, 1], [3, 5]]]
    assert "sees 6 to 24 key tokens" in str(made["causal"])


def test_every_encoding_is_documented() -> None:
    for name in ENCODINGS:
        assert f"| `{name}` |" in PAGE
