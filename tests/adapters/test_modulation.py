"""Scale and shift of the input of self-attention, written out."""

import torch
from torch.nn.functional import linear, silu
from wan_models import cameras, perturb, run, tiny_config, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.encodings.additive import RayFeatures


def test_self_attention_is_that_of_the_formula() -> None:
    transformer = tiny_wan(torch.float64)
    options = {"integration": "modulation", "encoding": "plucker", "encoding_options": {"samples": 2}}
    branch = perturb(attach(transformer, tiny_config(blocks=[0], **options)))
    attn, seen = transformer.blocks[0].attn1, {}
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], native=args[3].native, out=out))
    run(transformer, cameras())
    weights = {name: (layer.weight, layer.bias) for name, layer in branch.processors()[0].named_children()}
    detach(transformer)
    p = linear(RayFeatures(samples=2).features(cameras(), (2, 3)), *weights["cam_embed"])
    c = p + linear(silu(linear(p, *weights["cam_hidden"])), *weights["cam_inject"])
    scale, shift = linear(c, *weights["cam_modulate"]).split(48, dim=-1)
    expected = attn.processor(attn, (1 + scale) * seen["x"] + shift, None, None, seen["native"])
    assert (seen["out"] - expected).abs().max() < 1e-12


def test_compression_sets_the_width_inside() -> None:
    widths = {}
    for compression in (1, 2, 4):
        options = {"integration": "modulation", "encoding": "plucker", "encoding_options": {}}
        branch = attach(tiny_wan(), tiny_config(compression=compression, blocks=[1], **options))
        widths[compression] = branch.processors()[1].cam_hidden.out_features
    assert widths == {1: 48, 2: 24, 4: 12}
