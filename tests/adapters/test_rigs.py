"""Rigs in a camera branch: views are samples of the base model, and all of them see each other in the branch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from family_models import CASES
from scenes import curved_drive, random_poses
from torch import Tensor
from wan_models import perturb, tiny_config, tiny_inputs, tiny_wan

from merope import Cameras, Pinhole, Rig, attend
from merope.adapters.attachment import attach
from merope.adapters.camera_branch import CameraBranch
from merope.adapters.history import HistoryReferences
from merope.geometry.rigs import ring

VIEWS, MOMENTS = 6, 2
FLOAT32_INSIDE = 2e-6
"""Wan normalises in float32 whatever its weights are in: products of other shapes differ by so much on other CPUs."""
FOCAL = torch.tensor([130.0, 110.0, 120.0, 90.0, 120.0, 110.0], dtype=torch.float64)
SURROUND = ring((0, 55, 110, 180, -110, -55), Pinhole(FOCAL, FOCAL, 128.0, 70.0, 256, 144), offset_m=0.8)
ONE_CLIP = (VIEWS, 4, MOMENTS, 4, 6)
RIG = SURROUND.cameras(curved_drive(MOMENTS))


def with_branch(dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[WanTransformer3DModel, CameraBranch]:
    transformer = tiny_wan(dtype, num_layers=2)
    return transformer, perturb(attach(transformer, tiny_config(blocks=[0], **changes)))


def output(transformer: WanTransformer3DModel, cameras: Cameras, latents: Tensor, **given: Any) -> Tensor:
    inputs = tiny_inputs(transformer.dtype, shape=tuple(latents.shape))
    text = noise(1, *inputs["encoder_hidden_states"].shape[1:]).expand(len(latents), -1, -1)
    inputs |= {"hidden_states": latents, "encoder_hidden_states": text}
    inputs["attention_kwargs"] = {"cameras": cameras, **given}
    with torch.no_grad():
        return transformer(**inputs)[0]


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_cameras_of_a_rig_stand_view_by_view() -> None:
    world_from_rig = random_poses(2, 3, seed=4)
    cameras = SURROUND.cameras(world_from_rig)
    assert (cameras.count, cameras.views, cameras.moments) == (18, 6, 3)
    expected = world_from_rig[1, 2] @ SURROUND.rig_from_camera[4]
    torch.testing.assert_close(cameras.world_from_camera[1, 4 * 3 + 2], expected)
    assert cameras.lens.fx.tolist() == FOCAL.repeat_interleave(3).tolist()
    later = cameras.at(slice(1, None))
    assert later.moments == 2
    torch.testing.assert_close(later.world_from_camera[1, 4 * 2 + 1], expected)
    view = cameras.by_view()
    assert (view.views, list(view.world_from_camera.shape)) == (1, [12, 3, 4, 4])
    torch.testing.assert_close(view.world_from_camera[6 + 4, 2], expected)
    assert float(view.lens.fx[6 + 3, 0]) == 90.0
    assert RIG.at(slice(0, 1)).by_view().moments == 1


def test_all_views_of_a_clip_attend_to_each_other_as_the_dense_reference_says() -> None:
    transformer, branch = with_branch()
    seen: dict[str, Tensor] = {}
    attn = transformer.blocks[0].attn1
    attn.register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out, rotary=args[3].native))
    output(transformer, RIG, noise(*ONE_CLIP))
    x = seen["x"]  # [views, tokens, width]
    joint = torch.cat(list(x))[None]
    plain = Cameras(RIG.world_from_camera, RIG.lens)
    assert branch.encoding is not None
    plan = branch.encoding.plan(plain, (2, 3), times=[0, 1] * VIEWS)
    q, k, v = (y.unflatten(2, (1, 24)).transpose(1, 2) for y in attn.processor.cam_qkv(joint).split(24, dim=-1))
    added = attn.processor.cam_out(attend(q, k, v, plan, backend="reference").transpose(1, 2).flatten(2))
    own = attn.processor.base(attn, x, None, None, seen["rotary"])
    torch.testing.assert_close(seen["out"], own + added.reshape(own.shape), rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoding", ["merope", "gta"])
def test_a_rig_may_stand_anywhere_in_the_world(encoding: str) -> None:
    options = {} if encoding == "merope" else {"encoding_options": {}}
    transformer, _ = with_branch(encoding=encoding, **options)
    moved = random_poses(1, seed=8, spread_m=300.0) @ curved_drive(MOMENTS)
    outputs = [output(transformer, SURROUND.cameras(path), noise(*ONE_CLIP)) for path in (curved_drive(MOMENTS), moved)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-9)


def test_one_view_sees_another_unless_the_branch_is_told_not_to() -> None:
    latents = noise(*ONE_CLIP)
    other = latents.clone()
    other[3] = noise(*ONE_CLIP[1:], seed=5)
    for across_views in (True, False):
        transformer, _ = with_branch(across_views=across_views)
        change = (output(transformer, RIG, other) - output(transformer, RIG, latents)).abs().amax((1, 2, 3, 4))
        assert (float(change[0]) > 1e-6) == across_views
        assert float(change[3]) > 1e-6


def test_views_that_do_not_see_each_other_are_clips() -> None:
    transformer, _ = with_branch(across_views=False)
    latents = noise(2 * VIEWS, *ONE_CLIP[1:])
    rigs = SURROUND.cameras(torch.stack((curved_drive(MOMENTS), curved_drive(MOMENTS, step_m=0.6))))
    as_clips = output(transformer, rigs.by_view(), latents)
    torch.testing.assert_close(output(transformer, rigs, latents), as_clips, rtol=0, atol=1e-12)
    times = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    timed = output(transformer, rigs.by_view(), latents, times=times.repeat_interleave(VIEWS, 0))
    torch.testing.assert_close(output(transformer, rigs, latents, times=times), timed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("across_views", [True, False])
def test_rigs_in_a_batch_are_rigs_alone(across_views: bool) -> None:
    transformer, _ = with_branch(across_views=across_views)
    paths = torch.stack((curved_drive(MOMENTS), curved_drive(MOMENTS, step_m=0.6)))
    latents = noise(2 * VIEWS, *ONE_CLIP[1:])
    alone = [
        output(transformer, SURROUND.cameras(path), part) for path, part in zip(paths, latents.chunk(2), strict=True)
    ]
    together = output(transformer, SURROUND.cameras(paths), latents)
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=FLOAT32_INSIDE)
    shared = output(transformer, SURROUND.cameras(paths[1]), latents)  # one rig serves both clips
    torch.testing.assert_close(shared[VIEWS:], alone[1], rtol=0, atol=FLOAT32_INSIDE)


def test_a_rig_of_one_view_is_a_clip() -> None:
    transformer, _ = with_branch()
    front = Rig(SURROUND.rig_from_camera[:1], Pinhole(130.0, 130.0, 128.0, 70.0, 256, 144))
    cameras, latents = front.cameras(curved_drive(MOMENTS)), noise(*ONE_CLIP)[:1]
    expected = output(transformer, Cameras(cameras.world_from_camera, cameras.lens), latents)
    assert torch.equal(output(transformer, cameras, latents), expected)


def test_additive_conditioning_gives_every_view_its_own_features() -> None:
    options = {"integration": "additive", "encoding": "plucker", "compression": 4, "encoding_options": {}}
    transformer, branch = with_branch(**options)
    latents = noise(*ONE_CLIP)
    features = branch.prepare(RIG, latents).features
    whole = branch.features.features(Cameras(RIG.world_from_camera, RIG.lens), (2, 3))
    torch.testing.assert_close(features, whole.reshape(VIEWS, MOMENTS * 6, -1))
    assert output(transformer, RIG, latents).isfinite().all()


def test_encodings_that_read_tokens_read_those_of_all_views() -> None:
    transformer, _ = with_branch(encoding="rayrope", encoding_options={})
    latents, other = noise(*ONE_CLIP), noise(*ONE_CLIP)
    other[3] += 1.0
    assert float((output(transformer, RIG, other) - output(transformer, RIG, latents))[0].abs().max()) > 1e-6


def test_an_epipolar_mask_of_a_rig_is_refused() -> None:
    _, branch = with_branch(integration="epipolar", encoding="camco", encoding_options={})
    with pytest.raises(ValueError, match=r"""neither "rerope" nor "epipolar" for a rig, got 'epipolar'"""):
        branch.prepare(RIG, noise(*ONE_CLIP))


@pytest.mark.parametrize("across_views", [True, False])
def test_several_rigs_in_a_batch_that_guidance_doubles_are_refused(across_views: bool) -> None:
    """Its samples are a b a b; cameras would be a a b b."""
    branch = attach(CASES["cogvideox"].model(), tiny_config(across_views=across_views))
    rigs = SURROUND.cameras(torch.stack((curved_drive(MOMENTS), curved_drive(MOMENTS, step_m=0.6))))
    with pytest.raises(ValueError, match="of one clip or of a batch 4 for this model, got 2; with guidance"):
        branch.prepare(rigs, noise(4 * VIEWS, *ONE_CLIP[1:]))


def test_what_a_rig_cannot_be_combined_with_is_refused() -> None:
    _, branch = with_branch(history="ca")
    latents = noise(*ONE_CLIP)
    with pytest.raises(ValueError, match="multiple of the rig's 6 views, got 5"):
        branch.prepare(RIG, latents[:5])
    with pytest.raises(ValueError, match="one per latent frame, 2, got 1"):
        branch.prepare(RIG.at(slice(1)), latents)
    with pytest.raises(ValueError, match="divisor of the 12 cameras, got 5"):
        replace(RIG, views=5)
    before = Cameras(curved_drive(1), Pinhole(130.0, 130.0, 128.0, 70.0, 256, 144))
    references = HistoryReferences(latents[:1, :, :1], before, torch.zeros(1))
    with pytest.raises(ValueError, match="cameras with history must be of one view"):
        branch.prepare(RIG, latents, history=references)
    with pytest.raises(ValueError, match="of one view, to be joined"):
        RIG.joined(RIG)
    assert math.isclose(float(SURROUND.rig_from_camera[1, 0, 3]), 0.8 * math.sin(math.radians(55)))
