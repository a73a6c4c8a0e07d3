"""GTA against numbers of both public codes, and the growth that the paper shows for it."""

import pytest
import torch
from golden import Golden
from scenes import PINHOLE, random_poses, straight_drive

from merope import GTA, Cameras
from merope.geometry.poses import inverse


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(
    ("file", "options"),
    [("gta.npz", {}), ("gta_original.npz", {"image_plane": "so2", "translation_scale": 0.25})],
)
def test_equals_the_public_code(file: str, options: dict[str, object], backend: str) -> None:
    golden = Golden(file)
    ours = golden.attended(GTA(golden.head_dim, **options), PINHOLE, backend)
    assert (ours - golden["out"]).abs().max() < 1e-9


def test_camera_block_is_the_relative_pose() -> None:
    poses = random_poses(2)
    u = GTA(translation_scale=0.25).plan(Cameras(poses, PINHOLE), (1, 1)).operator(0, 1)
    expected = inverse(poses[0]) @ poses[1]
    expected[:3, 3] *= 0.25
    assert (u[:64, :64] - torch.block_diag(*[expected] * 16)).abs().max() < 1e-12


def test_so2_turns_each_axis_on_its_own_grid() -> None:
    """Query (row 1 of 2, column 0 of 4), key (row 1 of 4, column 2 of 3): coordinates 1/2, 0 and 1/4, 2/3."""
    cameras = Cameras(random_poses(1), PINHOLE)
    plan = GTA(head_dim=16, image_plane="so2").plan(cameras, (2, 4), key=cameras, key_grid=(4, 3))
    u = plan.operator(4, 5)
    turns = [f * delta for f in (0.5, 1.0) for delta in (1 / 4 - 1 / 2, 2 / 3 - 0)]
    angles = 2 * torch.pi * torch.tensor(turns, dtype=torch.float64)
    pairs = [torch.stack((torch.stack((a.cos(), -a.sin())), torch.stack((a.sin(), a.cos())))) for a in angles]
    assert (u[8:, 8:] - torch.block_diag(*pairs)).abs().max() < 1e-12


@pytest.mark.parametrize("layout", ["rope", "so2"])
def test_values_grow_with_the_baseline(layout: str) -> None:
    """‖U v‖ of Eq. 4 is linear in the baseline once it dominates: ten times the metres, ten times the norm."""
    value = torch.ones(128, dtype=torch.float64)
    encoding = GTA(image_plane=layout)
    norms = [
        (encoding.plan(Cameras(straight_drive(2, step_m), PINHOLE), (1, 1)).operator(0, 1) @ value).norm()
        for step_m in (1e3, 1e4)
    ]
    assert float(norms[1] / norms[0]) == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_plane": "so3"}, "image_plane must be .*got 'so3';"),
        ({"translation_scale": float("nan")}, "translation_scale must be finite.*got nan;"),
        ({"translation_scale": -1.0}, r"translation_scale must be .* at least 0, got -1\.0;"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GTA(**options)
