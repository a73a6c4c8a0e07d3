"""RoCE: shifts of rotary phases, written out with complex numbers as in the released code."""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu
from wan_models import WAN21_1_3B, cameras, meta_wan, perturb, run, tiny_config, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.adapters.branch_config import CameraBranchConfig
from merope.adapters.roce_wan import turned
from merope.encodings.additive import RayFeatures

HEADS, WIDTH = 2, 48
OPTIONS = {"integration": "roce", "encoding": "plucker", "encoding_options": {"samples": 2}}


def as_complex(x: Tensor) -> Tensor:  # [B, N, width] -> [B, N, heads, pairs]
    return torch.view_as_complex(x.unflatten(2, (HEADS, -1, 2)).contiguous())


def as_real(x: Tensor) -> Tensor:  # [B, N, heads, pairs] -> [B, N, width]
    return torch.view_as_real(x).flatten(2)


def test_self_attention_is_that_of_the_formula() -> None:
    transformer = tiny_wan(torch.float64)
    branch = perturb(attach(transformer, tiny_config(blocks=[0], **OPTIONS)))
    attn, seen = transformer.blocks[0].attn1, {}
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], native=args[3].native, out=out))
    run(transformer, cameras())
    layers, features = branch.processors()[0], RayFeatures(samples=2).features(cameras(), (2, 3))
    detach(transformer)
    c = silu(linear(features, layers.cam_embed.weight, layers.cam_embed.bias))
    phases = (
        pad(linear(c, layer.weight).unflatten(2, (HEADS, -1)), (4, 0))
        for layer in (layers.cam_phase_qk, layers.cam_phase_vo)
    )
    phase_qk, phase_vo = (torch.polar(torch.ones_like(phase), phase) for phase in phases)
    native, x = torch.complex(seen["native"][0][..., 0::2], seen["native"][1][..., 1::2]), seen["x"]
    q = as_real(as_complex(attn.norm_q(attn.to_q(x))) * native * phase_qk).unflatten(2, (HEADS, -1))
    k = as_real(as_complex(attn.norm_k(attn.to_k(x))) * native * phase_qk).unflatten(2, (HEADS, -1))
    v = as_real(as_complex(attn.to_v(x)) * phase_vo.conj()).unflatten(2, (HEADS, -1))
    weights = torch.softmax(torch.einsum("bqhc,bkhc->bhqk", q, k) / 24**0.5, dim=-1)
    out = attn.to_out[0](torch.einsum("bhqk,bkhc->bqhc", weights, v).flatten(2))
    expected = as_real(as_complex(out) * phase_vo)
    assert (seen["out"] - expected).abs().max() < 1e-6  # the model's native phases are float32
    assert (seen["out"] - out).abs().max() > 1e-3


def test_shifts_keep_lengths() -> None:
    x, phases = torch.randn(2, 5, HEADS, 24).double(), 30 * torch.randn(2, 5, HEADS, 12).double()
    assert (turned(x, phases).norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-12
    assert (turned(turned(x, phases), -phases) - x).abs().max() < 1e-12


def test_bands_are_those_of_the_released_code() -> None:
    """Of a head of 128, the 42 pairs of rows and columns, for each of 12 heads."""
    branch = attach(meta_wan(WAN21_1_3B), CameraBranchConfig(integration="roce", encoding="plucker", compression=1))
    processor = branch.processors()[1]
    assert processor.cam_phase_qk.weight.shape == processor.cam_phase_vo.weight.shape == (12 * 42, 1536)
    assert processor.time_pairs == 22
