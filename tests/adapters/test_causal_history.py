"""Retrieved history in a causal Wan: in whole clips, in two copies, and block by block."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from history_models import COUNT, references, wan_with
from torch import Tensor
from torch.testing import assert_close
from wan_models import cameras, perturb, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.attachment import attach, attached_branch
from merope.adapters.causal_history import seeing_references
from merope.adapters.causal_wan import attach_causal, commit, ready_block, recalling, teacher_forcing
from merope.adapters.history import HistoryReferences
from merope.adapters.key_cache import KeyCache
from merope.attention.visible_cameras import Visibility
from merope.geometry.cameras import Cameras

FRAMES, BLOCK, TOKENS = 6, 3, 6
SHAPE = (2, 4, FRAMES, 4, 6)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", params=["sa", "ca"])
def model(request: pytest.FixtureRequest) -> WanTransformer3DModel:
    transformer = wan_with(request.param, blocks="every")
    attach_causal(transformer)
    return transformer


def forward(transformer: WanTransformer3DModel, inputs: dict[str, Any], **attention: Any) -> Tensor:
    with torch.no_grad():
        return transformer(**inputs, attention_kwargs=attention)[0]


def whole(transformer: WanTransformer3DModel, latents: Tensor, **attention: Any) -> Tensor:
    inputs = tiny_inputs() | {"hidden_states": latents, "timestep": torch.zeros(2)}
    return forward(transformer, inputs, sees=Visibility.block_causal(FRAMES), cameras=cameras(FRAMES), **attention)


def shown(
    transformer: WanTransformer3DModel, cache: KeyCache, history: HistoryReferences, start: int, text: Tensor
) -> tuple[KeyCache, HistoryReferences | None]:
    """References of the whole clip as a block sees them: times count from its first frame."""
    branch = attached_branch(transformer)
    times = [time - start for time in history.moments.tolist()]
    if branch.config["history"] == "ca":
        return cache, HistoryReferences(history.latents, history.cameras, times)
    latents = history.latents.expand(2, -1, -1, -1, -1)
    return recalling(transformer, cache, latents, history.posed, text, times), None


def test_two_copies_and_a_stream_see_the_same_references(model: WanTransformer3DModel) -> None:
    clean, noise = tiny_inputs(shape=SHAPE)["hidden_states"], tiny_inputs(shape=SHAPE, seed=9)["hidden_states"]
    level = torch.tensor([0.0, 700.0]).repeat_interleave(FRAMES * TOKENS).expand(2, -1)
    inputs = tiny_inputs() | {"hidden_states": torch.cat((clean, noise), dim=2), "timestep": level}
    history, path, text = references(), cameras(FRAMES), inputs["encoder_hidden_states"]
    attention = teacher_forcing(path, FRAMES, BLOCK)
    together = forward(model, inputs, **attention, history=history)
    assert together.shape[2] == 2 * FRAMES
    without = forward(model, inputs, **attention)
    assert not torch.allclose(together, without, rtol=1e-3)
    cache = KeyCache(window=50)
    for start in range(0, FRAMES, BLOCK):
        own = slice(start, start + BLOCK)
        seen, across = shown(model, cache, history, start, text)
        block = ready_block(model, seen, clean[:, :, own], path.at(own), across)
        noisy = tiny_inputs() | {"hidden_states": noise[:, :, own], "timestep": torch.full((2,), 700.0)}
        assert_close(forward(model, noisy, past=block), together[:, :, FRAMES:][:, :, own], **CLOSE)
        cache = commit(model, seen, block, clean[:, :, own], text)
        assert cache.recalled == ()
        assert cache.count == start + BLOCK


def test_the_world_of_an_encoding_that_has_one_is_that_of_the_video() -> None:
    """Operators between its frames do not depend on references or recalled frames before it."""
    options = {"encoding": "raynova", "encoding_options": {}}
    transformer = tiny_wan(num_layers=1, attention_head_dim=32)
    branch = perturb(attach(transformer, tiny_config(history="sa", blocks=[0], **options)))
    attach_causal(transformer)
    prepared, path, inputs = [], cameras(FRAMES), tiny_inputs(shape=SHAPE)
    transformer.blocks[0].register_forward_pre_hook(lambda _, args: prepared.append(args[3].condition))
    for history in (references(), references(seed=1), references(batch=2)):
        forward(transformer, inputs, sees=Visibility.block_causal(FRAMES), cameras=path, history=history)
    alone = branch.prepare(path, inputs["hidden_states"]).plan.operators(0)
    for condition in prepared:
        assert_close(condition.plan.operators(COUNT * TOKENS)[COUNT * TOKENS :], alone)
    latents, text = inputs["hidden_states"][:, :, :BLOCK], inputs["encoder_hidden_states"]
    first, blocks = path.at(slice(BLOCK)), []
    for cache in (KeyCache(50), *(shown(transformer, KeyCache(50), references(n), 0, text)[0] for n in (0, 1))):
        plan = ready_block(transformer, cache, latents, first).cameras.plan
        blocks.append(plan.operators(0)[-BLOCK * TOKENS :])
    assert_close(blocks[1], blocks[0])
    assert_close(blocks[2], blocks[0])


def test_references_tell_no_frame_of_the_future(model: WanTransformer3DModel) -> None:
    latents = tiny_inputs(shape=SHAPE)["hidden_states"]
    changed = latents.clone()
    changed[:, :, 3:] += 1.0
    before, after = (whole(model, x, history=references()) for x in (latents, changed))
    assert torch.equal(after[:, :, :3], before[:, :, :3])
    assert not torch.allclose(after[:, :, 3:], before[:, :, 3:], rtol=1e-3)


def test_every_sample_may_have_its_own(model: WanTransformer3DModel) -> None:
    latents = tiny_inputs(shape=SHAPE)["hidden_states"]
    both = references(batch=2)
    together = whole(model, latents, history=both)
    for sample in range(2):
        own = Cameras(both.posed.world_from_camera[sample], both.posed.lens)
        one = HistoryReferences(both.latents[[sample]], own, both.times)
        assert_close(whole(model, latents, history=one)[sample], together[sample], **CLOSE)


def test_no_references_are_none(model: WanTransformer3DModel) -> None:
    latents = tiny_inputs(shape=SHAPE)["hidden_states"]
    nothing = HistoryReferences(torch.zeros(1, 4, 0, 4, 6), None, [])
    assert torch.equal(whole(model, latents, history=nothing), whole(model, latents))


def test_what_every_camera_sees_with_references_before_it() -> None:
    sees = seeing_references(Visibility.block_causal(4, 2, last=2), 3)
    assert sees.intervals == (((0, 3),),) * 3 + (((0, 5),),) * 2 + (((0, 3), (5, 7)),) * 2
    with pytest.raises(ValueError, match="sees must be of one interval in the past where there are references"):
        seeing_references(Visibility.teacher_forcing(6, 2, last=4), COUNT)


def test_what_has_no_place_for_references_is_refused() -> None:
    latents = tiny_inputs(shape=SHAPE)["hidden_states"]
    plain, with_sa = wan_with(None), wan_with("sa")
    for transformer in (plain, with_sa):
        attach_causal(transformer)
    with pytest.raises(ValueError, match="history must be None for a model without history, got 2 references"):
        whole(plain, latents, history=references())
    sees = Visibility.block_causal(FRAMES)
    branch = attached_branch(with_sa)
    with pytest.raises(ValueError, match="history must be None for cameras made ready for a causal model"):
        branch.prepare(cameras(FRAMES), latents, None, references(), sees)
    ready = branch.prepare(cameras(FRAMES), latents, sees=sees)
    inputs = tiny_inputs(shape=SHAPE)
    with pytest.raises(ValueError, match=r'attention_kwargs\["cameras"\] must be merope.Cameras, got CameraCondition'):
        forward(with_sa, inputs, sees=sees, cameras=ready, history=references())
