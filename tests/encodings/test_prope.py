"""PRoPE against numbers of its public code, its formula, and GTA."""

import pytest
import torch
from golden import Golden
from scenes import FISHEYE, PINHOLE, ZOOM, random_poses, random_qkv
from torch import Tensor

import merope
from merope import GTA, Cameras
from merope.encodings.prope import PRoPE


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_equals_the_public_code(backend: str) -> None:
    golden = Golden("prope.npz")
    ours = golden.attended(PRoPE(golden.head_dim), golden.pinhole, backend)
    assert (ours - golden["out"]).abs().max() < 1e-9


def projection(pose: Tensor, camera: int, scale: float) -> Tensor:  # [4, 4]
    """lift(K) · inverse of the scaled pose for one camera of ZOOM, by general matrix algebra."""
    scaled = pose.clone()
    scaled[:3, 3] *= scale
    k = torch.eye(4, dtype=torch.float64)
    k[0, 0], k[1, 1] = ZOOM.fx[camera].double() / 256, 100 / 144
    k[0, 2], k[1, 2] = 128 / 256 - 0.5, ZOOM.cy[camera].double() / 144 - 0.5
    return k @ torch.linalg.inv(scaled)


def axis_turn(query: int, key: int, channels: int) -> Tensor:  # [channels, channels]
    """Rot(ω_f · (query − key)) that pairs channel f with f + channels/2, ω_f = 100^(−2f / channels)."""
    half = channels // 2
    angle = (query - key) * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cosine, sine = torch.diag(angle.cos()), torch.diag(angle.sin())
    return torch.cat((torch.cat((cosine, -sine), dim=1), torch.cat((sine, cosine), dim=1)))


def test_operator_is_its_formula_for_every_pair() -> None:
    poses, (rows, columns) = random_poses(3), (2, 3)
    plan = PRoPE(head_dim=16, translation_scale=0.3).plan(Cameras(poses, ZOOM), (rows, columns))
    tokens = [(i, row, column) for i in range(3) for row in range(rows) for column in range(columns)]
    for a, (i, query_row, query_column) in enumerate(tokens):
        operators = plan.operators(a)
        for b, (j, key_row, key_column) in enumerate(tokens):
            pair = projection(poses[i], i, 0.3) @ torch.linalg.inv(projection(poses[j], j, 0.3))
            turns = axis_turn(query_column, key_column, 4), axis_turn(query_row, key_row, 4)
            assert (operators[b] - torch.block_diag(pair, pair, *turns)).abs().max() < 1e-11


@pytest.mark.parametrize("lens", [PINHOLE, FISHEYE])
def test_without_intrinsics_it_is_gta(lens: merope.Lens) -> None:
    cameras = Cameras(random_poses(2, 3), lens)
    q, k, v = random_qkv(2, 2, 18, 16)
    prope, gta = (
        merope.attend(q, k, v, encoding.plan(cameras, (2, 3)))
        for encoding in (PRoPE(16, intrinsics=False, translation_scale=0.5), GTA(16, translation_scale=0.5))
    )
    assert torch.equal(prope, gta)


def test_intrinsics_matter_and_per_camera_lenses_are_their_own() -> None:
    poses = random_poses(3)
    zoom, wide = (PRoPE(16).plan(Cameras(poses, lens), (1, 1)).operator(0, 1) for lens in (ZOOM, PINHOLE))
    assert (zoom - wide).abs().max() > 1e-2


def test_other_lenses_are_refused_on_either_side() -> None:
    pinhole, fisheye = Cameras(random_poses(2), PINHOLE), Cameras(random_poses(2), FISHEYE)
    for query, key in ((fisheye, pinhole), (pinhole, fisheye)):
        with pytest.raises(ValueError, match=r"lens must be a Pinhole.*got UnifiedCamera; undistort"):
            PRoPE().plan(query, (2, 3), key=key)


def test_an_infinite_scale_is_refused() -> None:
    with pytest.raises(ValueError, match=r"translation_scale must be finite.*got inf;"):
        PRoPE(translation_scale=float("inf"))
