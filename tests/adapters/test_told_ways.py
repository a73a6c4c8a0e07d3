"""What holds of every way of telling a block numbers of its cameras."""

from typing import Any

import pytest
import torch
from scenes import PINHOLE, RIMMED, mixed_cameras, random_poses, random_rotations
from wan_models import WAN22_5B, cameras, meta_wan, perturb, run, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.adapters.branch_config import CameraBranchConfig, check_causal
from merope.adapters.told_ways import TOLD_PROCESSORS
from merope.geometry.cameras import Cameras
from merope.geometry.poses import rigid

WAYS: dict[str, dict[str, Any]] = {
    "additive": {"encoding": "plucker", "encoding_options": {"samples": 2}},
    "recammaster": {"encoding": "extrinsics"},
    "motionctrl": {"encoding": "extrinsics"},
    "modulation": {"encoding": "plucker", "encoding_options": {"samples": 2}},
    "epipolar": {"encoding": "camco", "encoding_options": {"samples": 2, "key_frames": "all"}},
    "raype": {"encoding": "raype"},
    "roce": {"encoding": "plucker", "encoding_options": {"samples": 2}},
}
PARAMETERS = {  # of a block of Wan2.2 5B
    "additive": 384 * 3072,
    "recammaster": 12 * 3072 + 3072 + 3072**2 + 3072,
    "motionctrl": (3072 + 12) * 3072 + 3072,
    "modulation": 385 * 768 + 2 * 769 * 768 + 769 * 2 * 3072,
    "epipolar": 384 * 3072 + 3073 * 3 * 768 + 769 * 3072,
    "raype": 2 * 6 * 3072 + 2 * 3072 + 32 + 17 * 24,
    "roce": 385 * 768 + 2 * 768 * 24 * 42,
}
each_way = pytest.mark.parametrize("way", WAYS)


def way_config(way: str, **changes: Any) -> CameraBranchConfig:
    return tiny_config(**{"integration": way, "encoding_options": {}, **WAYS[way], **changes})


def test_the_table_has_every_way() -> None:
    assert list(WAYS) == list(PARAMETERS) == list(TOLD_PROCESSORS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_way
def test_it_starts_at_the_base_model_and_learns(way: str, dtype: torch.dtype) -> None:
    transformer = tiny_wan(dtype)
    keys, base = list(transformer.state_dict()), run(transformer)
    branch = attach(transformer, way_config(way))
    assert torch.equal(run(transformer, cameras(batch=2)), base)
    run(transformer, cameras(batch=2)).square().sum().backward()
    assert any(bool(p.grad.abs().sum() > 0) for p in branch.parameters())
    perturb(branch)
    run(transformer, cameras(batch=2)).square().sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in branch.parameters())
    assert (run(transformer, cameras(batch=2)) - run(transformer, cameras(batch=2, seed=4))).abs().max() > 1e-3
    detach(transformer)
    assert torch.equal(run(transformer), base)
    assert list(transformer.state_dict()) == keys


@each_way
def test_a_batch_is_its_clips_one_by_one(way: str) -> None:
    transformer = tiny_wan(torch.float64)
    perturb(attach(transformer, way_config(way)))
    poses, inputs = random_poses(2, 3), tiny_inputs(torch.float64)
    together = run(transformer, Cameras(poses, PINHOLE), **inputs)
    for clip in range(2):
        own = {name: x[clip : clip + 1] if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        alone = run(transformer, Cameras(poses[clip], PINHOLE), **own)
        assert (alone - together[clip : clip + 1]).abs().max() < 1e-6


@each_way
def test_a_world_6400_km_away_changes_nothing(way: str) -> None:
    """All of them see poses from the clip's first camera."""
    transformer = tiny_wan(torch.float64)
    perturb(attach(transformer, way_config(way)))
    poses = random_poses(2, 3)
    world = rigid(random_rotations(seed=5), torch.tensor([4.2e6, -3.1e6, 3.7e6], dtype=torch.float64))
    here, there = (run(transformer, Cameras(p, PINHOLE)) for p in (poses, world @ poses))
    assert (here - there).abs().max() < 1e-5
    poses[:, 1, :3, 3] += 1.0
    assert (run(transformer, Cameras(poses, PINHOLE)) - here).abs().max() > 1e-3


@each_way
def test_cameras_without_a_pose_and_tokens_without_a_ray(way: str) -> None:
    transformer = tiny_wan(torch.float64)
    branch = perturb(attach(transformer, way_config(way)))
    some = mixed_cameras(batch=True, lens=RIMMED)
    out = run(transformer, some)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(bool(p.grad.isfinite().all()) for p in branch.parameters())
    poses = torch.where(some.has_pose[..., None, None], some.world_from_camera, random_poses(2, 3, seed=3))
    assert torch.equal(run(transformer, Cameras(poses, RIMMED, some.has_pose)), out)  # what is unknown is not read


@torch.no_grad()
@each_way
def test_autocast_computes_as_half_precision(way: str) -> None:
    transformer = tiny_wan()
    perturb(attach(transformer, way_config(way)))
    exact = run(transformer, cameras(batch=2))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run(transformer, cameras(batch=2))
    assert float((rounded - exact).norm() / exact.norm()) < 0.1


@torch.no_grad()
@each_way
def test_a_float32_branch_on_a_half_precision_model(way: str) -> None:
    transformer = tiny_wan(torch.bfloat16)
    perturb(attach(transformer, way_config(way))).float()
    rounded = run(transformer, cameras(batch=2))
    exact = tiny_wan()
    perturb(attach(exact, way_config(way)))
    assert rounded.dtype == torch.bfloat16
    expected = run(exact, cameras(batch=2))
    assert float((rounded - expected).norm() / expected.norm()) < 0.1


@each_way
def test_gradients_reach_the_poses(way: str) -> None:
    transformer = tiny_wan(torch.float64)
    perturb(attach(transformer, way_config(way)))
    poses = random_poses(2, 3).requires_grad_()
    run(transformer, Cameras(poses, PINHOLE)).square().sum().backward()
    assert poses.grad.isfinite().all()
    assert (poses.grad[:, 1:, :3, 3].abs() > 0).all()


@each_way
def test_a_causal_model_does_not_take_it(way: str) -> None:
    branch = attach(tiny_wan(), way_config(way))
    with pytest.raises(ValueError, match=f"integration must be \"parallel\" for a causal model, got '{way}'"):
        check_causal(branch)


@each_way
def test_parameters_of_a_block(way: str) -> None:
    config = CameraBranchConfig(integration=way, encoding=WAYS[way]["encoding"])
    branch = attach(meta_wan(WAN22_5B), config)
    assert sum(p.numel() for p in branch.parameters()) == 15 * PARAMETERS[way]


@each_way
def test_encodings_of_pairs_are_refused(way: str) -> None:
    with pytest.raises(ValueError, match=f"encoding must be one of .* got 'merope'; {way} takes these"):
        CameraBranchConfig(integration=way)
