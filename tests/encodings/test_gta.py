"""GTA against numbers of both public codes, and the growth that the paper shows for it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import (
    FISHEYE,
    PINHOLE,
    assert_backends_agree,
    degenerate_cameras,
    mixed_cameras,
    random_poses,
    random_qkv,
    random_rotations,
    straight_drive,
)

import merope
from merope import GTA, Cameras
from merope.geometry.poses import inverse, rigid

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LAYOUTS = ["rope", "so2"]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(
    ("file", "options"),
    [("gta.npz", {}), ("gta_original.npz", {"image_plane": "so2", "translation_scale": 0.25})],
)
def test_equals_the_public_code(file: str, options: dict[str, object], backend: str) -> None:
    golden = np.load(GOLDEN / file)
    q, k, v, out = (torch.from_numpy(golden[name]) for name in ("q", "k", "v", "out"))
    rows, columns = golden["grid"].tolist()
    cameras = Cameras(torch.from_numpy(golden["world_from_camera"]), PINHOLE)
    plan = GTA(head_dim=q.shape[-1], **options).plan(cameras, (rows, columns))
    assert (merope.attend(q, k, v, plan, backend=backend) - out).abs().max() < 1e-9


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_backends_agree(layout: str, batch: int) -> None:
    query = mixed_cameras(batch == 2)
    key = Cameras(random_poses(batch, 2, seed=5), FISHEYE)
    encoding = GTA(head_dim=16, image_plane=layout)
    for plan in (
        encoding.plan(query, (3, 4), extra_tokens=2),
        encoding.plan(query, (3, 4), key=key, key_grid=(2, 3), key_times=[100.0, 101.5], key_extra_tokens=1),
    ):
        assert not plan.query_has_camera.all()
        assert_backends_agree(plan, batch=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_grow_with_the_baseline(layout: str) -> None:
    """‖U v‖ of Eq. 4 is linear in the baseline once it dominates: ten times the metres, ten times the norm."""
    value = torch.ones(128, dtype=torch.float64)
    encoding = GTA(image_plane=layout)
    norms = [
        (encoding.plan(Cameras(straight_drive(2, step_m), PINHOLE), (1, 1)).operator(0, 1) @ value).norm()
        for step_m in (1e3, 1e4)
    ]
    assert float(norms[1] / norms[0]) == pytest.approx(10, rel=1e-3)


@given(seed=st.integers(0, 10**6), exponent=st.floats(-2, 3), layout=st.sampled_from(LAYOUTS))
def test_any_rigid_change_of_the_world_changes_nothing(seed: int, exponent: float, layout: str) -> None:
    poses = random_poses(3, seed=seed)
    world = rigid(random_rotations(seed=seed + 1), 10**exponent * random_poses(seed=seed + 2)[:3, 3])
    q, k, v = random_qkv(1, 2, 18, 16)
    encoding = GTA(head_dim=16, image_plane=layout)
    outputs = [merope.attend(q, k, v, encoding.plan(Cameras(p, PINHOLE), (2, 3))) for p in (poses, world @ poses)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-9


def test_world_frame_does_not_matter_even_far_away() -> None:
    poses = random_poses(3)
    world = rigid(random_rotations(seed=5), torch.tensor([4.2e6, -3.1e6, 3.7e6], dtype=torch.float64))
    q, k, v = random_qkv(1, 2, 18, 128)
    outputs = [merope.attend(q, k, v, GTA().plan(Cameras(p, PINHOLE), (2, 3))) for p in (poses, world @ poses)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-6


@pytest.mark.parametrize("name", degenerate_cameras())
def test_degenerate_geometry_is_finite(name: str) -> None:
    cameras = degenerate_cameras()[name]
    poses = cameras.world_from_camera.clone().requires_grad_()
    plan = GTA(head_dim=16).plan(Cameras(poses, cameras.lens), (3, 3))
    out = merope.attend(*random_qkv(1, 1, plan.query_tokens, 16), plan)
    (gradient,) = torch.autograd.grad(out.square().sum(), poses)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


def test_head_dim_is_checked() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 8, got 30; the nearest is 32"):
        merope.encoding("gta", head_dim=30)


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
