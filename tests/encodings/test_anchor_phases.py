"""MeRoPE with phases of its anchors' directions in place of their frames: the definition, and what must hold for it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import FISHEYE, PINHOLE, degenerate_cameras, random_poses, random_qkv, random_rotations
from torch import Tensor

import merope
from merope import Cameras, MeRoPE
from merope.geometry.poses import rigid

GRID, SCALE = (2, 3), 12.5
PHASES = MeRoPE(anchor_scale=SCALE)


def turn(angle_rad: float) -> Tensor:  # [2, 2]
    return torch.tensor(
        [[math.cos(angle_rad), -math.sin(angle_rad)], [math.sin(angle_rad), math.cos(angle_rad)]], dtype=torch.float64
    )


@pytest.mark.parametrize("lens", [PINHOLE, FISHEYE])
@pytest.mark.parametrize("fractions", [MeRoPE().fractions, (0.0, 0.15, 1.0)], ids=["one frequency", "two"])
def test_pairs_of_channels_turn_by_where_an_anchor_is_seen(lens: merope.Lens, fractions: tuple[float, ...]) -> None:
    cameras, encoding = Cameras(random_poses(3), lens), MeRoPE(anchor_scale=SCALE, fractions=fractions)
    rays, _ = cameras.rays(GRID)
    plan, patches, frequencies = encoding.plan(cameras, GRID), GRID[0] * GRID[1], 6 // len(fractions)
    for a, b in ((0, 13), (7, 2), (16, 9)):
        (i, p), (j, r) = divmod(a, patches), divmod(b, patches)
        query_from_key = cameras.world_from_camera[i].inverse() @ cameras.world_from_camera[j]
        far, epipole = query_from_key[:3, :3] @ rays[j, r], query_from_key[:3, 3] / query_from_key[:3, 3].norm()
        arc_rad = torch.linalg.cross(far, epipole).norm().atan2(far @ epipole)
        angles = []
        for fraction in fractions:
            seen = ((1 - fraction) * arc_rad).sin() * far + (fraction * arc_rad).sin() * epipole
            change = seen / arc_rad.sin() - rays[i, p]
            angles += [SCALE * 100.0 ** (-m / frequencies) * float(x) for x in change for m in range(frequencies)]
        expected = torch.block_diag(*(turn(angle) for angle in angles))
        assert (plan.operator(a, b)[:36, :36] - expected).abs().max() < 1e-9


def test_the_other_blocks_are_those_of_the_paper() -> None:
    cameras = Cameras(random_poses(3), PINHOLE)
    ours, papers = (encoding.plan(cameras, GRID).operator(7, 2) for encoding in (PHASES, MeRoPE()))
    assert (ours - papers)[36:, 36:].abs().max() < 1e-14
    assert not ours[36:, :36].any()


def largest_step(encoding: MeRoPE) -> float:
    """Of the operator, while the epipole is carried around the pole of MinRot: a key's camera straight behind."""
    operators = []
    for angle_rad in torch.linspace(0.0, 2.0 * math.pi, 9, dtype=torch.float64):
        poses = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
        poses[1, :3, 3] = torch.stack((1e-3 * angle_rad.cos(), 1e-3 * angle_rad.sin(), angle_rad.new_tensor(-5.0)))
        operators.append(encoding.plan(Cameras(poses, PINHOLE), GRID).operator(0, 6)[:36, :36])
    whole = torch.stack(operators)
    return float((whole[1:] - whole[:-1]).abs().max())


def test_phases_have_no_pole() -> None:
    assert largest_step(MeRoPE()) > 0.5
    assert largest_step(PHASES) < 0.01


@given(seed=st.integers(0, 10**6), fisheye=st.booleans())
def test_orthogonal_and_free_of_a_world_frame(seed: int, fisheye: bool) -> None:
    lens, poses = FISHEYE if fisheye else PINHOLE, random_poses(3, seed=seed)
    q, k, v = random_qkv(1, 2, 18, 128)
    plan = PHASES.plan(Cameras(poses, lens), GRID)
    operators, out = plan.operators(1), merope.attend(q, k, v, plan)
    assert (operators @ operators.mT - torch.eye(128, dtype=torch.float64)).abs().max() < 1e-12
    for shift_m, change in (([1e3, -40.0, 7.0], 1e-8), ([1e6, -4e5, 7e5], 1e-5)):
        world = rigid(random_rotations(seed=seed), torch.tensor(shift_m, dtype=torch.float64))
        moved = PHASES.plan(Cameras(world @ poses, lens), GRID)
        assert (out - merope.attend(q, k, v, moved)).abs().max() < change


@pytest.mark.parametrize("name", degenerate_cameras())
def test_backends_agree_in_degenerate_geometry_and_without_cameras(name: str) -> None:
    plan = merope.encoding("merope_phases", anchor_scale=SCALE).plan(degenerate_cameras()[name], GRID, extra_tokens=2)
    q, k, v = random_qkv(1, 2, plan.query_tokens, 128)
    out = merope.attend(q, k, v, plan, backend="sdpa")
    assert (out - merope.attend(q, k, v, plan, backend="reference")).abs().max() < 1e-12
    assert out.isfinite().all()
    assert torch.equal(plan.operator(0, plan.key_tokens - 1)[:96, :96], torch.eye(96, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchor_scale": 0.0}, "anchor_scale must be"),
        ({"anchor_frame": "transport"}, "anchor_frame must be left out with anchor_scale"),
        ({"partition": (18, 54, 24, 32)}, "a multiple of 36 for disparity"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeRoPE(head_dim=128, **({"anchor_scale": SCALE} | options))  # type: ignore[arg-type]
