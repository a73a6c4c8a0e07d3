"""RayPE: scores hold the reciprocal product of rays, and self-attention is that of the formula."""

import torch
from scenes import FISHEYE, PINHOLE, random_poses
from torch.nn.functional import linear, rms_norm, silu
from wan_models import cameras, perturb, run, tiny_config, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.adapters.raype_wan import RayPEAttention
from merope.adapters.told_processor import BlockSizes
from merope.encodings.raype import MOMENT_FLOOR, RayCoordinates
from merope.geometry.cameras import Cameras


def test_coordinates_are_those_of_the_line() -> None:
    some = Cameras(random_poses(2, 3), FISHEYE)
    numbers = RayCoordinates(0.5).features(some, (2, 3)).reshape(2, 3, 6, 7)
    relative = torch.linalg.inv(some.world_from_camera[:, :1]) @ some.world_from_camera
    directions = some.rays((2, 3))[0] @ relative[..., :3, :3].mT
    moments = 0.5 * torch.linalg.cross(relative[..., None, :3, 3].expand_as(directions), directions)
    assert (numbers[..., :3] - directions).abs().max() < 1e-12
    assert (numbers[:, 1:, :, 3:6] * numbers[:, 1:, :, 6:].exp() - moments[:, 1:]).abs().max() < 1e-12
    assert (numbers[:, 1:, :, 3:6].norm(dim=-1) - 1).abs().max() < 1e-12
    assert (numbers[:, 0, :, 3:6]).abs().max() < 1e-12  # rays through the origin have no moment
    assert (numbers[:, 0, :, 6].exp() - MOMENT_FLOOR).abs().max() < 1e-12


def test_at_first_the_scores_of_rays_are_reciprocal_products() -> None:
    """For an open gate: d_a · m̂_b + m̂_a · d_b times one number, which is 0 for rays that meet."""
    processor = RayPEAttention(BlockSizes(2 * 32, 2, 16), RayCoordinates()).double()
    torch.nn.init.ones_(processor.cam_gate[-1].bias)
    poses = random_poses(4)
    features = RayCoordinates().features(Cameras(poses, PINHOLE), (2, 3))[:, 6:]
    of_query, of_key = processor.added(features, torch.float64)
    scores = torch.einsum("qhc,khc->hqk", of_query[0], of_key[0])
    direction, moment = features[0, :, :3], features[0, :, 3:6]
    product = direction @ moment.mT + moment @ direction.mT
    ratio = scores / product
    assert (ratio - ratio[0, 0, 1]).abs()[:, product.abs() > 1e-3].max() < 1e-6
    assert (scores.diagonal(dim1=1, dim2=2)).abs().max() < 1e-9  # a ray meets itself
    same_camera = torch.block_diag(*[torch.ones(6, 6, dtype=torch.bool)] * 3)
    long = features[0, :, 6:].exp()
    assert ((direction @ (moment * long).mT + (moment * long) @ direction.mT)[same_camera]).abs().max() < 1e-9


def test_self_attention_is_that_of_the_formula() -> None:
    transformer = tiny_wan(torch.float64)
    options = {"integration": "raype", "encoding": "raype", "encoding_options": {}, "translation_scale": 0.3}
    branch = perturb(attach(transformer, tiny_config(blocks=[0], **options)))
    attn, seen = transformer.blocks[0].attn1, {}
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], native=args[3].native, out=out))
    run(transformer, cameras())
    layers, features = branch.processors()[0], RayCoordinates(0.3).features(cameras(), (2, 3))
    detach(transformer)
    d, m, s = features.split((3, 3, 1), dim=-1)
    hidden, _, last = layers.cam_gate
    gate = linear(silu(linear(s, hidden.weight, hidden.bias)), last.weight, last.bias)[..., None]
    e_q, e_k = (
        rms_norm(linear(torch.cat(ray, dim=-1), layer.weight), (48,), norm.weight, 1e-6).unflatten(2, (2, 24))
        for layer, norm, ray in (
            (layers.cam_query, layers.cam_norm_q, (d, m)),
            (layers.cam_key, layers.cam_norm_k, (m, d)),
        )
    )

    def turned(x: torch.Tensor) -> torch.Tensor:  # [B, N, heads, d] by Wan's phases, as complex numbers
        phase = torch.complex(seen["native"][0][..., 0::2], seen["native"][1][..., 1::2])
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * phase).flatten(-2)

    x = seen["x"]
    q, k = (
        turned(norm(to(x)).unflatten(2, (2, 24))) for norm, to in ((attn.norm_q, attn.to_q), (attn.norm_k, attn.to_k))
    )
    weights = torch.softmax(torch.einsum("bqhc,bkhc->bhqk", q + gate * e_q, k + gate * e_k) / 24**0.5, dim=-1)
    out = torch.einsum("bhqk,bkhc->bqhc", weights, attn.to_v(x).unflatten(2, (2, 24))).flatten(2)
    assert (seen["out"] - attn.to_out[0](out)).abs().max() < 1e-6  # the model's phases are float32
