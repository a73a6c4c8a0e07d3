"""ReRoPE: the camera operator on the slow channels of the backbone's own heads."""

import math

import pytest
import torch
from scenes import PINHOLE, random_poses
from torch import Tensor
from wan_models import WAN22_5B, cameras, meta_wan, run, tiny_config, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.adapters.branch_config import CameraBranchConfig
from merope.encodings import encoding
from merope.encodings.rotary import wan_bands
from merope.geometry.cameras import Cameras

CARVE = (8, 4, 6)  # of bands of 8, 8, 8
OPTIONS = {"partition": (6, 6, 6, 0), "fractions": (0.0, 1.0)}
CARVED = [*range(8), *range(12, 16), *range(18, 24)]
KEPT = [*range(8, 12), *range(16, 18)]


def carved_config(**changes: object) -> CameraBranchConfig:
    return tiny_config(
        **{"integration": "rerope", "carve": CARVE, "encoding_options": OPTIONS, "blocks": [0], **changes}
    )


def dense_attention(attn: torch.nn.Module, x: Tensor, clip: Cameras, cosine: Tensor, sine: Tensor) -> Tensor:
    """The definition, one head and one sample at a time: native rotations on kept channels, dense U on carved ones."""
    q, k, v = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x)
    plan = encoding("merope", head_dim=18, **OPTIONS).plan(clip, (2, 3))
    tokens = x.shape[1]
    u = torch.eye(24, dtype=x.dtype).repeat(tokens, tokens, 1, 1)
    u_values = u.clone()
    camera = torch.stack([plan.operators(a) for a in range(tokens)])
    rows, columns = torch.meshgrid(torch.tensor(CARVED), torch.tensor(CARVED), indexing="ij")
    u[..., rows, columns] = u_values[..., rows, columns] = camera
    phase = torch.atan2(sine[0, :, 0], cosine[0, :, 0])  # [N, 24]
    for i in range(0, len(KEPT), 2):
        pair = KEPT[i : i + 2]
        turn = phase[None, :, pair[0]] - phase[:, None, pair[0]]
        u[..., pair[0], pair[0]] = u[..., pair[1], pair[1]] = turn.cos()
        u[..., pair[0], pair[1]], u[..., pair[1], pair[0]] = -turn.sin(), turn.sin()
    samples = []
    for b in range(x.shape[0]):
        heads = []
        for channels in (slice(0, 24), slice(24, 48)):
            logits = torch.einsum("ac,abcd,bd->ab", q[b, :, channels], u, k[b, :, channels]) / math.sqrt(24)
            heads.append(torch.einsum("ab,abcd,bd->ac", logits.softmax(-1), u_values, v[b, :, channels]))
        samples.append(torch.cat(heads, dim=-1))
    return attn.to_out[0](torch.stack(samples))


def test_it_is_the_dense_definition() -> None:
    transformer = tiny_wan(torch.float64)
    attach(transformer, carved_config())
    attn, seen = transformer.blocks[0].attn1, {}
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], native=args[3].native, out=out))
    clip = Cameras(random_poses(3), PINHOLE)
    run(transformer, clip)
    expected = dense_attention(attn, seen["x"], clip, *(table.double() for table in seen["native"]))
    assert (seen["out"] - expected).abs().max() < 1e-6  # Wan's rotary tables are float32


def test_without_a_camera_encoding_only_the_slow_phases_are_lost() -> None:
    """ "none" on the carved channels is Wan's own attention whose tables have phase 0 there."""
    transformer = tiny_wan()
    attach(transformer, carved_config(encoding="none", encoding_options={}, blocks="every"))
    out = run(transformer, cameras())
    detach(transformer)
    base = run(transformer)
    transformer.rope.freqs_cos[:, CARVED] = 1.0
    transformer.rope.freqs_sin[:, CARVED] = 0.0
    assert (run(transformer) - out).abs().max() < 1e-5
    assert (base - out).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["merope", "merope_phases"])
def test_no_new_parameters_and_the_papers_channels(name: str) -> None:
    transformer = meta_wan(WAN22_5B)
    keys = list(transformer.state_dict())
    branch = attach(transformer, CameraBranchConfig(encoding=name, integration="rerope"))
    assert list(transformer.state_dict()) == keys
    assert branch.encoding.channels == (36, 36, 24, 0)
    assert wan_bands(128) == (44, 42, 42)
    assert branch.processors()[1].pieces == [16, 28, 8, 34, 8, 34]  # kept, carved of time, row, column
    assert len(branch.processors()) == 15


def test_cameras_matter_and_gradients_reach_the_backbone() -> None:
    transformer = tiny_wan()
    attach(transformer, carved_config())
    out = run(transformer, cameras())
    assert (run(transformer, cameras(seed=2)) - out).abs().max() > 1e-3
    out.square().sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in transformer.blocks[0].attn1.parameters())


def test_detach_restores_the_base_model() -> None:
    transformer = tiny_wan()
    base = run(transformer)
    attach(transformer, carved_config())
    detach(transformer)
    assert torch.equal(run(transformer), base)


@pytest.mark.parametrize("carve", [None, (8, 4), (10, 0, 0), (3, 2, 2), (0, 0, 0), (-2, 4, 4)])
def test_channels_that_are_not_there(carve: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match="carve must be"):
        attach(tiny_wan(), carved_config(carve=carve))


def test_encodings_that_predict_depth_have_no_place() -> None:
    with pytest.raises(ValueError, match='use integration="parallel"'):
        attach(tiny_wan(), carved_config(encoding="rayrope", encoding_options={}))
