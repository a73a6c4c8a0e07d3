"""PRoPE against numbers of its public code, its formula, and GTA."""

import pytest
import torch
from golden import Golden
from scenes import FISHEYE, PINHOLE, ZOOM, random_poses, random_qkv
from torch import Tensor

import merope
from merope import GTA, BrownConrady, Cameras, KannalaBrandt, Pinhole, UnifiedCamera
from merope.encodings.intrinsics import paraxial
from merope.encodings.prope import PRoPE

CPU = torch.device("cpu")


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
    assert (prope - gta).abs().max() < 1e-12


def test_intrinsics_matter_and_per_camera_lenses_are_their_own() -> None:
    poses = random_poses(3)
    zoom, wide = (PRoPE(16).plan(Cameras(poses, lens), (1, 1)).operator(0, 1) for lens in (ZOOM, PINHOLE))
    assert (zoom - wide).abs().max() > 1e-2


def test_other_lenses_are_refused_on_either_side() -> None:
    pinhole, fisheye = Cameras(random_poses(2), PINHOLE), Cameras(random_poses(2), FISHEYE)
    for query, key in ((fisheye, pinhole), (pinhole, fisheye)):
        with pytest.raises(ValueError, match=r"a Pinhole for PRoPE without intrinsics=.*got UnifiedCamera; undistort"):
            PRoPE().plan(query, (2, 3), key=key)


@pytest.mark.parametrize(
    ("lens", "fx", "fy"),
    [
        (UnifiedCamera(250.0, 260.0, 130.0, 70.0, 1.5, width=256, height=144), 100.0, 104.0),  # f / (1 + ξ)
        (KannalaBrandt(100.0, 104.0, 130.0, 70.0, 256, 144, k1=0.1, k2=-0.02), 100.0, 104.0),
        (BrownConrady(100.0, 104.0, 130.0, 70.0, 256, 144, k1=-0.2, k2=0.05, p1=0.01, p2=0.02), 100.0, 104.0),
    ],
    ids=["unified", "fisheye", "distorted"],
)
def test_paraxial_intrinsics_are_those_of_the_lens_at_its_axis(lens: merope.Lens, fx: float, fy: float) -> None:
    like = paraxial(lens, CPU)
    assert (like.width, like.height) == (256, 144)
    for found, expected in ((like.fx, fx), (like.fy, fy), (like.cx, 130.0), (like.cy, 70.0)):
        assert abs(float(found) - expected) < 1e-5
    poses = random_poses(3)
    of_lens = PRoPE(16, intrinsics="paraxial").plan(Cameras(poses, lens), (2, 3))
    of_pinhole = PRoPE(16).plan(Cameras(poses, Pinhole(fx, fy, 130.0, 70.0, width=256, height=144)), (2, 3))
    assert (of_lens.operators(0) - of_pinhole.operators(0)).abs().max() < 1e-6


def test_paraxial_intrinsics_of_every_camera_are_its_own() -> None:
    xi = torch.tensor([0.0, 1.0, 2.3], dtype=torch.float64)
    lens = UnifiedCamera.from_fov(torch.tensor([90.0, 150.0, 200.0], dtype=torch.float64), xi, 256, 144)
    assert torch.allclose(paraxial(lens, CPU).fx, lens.fx / (1.0 + xi), rtol=1e-7)
    assert paraxial(PINHOLE, CPU) is PINHOLE
    assert torch.equal(
        PRoPE(16, intrinsics="paraxial").plan(Cameras(random_poses(3), ZOOM), (1, 1)).operator(0, 1),
        PRoPE(16).plan(Cameras(random_poses(3), ZOOM), (1, 1)).operator(0, 1),
    )


def test_other_words_for_intrinsics_are_refused() -> None:
    with pytest.raises(ValueError, match=r"intrinsics must be bool or .paraxial., got 'central' "):
        PRoPE(intrinsics="central")  # type: ignore[arg-type]


def test_an_infinite_scale_is_refused() -> None:
    with pytest.raises(ValueError, match=r"translation_scale must be finite.*got inf;"):
        PRoPE(translation_scale=float("inf"))
