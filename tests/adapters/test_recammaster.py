"""ReCamMaster's and MotionCtrl's layers around self-attention, written out."""

import pytest
import torch
from wan_models import cameras, perturb, run, tiny_config, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.encodings.extrinsics import Extrinsics


@pytest.mark.parametrize("way", ["recammaster", "motionctrl"])
def test_self_attention_is_that_of_the_formula(way: str) -> None:
    transformer = tiny_wan(torch.float64)
    options = {"integration": way, "encoding": "extrinsics", "encoding_options": {}, "translation_scale": 0.5}
    branch = perturb(attach(transformer, tiny_config(blocks=[0], **options)))
    attn, seen = transformer.blocks[0].attn1, {}
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], native=args[3].native, out=out))
    run(transformer, cameras())
    layers, twelve = branch.processors()[0], Extrinsics(0.5).features(cameras(), (2, 3))
    detach(transformer)

    def own(x: torch.Tensor) -> torch.Tensor:
        return attn.processor(attn, x, None, None, seen["native"])

    x = seen["x"]
    if way == "recammaster":
        identity = torch.eye(x.shape[-1], dtype=torch.float64)
        out = own(x + twelve @ layers.cam_encode.weight.mT + layers.cam_encode.bias)
        expected = out @ (identity + layers.cam_project.weight).mT + layers.cam_project.bias
    else:
        both = torch.cat((x, twelve.expand(2, -1, -1)), dim=-1)
        expected = own(x + both @ layers.cam_mix.weight.mT + layers.cam_mix.bias)
    assert (seen["out"] - expected).abs().max() < 1e-12
