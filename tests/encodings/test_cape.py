"""CaPE against numbers of EscherNet's public code and its formula."""

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
from merope import Cameras
from merope.encodings.cape import CaPE
from merope.geometry.poses import rigid

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "cape.npz"
AXES = ["opencv", "opengl"]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(("axes", "name"), [("opencv", "out"), ("opengl", "out_opengl_axes")])
def test_equals_the_public_code(axes: str, name: str, backend: str) -> None:
    golden = np.load(GOLDEN)
    q, k, v, out = (torch.from_numpy(golden[name]) for name in ("q", "k", "v", name))
    rows, columns = golden["grid"].tolist()
    cameras = Cameras(torch.from_numpy(golden["world_from_camera"]), PINHOLE)
    plan = CaPE(head_dim=q.shape[-1], camera_axes=axes).plan(cameras, (rows, columns))
    assert (merope.attend(q, k, v, plan, backend=backend) - out).abs().max() < 1e-9


@pytest.mark.parametrize("axes", AXES)
def test_operator_is_the_transposed_reverse_pose(axes: str) -> None:
    poses = random_poses(2)
    flip = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0] if axes == "opengl" else [1.0] * 4, dtype=torch.float64))
    query_view, key_view = (flip @ torch.linalg.inv(pose) for pose in poses)
    expected = (key_view @ torch.linalg.inv(query_view)).mT
    plan = CaPE(head_dim=12, camera_axes=axes).plan(Cameras(poses, PINHOLE), (1, 2), times=[0.0, 9.0])
    for key_token in (2, 3):
        assert (plan.operator(1, key_token) - torch.block_diag(*[expected] * 3)).abs().max() < 1e-12


def test_values_are_transformed_on_request_only() -> None:
    cameras = Cameras(random_poses(2), PINHOLE)
    q, k, v = random_qkv(1, 1, 2, 8)
    plain, turned = (CaPE(head_dim=8, transform_values=flag).plan(cameras, (1, 1)) for flag in (False, True))
    assert not CaPE().transform_values
    weights = merope.attend(q, k, torch.eye(2, 8, dtype=torch.float64)[None, None], plain)[..., :2]
    assert (merope.attend(q, k, v, plain) - weights @ v).abs().max() < 1e-12
    values = torch.stack([turned.operator(0, b) @ v[0, 0, b] for b in range(2)])
    assert (merope.attend(q, k, v, turned)[0, 0, 0] - weights[0, 0, 0] @ values).abs().max() < 1e-11


@pytest.mark.parametrize("batch", [1, 2])
def test_backends_agree(batch: int) -> None:
    query = mixed_cameras(batch == 2)
    key = Cameras(random_poses(batch, 2, seed=5), FISHEYE)
    for transform_values in (False, True):
        encoding = CaPE(head_dim=12, transform_values=transform_values)
        for plan in (
            encoding.plan(query, (3, 4), extra_tokens=2),
            encoding.plan(query, (3, 4), key=key, key_grid=(2, 3), key_times=[100.0, 101.5], key_extra_tokens=1),
        ):
            assert not plan.query_has_camera.all()
            assert_backends_agree(plan, batch=2)


@given(seed=st.integers(0, 10**6), exponent=st.floats(-2, 3), axes=st.sampled_from(AXES))
def test_any_rigid_change_of_the_world_changes_nothing(seed: int, exponent: float, axes: str) -> None:
    poses = random_poses(3, seed=seed)
    world = rigid(random_rotations(seed=seed + 1), 10**exponent * random_poses(seed=seed + 2)[:3, 3])
    q, k, v = random_qkv(1, 2, 18, 16)
    encoding = CaPE(head_dim=16, camera_axes=axes)
    outputs = [merope.attend(q, k, v, encoding.plan(Cameras(p, PINHOLE), (2, 3))) for p in (poses, world @ poses)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-9


def test_logits_grow_with_the_baseline() -> None:
    ones = torch.ones(128, dtype=torch.float64)
    logits = [
        ones @ CaPE().plan(Cameras(straight_drive(2, step_m), PINHOLE), (1, 1)).operator(0, 1) @ ones
        for step_m in (1e4, 1e5)
    ]
    assert float(logits[1] / logits[0]) == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize("name", degenerate_cameras())
def test_degenerate_geometry_is_finite(name: str) -> None:
    cameras = degenerate_cameras()[name]
    poses = cameras.world_from_camera.clone().requires_grad_()
    plan = CaPE(head_dim=8).plan(Cameras(poses, cameras.lens), (3, 3))
    out = merope.attend(*random_qkv(1, 1, plan.query_tokens, 8), plan)
    (gradient,) = torch.autograd.grad(out.square().sum(), poses)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 30}, "head_dim must be a multiple of 4, got 30; the nearest is 32"),
        ({"camera_axes": "blender"}, "camera_axes must be .*got 'blender';"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CaPE(**options)
