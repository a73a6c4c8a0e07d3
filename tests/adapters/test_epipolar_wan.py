"""CamCo's masked attention beside self-attention, written out."""

import pytest
import torch
from scenes import PINHOLE, random_poses, random_qkv
from torch.nn.functional import linear
from wan_models import cameras, perturb, run, tiny_config, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.adapters.branch_config import CameraBranchConfig
from merope.adapters.epipolar_wan import masked_attention
from merope.encodings.epipolar_rays import EpipolarRays
from merope.geometry.cameras import Cameras


@pytest.mark.parametrize("key_frames", ["first", "all"])
def test_self_attention_is_that_of_the_formula(key_frames: str) -> None:
    transformer = tiny_wan(torch.float64)
    rays = {"samples": 2, "key_frames": key_frames, "reach": 0.75}
    options = {"integration": "epipolar", "encoding": "camco", "encoding_options": rays}
    branch = perturb(attach(transformer, tiny_config(blocks=[0], compression=1, **options)))
    attn, seen = transformer.blocks[0].attn1, {}
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], native=args[3].native, out=out))
    run(transformer, cameras())
    layers, told = branch.processors()[0], EpipolarRays(**rays)
    detach(transformer)
    x, mask = seen["x"], told.mask(cameras(), (2, 3))
    rows = linear(x + linear(told.features(cameras(), (2, 3)), layers.cam_rays.weight), *layers.cam_qkv.parameters())
    q, k, v = (part.unflatten(2, (2, 24)) for part in rows.split(48, dim=-1))
    logits = torch.einsum("bqhc,bkhc->bhqk", q, k[:, : mask.shape[-1]]) / 24**0.5
    weights = torch.softmax(logits.masked_fill(~mask[:, None], -torch.inf), dim=-1).nan_to_num(0.0)
    attended = torch.einsum("bhqk,bkhc->bqhc", weights, v[:, : mask.shape[-1]]).flatten(2)
    own = attn.processor(attn, x, None, None, seen["native"])
    assert (seen["out"] - own - linear(attended, *layers.cam_out.parameters())).abs().max() < 1e-12
    assert 0 < mask.sum() < mask.numel()


def test_queries_that_see_nothing_get_zeros_and_finite_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 2, 3, 4))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])[None]
    out = masked_attention(q, k, v, mask)
    out.square().sum().backward()
    assert (out[:, :, 1] == 0).all()
    assert (out[:, :, 0] - v[:, :, 0]).abs().max() < 1e-12
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (q.grad[:, :, 1] == 0).all()


def test_a_first_frame_without_a_pose_leaves_the_bias() -> None:
    transformer = tiny_wan(torch.float64)
    options = {"integration": "epipolar", "encoding": "camco", "encoding_options": {"samples": 2}}
    branch = perturb(attach(transformer, tiny_config(**options)))
    with torch.no_grad():
        for processor in branch.processors().values():
            processor.cam_out.bias.zero_()
    unknown = Cameras(random_poses(3), PINHOLE, torch.tensor([False, True, True]))
    out = run(transformer, unknown)
    detach(transformer)
    assert torch.equal(run(transformer), out)


def test_rays_alone_and_other_integrations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"encoding must be one of \['camco'\], got 'plucker'"):
        CameraBranchConfig(integration="epipolar", encoding="plucker")
    with pytest.raises(ValueError, match=r"encoding must be one of .* got 'meorpe'; did you mean 'merope'\?"):
        CameraBranchConfig(encoding="meorpe")
    with pytest.raises(ValueError, match=r"encoding must be one of .* got 'camco'; additive takes these"):
        CameraBranchConfig(integration="additive", encoding="camco")
    with pytest.raises(ValueError, match="encoding_options must be among"):
        CameraBranchConfig(integration="epipolar", encoding="camco", encoding_options={"width": 2})
