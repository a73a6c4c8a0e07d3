"""The CameraCtrl-style baseline in Wan's blocks."""

import pytest
import torch
from wan_models import WAN22_5B, cameras, meta_wan, perturb, run, tiny_config, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.adapters.branch_config import CameraBranchConfig
from merope.encodings.additive import LatitudeUp, RayFeatures


def additive_config(encoding: str = "plucker", **changes: object) -> CameraBranchConfig:
    options = {} if encoding == "latitude_up" else {"samples": 2}
    return tiny_config(**{"integration": "additive", "encoding": encoding, "encoding_options": options, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", ["plucker", "origin_direction", "latitude_up"])
def test_it_starts_at_the_base_model_and_learns(encoding: str, dtype: torch.dtype) -> None:
    transformer = tiny_wan(dtype)
    keys, base = list(transformer.state_dict()), run(transformer)
    branch = attach(transformer, additive_config(encoding))
    assert torch.equal(run(transformer, cameras(batch=2)), base)
    run(transformer, cameras(batch=2)).square().sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in branch.parameters())
    perturb(branch, scale=2.0)
    assert (run(transformer, cameras(batch=2)) - run(transformer, cameras(batch=2, seed=4))).abs().max() > 1e-2
    detach(transformer)
    assert torch.equal(run(transformer), base)
    assert list(transformer.state_dict()) == keys


def test_queries_and_keys_see_the_rays_and_values_do_not() -> None:
    """Self-attention of one block, written out with diffusers' own processor on changed projections."""
    transformer = tiny_wan(torch.float64)
    branch = perturb(attach(transformer, additive_config(blocks=[0])))
    attn, seen = transformer.blocks[0].attn1, {}
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], native=args[3].native, out=out))
    run(transformer, cameras())
    features = RayFeatures(samples=2).features(cameras(), (2, 3))
    shift = features @ branch.processors()[0].cam_add.linear.weight.mT
    detach(transformer)
    for projection in (attn.to_q, attn.to_k):
        projection.register_forward_pre_hook(lambda _, args: (args[0] + shift,))
    expected = attn.processor(attn, seen["x"], None, None, seen["native"])
    assert (seen["out"] - expected).abs().max() < 1e-12


def test_scale_and_parameters() -> None:
    branch = attach(meta_wan(WAN22_5B), CameraBranchConfig(integration="additive", encoding="plucker"))
    assert sum(p.numel() for p in branch.parameters()) == 15 * 384 * 3072
    scaled = attach(tiny_wan(), additive_config(translation_scale=0.1))
    assert scaled.features == RayFeatures(samples=2, translation_scale=0.1)
    assert attach(tiny_wan(), additive_config("latitude_up")).features == LatitudeUp()
    with pytest.raises(ValueError, match="translation_scale must be 1"):
        attach(tiny_wan(), additive_config("latitude_up", translation_scale=0.1))
    with pytest.raises(ValueError, match="encoding must be one of"):
        CameraBranchConfig(integration="additive", encoding="merope")
