"""MeRoPE with phases of ray directions in place of its rotation block: the definition, and what must hold for it."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import FISHEYE, PINHOLE, degenerate_cameras, random_poses, random_qkv, random_rotations
from torch import Tensor

import merope
from merope import Cameras, MeRoPE
from merope.encodings import merope as encoding_file
from merope.geometry.poses import rigid

GRID, SCALE, NAME = (2, 3), 50.0, "merope_phases"
PHASES = MeRoPE(head_dim=128, direction_scale=SCALE)


def turn(angle_rad: float) -> Tensor:  # [2, 2]
    return torch.tensor(
        [[math.cos(angle_rad), -math.sin(angle_rad)], [math.sin(angle_rad), math.cos(angle_rad)]], dtype=torch.float64
    )


@pytest.mark.parametrize("lens", [PINHOLE, FISHEYE])
def test_pairs_of_channels_turn_by_the_change_of_direction_in_the_querys_camera(lens: merope.Lens) -> None:
    cameras = Cameras(random_poses(3), lens)
    rays, _ = cameras.rays(GRID)
    plan, patches = PHASES.plan(cameras, GRID), GRID[0] * GRID[1]
    for a, b in ((0, 13), (7, 2), (16, 9), (4, 4)):
        (i, p), (j, r) = divmod(a, patches), divmod(b, patches)
        rotations = cameras.world_from_camera[:, :3, :3]
        change = rotations[i].mT @ rotations[j] @ rays[j, r] - rays[i, p]
        angles = [SCALE * 100.0 ** (-m / 6) * float(along) for along in change for m in range(6)]
        expected = torch.block_diag(*(turn(angle) for angle in angles))
        assert (plan.operator(a, b)[36:72, 36:72] - expected).abs().max() < 1e-11


def test_the_other_blocks_are_those_of_the_paper() -> None:
    cameras = Cameras(random_poses(3), PINHOLE)
    ours, papers = (encoding.plan(cameras, GRID).operator(7, 2) for encoding in (PHASES, MeRoPE(head_dim=128)))
    kept = [channel for channel in range(128) if not 36 <= channel < 72]
    assert (ours - papers)[kept][:, kept].abs().max() < 1e-14
    assert (ours - papers).abs().max() > 0.1
    assert not ours[kept][:, 36:72].any()


@given(
    seed=st.integers(0, 10**6),
    lens=st.sampled_from((PINHOLE, FISHEYE)),
    options=st.fixed_dictionaries(
        {},
        optional={
            "head_dim": st.sampled_from((128, 192)),
            "anchor_frame": st.just("transport"),
            "transform_values": st.booleans(),
            "disparity": st.booleans(),
            "rotation": st.booleans(),
            "wavelengths_m": st.just((1.0, 30.0)),
        },
    ),
)
def test_the_named_encoding_is_the_option(seed: int, lens: merope.Lens, options: dict[str, Any]) -> None:
    cameras = Cameras(random_poses(3, seed=seed), lens)
    named, spelt = merope.encoding(NAME, **options), MeRoPE(**options, direction_scale=SCALE)
    ours, theirs = (encoding.plan(cameras, GRID, extra_tokens=1) for encoding in (named, spelt))
    assert (ours.transform_values, ours.groups, ours.head_dim) == (
        theirs.transform_values,
        theirs.groups,
        theirs.head_dim,
    )
    for token in (0, 7, 18):
        torch.testing.assert_close(ours.operators(token), theirs.operators(token), rtol=0, atol=1e-14)


def test_keys_depend_on_the_querys_camera_in_more_channels_than_the_papers() -> None:
    plans = {name: merope.encoding(name).plan(Cameras(random_poses(3), PINHOLE), GRID) for name in ("merope", NAME)}
    grouped = {
        name: sum(block.stop - block.start for block in plan.blocks if block.key.groups > 1)
        for name, plan in plans.items()
    }
    assert grouped == {"merope": 60, NAME: 96}


def test_the_named_encoding_has_phases_and_the_papers_has_none() -> None:
    assert merope.encoding(NAME, direction_scale=20.0).direction_scale == 20.0
    assert merope.encoding("merope").direction_scale is None
    with pytest.raises(ValueError, match=r"direction_scale must be float, got None"):
        merope.encoding(NAME, direction_scale=None)


@given(seed=st.integers(0, 10**6), fisheye=st.booleans())
def test_orthogonal_and_free_of_a_world_frame(seed: int, fisheye: bool) -> None:
    lens, poses = FISHEYE if fisheye else PINHOLE, random_poses(3, seed=seed)
    q, k, v = random_qkv(1, 2, 18, 128)
    plan = merope.encoding(NAME).plan(Cameras(poses, lens), GRID)
    operators, out = plan.operators(1), merope.attend(q, k, v, plan)
    assert (operators @ operators.mT - torch.eye(128, dtype=torch.float64)).abs().max() < 1e-12
    for shift_m, change in (([1e3, -40.0, 7.0], 1e-9), ([1e6, -4e5, 7e5], 1e-6)):
        world = rigid(random_rotations(seed=seed), torch.tensor(shift_m, dtype=torch.float64))
        moved = merope.encoding(NAME).plan(Cameras(world @ poses, lens), GRID)
        assert (out - merope.attend(q, k, v, moved)).abs().max() < change


@pytest.mark.parametrize("name", degenerate_cameras())
def test_backends_agree_in_degenerate_geometry_and_without_cameras(name: str) -> None:
    cameras = degenerate_cameras()[name]
    plan = PHASES.plan(cameras, GRID, extra_tokens=2)
    q, k, v = random_qkv(1, 2, plan.query_tokens, 128)
    out = merope.attend(q, k, v, plan, backend="sdpa")
    assert (out - merope.attend(q, k, v, plan, backend="reference")).abs().max() < 1e-12
    assert torch.equal(plan.operator(0, plan.key_tokens - 1)[:96, :96], torch.eye(96, dtype=torch.float64))


def test_tables_made_for_some_cameras_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cameras = Cameras(random_poses(4), PINHOLE)
    whole = PHASES.plan(cameras, GRID).tensors()
    monkeypatch.setattr(encoding_file, "ENTRIES_AT_ONCE", 1)
    parts = PHASES.plan(cameras, GRID).tensors()
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_dim", [56, 64, 72, 80, 96, 160])
def test_the_error_of_another_head_names_a_partition_that_fits(head_dim: int) -> None:
    with pytest.raises(ValueError, match="such as") as refusal:
        MeRoPE(head_dim=head_dim, direction_scale=SCALE)
    (named,) = re.findall(r"such as \(([\d, ]+)\)", str(refusal.value))
    partition = tuple(int(channels) for channels in named.split(","))
    assert MeRoPE(head_dim=head_dim, direction_scale=SCALE, partition=partition).channels == partition  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"direction_scale": 0.0}, "direction_scale"),
        ({"direction_scale": math.inf}, "direction_scale"),
        ({"partition": (36, 39, 18, 35), "native_split": (19, 8, 8)}, "a multiple of 6 for rotation"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        MeRoPE(head_dim=128, **({"direction_scale": SCALE} | options))  # type: ignore[arg-type]
