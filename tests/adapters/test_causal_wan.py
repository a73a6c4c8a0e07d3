"""A causal Wan: whole clips, two copies of a clip, and block by block against a cache give the same numbers."""

import copy
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanTransformer3DModel
from scenes import PINHOLE, curved_drive
from torch import Tensor
from torch.testing import assert_close
from wan_models import cameras, perturb, run, tiny_config, tiny_inputs, tiny_wan

from merope.adapters.attachment import attach, detach
from merope.adapters.causal_wan import attach_causal, commit, detach_causal, ready_block, teacher_forcing
from merope.adapters.key_cache import KeyCache
from merope.attention.visible_cameras import Visibility
from merope.geometry.cameras import Cameras
from merope.geometry.lenses import Pinhole

FRAMES, BLOCK = 8, 3  # the last block is shorter
SHAPE = (2, 4, FRAMES, 4, 6)
TOKENS = 6
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def causal_wan(with_branch: bool = True, head_dim: int = 24, **config: Any) -> WanTransformer3DModel:
    transformer = tiny_wan(num_layers=2, attention_head_dim=head_dim)
    if with_branch:
        perturb(attach(transformer, tiny_config(blocks="every", **config)))
    attach_causal(transformer)
    return transformer


@pytest.fixture(scope="module", params=[True, False], ids=["branch", "base"])
def model(request: pytest.FixtureRequest) -> WanTransformer3DModel:
    return causal_wan(request.param)


def has_branch(transformer: WanTransformer3DModel) -> bool:
    return "_merope_attachment" in transformer.__dict__


def of_model(transformer: WanTransformer3DModel, count: int = FRAMES, seed: int = 0) -> Cameras | None:
    return cameras(count, seed=seed) if has_branch(transformer) else None


def forward(transformer: WanTransformer3DModel, inputs: dict[str, Any], **attention: Any) -> Tensor:
    given = {name: value for name, value in attention.items() if value is not None}
    with torch.no_grad():
        return transformer(**inputs, attention_kwargs=given)[0]


def whole(transformer: WanTransformer3DModel, inputs: dict[str, Any], **options: Any) -> Tensor:
    sees = Visibility.block_causal(inputs["hidden_states"].shape[2], BLOCK, **options)
    path = of_model(transformer, inputs["hidden_states"].shape[2])
    return forward(transformer, inputs, sees=sees, cameras=path)


def of_frames(inputs: dict[str, Any], frames: slice) -> dict[str, Any]:
    return {**inputs, "hidden_states": inputs["hidden_states"][:, :, frames]}


def streamed(
    transformer: WanTransformer3DModel, inputs: dict[str, Any], path: Cameras | None, cache: KeyCache
) -> tuple[Tensor, KeyCache]:
    """Every block as it is, and then committed as it is: as if all frames were clean."""
    made, latents = [], inputs["hidden_states"]
    for start in range(0, latents.shape[2], BLOCK):
        own = slice(start, start + BLOCK)
        block = ready_block(transformer, cache, latents[:, :, own], None if path is None else path.at(own))
        made.append(forward(transformer, of_frames(inputs, own), past=block))
        cache = commit(transformer, cache, block, latents[:, :, own], inputs["encoder_hidden_states"])
    return torch.cat(made, dim=2), cache


@pytest.mark.parametrize("window", [9, 50])
def test_blocks_against_a_cache_are_the_whole_clip(model: WanTransformer3DModel, window: int) -> None:
    inputs = tiny_inputs(shape=SHAPE) | {"timestep": torch.zeros(2)}
    made, cache = streamed(model, inputs, of_model(model), KeyCache(window))
    assert_close(made, whole(model, inputs), **CLOSE)
    assert cache.count == FRAMES


@pytest.mark.parametrize("window", [3, 4, 6, 7])
def test_so_they_are_with_a_window_shorter_than_the_clip(model: WanTransformer3DModel, window: int) -> None:
    shape = (1, 4, 12, 4, 6)
    inputs = tiny_inputs(shape=shape) | {"timestep": torch.zeros(1)}
    made, cache = streamed(model, inputs, of_model(model, 12), KeyCache(window))
    assert_close(made, whole(model, inputs, last=window), **CLOSE)
    assert len(cache.frames) == window - BLOCK


def test_sinks_are_seen_as_far_back_as_the_window_begins(model: WanTransformer3DModel) -> None:
    inputs = tiny_inputs(shape=(1, 4, 12, 4, 6)) | {"timestep": torch.zeros(1)}
    path = of_model(model, 12)
    made, cache = streamed(model, inputs, path, KeyCache(window=6, sink=2))
    assert len(cache.frames) == 5
    assert_close(made[:, :, :6], whole(model, inputs, last=6, sink=2)[:, :, :6], **CLOSE)  # nothing is left out yet
    without, _ = streamed(model, inputs, path, KeyCache(window=6))
    assert not torch.allclose(made[:, :, 9:], without[:, :, 9:], rtol=1e-3)


def test_a_later_frame_changes_no_earlier_block(model: WanTransformer3DModel) -> None:
    inputs = tiny_inputs(shape=SHAPE)
    changed = {**inputs, "hidden_states": inputs["hidden_states"].clone()}
    changed["hidden_states"][:, :, 3] += 1.0
    before, after = whole(model, inputs), whole(model, changed)
    assert_close(after[:, :, :3], before[:, :, :3], rtol=0, atol=0)
    for frame in range(3, FRAMES):
        assert not torch.allclose(after[:, :, frame], before[:, :, frame], rtol=1e-4)


def test_blocks_without_a_branch_are_causal_too() -> None:
    """Of a model whose other blocks have one, as by default."""
    transformer = tiny_wan(num_layers=2)
    perturb(attach(transformer, tiny_config(blocks="alternating")))
    attach_causal(transformer)
    inputs = tiny_inputs(shape=SHAPE) | {"timestep": torch.zeros(2)}
    changed = {**inputs, "hidden_states": inputs["hidden_states"].clone()}
    changed["hidden_states"][:, :, 3:] += 1.0
    before = whole(transformer, inputs)
    assert_close(whole(transformer, changed)[:, :, :3], before[:, :, :3], rtol=0, atol=0)
    made, cache = streamed(transformer, inputs, cameras(FRAMES), KeyCache(window=50))
    assert_close(made, before, **CLOSE)
    assert cache.frames[0].layers.keys() == {"base.0", "base.1", "camera.1"}


def test_to_see_everything_is_the_base_model() -> None:
    transformer = tiny_wan()
    inputs = tiny_inputs(shape=SHAPE)
    base = forward(transformer, inputs)
    attach_causal(transformer)
    everything = Visibility.block_causal(FRAMES, FRAMES)
    assert_close(forward(transformer, inputs, sees=everything), base, **CLOSE)
    assert torch.equal(forward(transformer, inputs), base)
    for block in transformer.blocks:
        block.attn1.fuse_projections()
    assert_close(forward(transformer, inputs, sees=everything), base, **CLOSE)


def test_teacher_forcing_is_every_block_after_clean_ones(model: WanTransformer3DModel) -> None:
    clean, noise = tiny_inputs(shape=SHAPE)["hidden_states"], tiny_inputs(shape=SHAPE, seed=9)["hidden_states"]
    level = torch.tensor([0.0, 700.0]).repeat_interleave(FRAMES * TOKENS).expand(2, -1)
    inputs = tiny_inputs() | {"hidden_states": torch.cat((clean, noise), dim=2), "timestep": level}
    path = of_model(model)
    together = forward(model, inputs, **teacher_forcing(path, FRAMES, BLOCK))[:, :, FRAMES:]
    cache = KeyCache(window=50)
    for start in range(0, FRAMES, BLOCK):
        own = slice(start, start + BLOCK)
        block = ready_block(model, cache, clean[:, :, own], None if path is None else path.at(own))
        noisy = tiny_inputs() | {"hidden_states": noise[:, :, own], "timestep": torch.full((2,), 700.0)}
        assert_close(forward(model, noisy, past=block), together[:, :, own], **CLOSE)
        cache = commit(model, cache, block, clean[:, :, own], inputs["encoder_hidden_states"])


def test_frame_100000_is_like_frame_100(model: WanTransformer3DModel) -> None:
    inputs = tiny_inputs(shape=(1, 4, 6, 4, 6)) | {"timestep": torch.zeros(1)}
    sees, path = Visibility.block_causal(6, BLOCK), of_model(model, 6)
    early, late = (
        forward(model, inputs, sees=sees, cameras=path, times=torch.arange(6) + first) for first in (100, 100_000)
    )
    assert_close(late, early, **CLOSE)


def test_what_was_forgotten_leaves_no_trace(model: WanTransformer3DModel) -> None:
    """The same last frames give the same next block, bit for bit, however many frames came before them."""
    inputs = tiny_inputs(shape=(1, 4, 3, 4, 6)) | {"timestep": torch.zeros(1)}
    one_layer = streamed(model, inputs, of_model(model, 3), KeyCache(window=6))[1]
    later = KeyCache(window=6, frames=one_layer.frames, count=1_000_002)
    made = [
        forward(model, inputs, past=ready_block(model, cache, inputs["hidden_states"], of_model(model, 3, seed=1)))
        for cache in (one_layer, later)
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize(
    "config", [{"encoding": "raynova"}, {"encoding": "ucpe_clamped"}, {"encoding": "prope", "translation_scale": 0.1}]
)
def test_other_encodings_stream_too(config: dict[str, Any]) -> None:
    transformer = causal_wan(head_dim=48, encoding_options={}, compression=1, **config)
    inputs = tiny_inputs(shape=SHAPE) | {"timestep": torch.zeros(2)}
    far = curved_drive(FRAMES)
    far[:, :3, 3] += 1e6
    path = Cameras(far, PINHOLE)
    made, _ = streamed(transformer, inputs, path, KeyCache(window=20))
    sees = Visibility.block_causal(FRAMES, BLOCK)
    assert_close(made, forward(transformer, inputs, sees=sees, cameras=path), **CLOSE)


def test_every_clip_of_a_batch_has_its_own_path_and_lens() -> None:
    transformer = causal_wan()
    inputs = tiny_inputs(shape=SHAPE) | {"timestep": torch.zeros(2)}
    zoom = Pinhole(torch.linspace(90, 130, FRAMES), 100.0, 128.0, 72.0, 256, 144)
    path = Cameras(cameras(FRAMES, batch=2).world_from_camera, zoom)
    made, _ = streamed(transformer, inputs, path, KeyCache(window=20))
    sees = Visibility.block_causal(FRAMES, BLOCK)
    assert_close(made, forward(transformer, inputs, sees=sees, cameras=path), **CLOSE)


def test_a_stream_of_several_videos_of_each_clip() -> None:
    transformer, path = causal_wan(), cameras(FRAMES, batch=2)
    inputs = tiny_inputs(shape=(4, *SHAPE[1:])) | {"timestep": torch.zeros(4)}
    made, _ = streamed(transformer, inputs, path, KeyCache(window=20))
    expected = forward(transformer, inputs, sees=Visibility.block_causal(FRAMES, BLOCK), cameras=path)
    assert_close(made, expected, **CLOSE)


def test_in_half_precision_blocks_are_the_whole_clip_too() -> None:
    transformer = tiny_wan(torch.bfloat16, num_layers=2)
    perturb(attach(transformer, tiny_config(blocks="every")))
    attach_causal(transformer)
    inputs = tiny_inputs(torch.bfloat16, shape=SHAPE) | {"timestep": torch.zeros(2)}
    made, cache = streamed(transformer, inputs, cameras(FRAMES), KeyCache(window=20))
    sees = Visibility.block_causal(FRAMES, BLOCK)
    assert_close(made, forward(transformer, inputs, sees=sees, cameras=cameras(FRAMES)), rtol=0.05, atol=0.05)
    assert {x.dtype for pair in cache.frames[0].layers.values() for x in pair} == {torch.bfloat16}


def test_training_reaches_every_layer_and_checkpoints_of_blocks_agree() -> None:
    transformer = causal_wan()
    inputs = tiny_inputs(shape=SHAPE)
    attention = {"sees": Visibility.block_causal(FRAMES), "cameras": cameras(FRAMES)}
    gradients = []
    for checkpointing in (False, True):
        (transformer.enable_gradient_checkpointing if checkpointing else transformer.zero_grad)()
        transformer.zero_grad()
        transformer(**inputs, attention_kwargs=attention)[0].square().mean().backward()
        gradients.append([parameter.grad for parameter in transformer.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert bool(plain.isfinite().all())
        assert_close(recomputed, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("branch_first", [True, False])
def test_detach_gives_the_base_model_back(branch_first: bool) -> None:
    transformer = tiny_wan()
    keys, base = list(transformer.state_dict()), run(transformer)
    processors = {name: type(each) for name, each in transformer.attn_processors.items()}
    if not branch_first:
        attach_causal(transformer)
    branch = attach(transformer, tiny_config())
    assert torch.equal(run(transformer, cameras()), base)
    if branch_first:
        attach_causal(transformer)
        attach_causal(transformer)
    copied = copy.deepcopy(transformer)
    assert torch.equal(run(copied, cameras()), base)
    if branch_first:
        assert detach(transformer) is branch
        detach_causal(transformer)
    else:
        detach_causal(transformer)
        assert detach(transformer) is branch
    assert torch.equal(run(transformer), base)
    assert list(transformer.state_dict()) == keys
    assert {name: type(each) for name, each in transformer.attn_processors.items()} == processors
    assert not transformer._forward_pre_hooks
    assert not transformer.rope._forward_hooks


def test_compiled_blocks_are_causal_in_one_graph() -> None:
    transformer = tiny_wan(num_layers=1)
    perturb(attach(transformer, tiny_config(blocks=[0])))
    attach_causal(transformer)
    inputs = tiny_inputs(shape=(1, 4, 6, 2, 2))
    usual = whole(transformer, inputs)
    transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    assert_close(whole(transformer, inputs), usual, **CLOSE)


def test_what_does_not_fit_is_refused() -> None:
    transformer = causal_wan()
    inputs = tiny_inputs(shape=SHAPE)
    path, sees = cameras(FRAMES), Visibility.block_causal(FRAMES)
    latents = inputs["hidden_states"]
    with pytest.raises(ValueError, match="sees must be of the plan's 8 query cameras, got 6"):
        forward(transformer, inputs, sees=Visibility.block_causal(6), cameras=path)
    with pytest.raises(ValueError, match="times must be finite, one for each of 8 latent frames"):
        forward(transformer, inputs, sees=sees, cameras=path, times=[0, 1])
    with pytest.raises(ValueError, match=r"times must be finite, .*got \[3, 8\]"):
        forward(transformer, inputs, sees=sees, cameras=path, times=torch.zeros(3, FRAMES))
    with pytest.raises(ValueError, match=r'attention_kwargs\["sees"\] must be a merope.Visibility, got int'):
        forward(transformer, inputs, sees=3, cameras=path)
    block = ready_block(transformer, KeyCache(6), latents[:, :, :3], path.at(slice(3)))
    with pytest.raises(ValueError, match=r'attention_kwargs\["past"\] must be of 8 frames, got 3'):
        forward(transformer, inputs, past=block)
    with pytest.raises(ValueError, match=r'attention_kwargs\["cameras"\] must be left out with "past"'):
        forward(transformer, of_frames(inputs, slice(3)), past=block, cameras=path)
    with pytest.raises(ValueError, match=r'attention_kwargs\["past"\] must be a block made ready, got KeyCache'):
        forward(transformer, inputs, past=KeyCache(6))
    with pytest.raises(ValueError, match="cameras must be given to a model with a branch"):
        ready_block(transformer, KeyCache(6), latents[:, :, :3])
    with pytest.raises(ValueError, match="window must be an int ≥ 3, got 2"):
        KeyCache(window=2)


def test_cameras_made_ready_for_another_visibility_are_refused() -> None:
    transformer = tiny_wan(num_layers=2)
    branch = perturb(attach(transformer, tiny_config()))
    attach_causal(transformer)
    inputs, sees = tiny_inputs(shape=SHAPE), Visibility.block_causal(FRAMES)
    ready = branch.prepare(cameras(FRAMES), inputs["hidden_states"], sees=sees)
    assert torch.equal(
        forward(transformer, inputs, sees=sees, cameras=ready),
        forward(transformer, inputs, sees=sees, cameras=cameras(FRAMES)),
    )
    bidirectional = branch.prepare(cameras(FRAMES), inputs["hidden_states"])
    with pytest.raises(ValueError, match="cameras made ready must be for the visibility of this call, got None"):
        forward(transformer, inputs, sees=sees, cameras=bidirectional)
    with pytest.raises(ValueError, match="cameras made ready must be for frames that see all, got Visibility"):
        forward(transformer, inputs, cameras=ready)


def test_a_model_that_is_not_causal_refuses_a_visibility() -> None:
    transformer = tiny_wan(num_layers=2)
    attach(transformer, tiny_config())
    with pytest.raises(ValueError, match=r'attention_kwargs\["sees"\] must be left out of a model that is not causal'):
        forward(transformer, tiny_inputs(), cameras=cameras(), sees=Visibility.block_causal(3))


def test_context_parallelism_of_diffusers_is_refused() -> None:
    transformer = tiny_wan(num_layers=2)
    attach_causal(transformer)
    with pytest.raises(ValueError, match="parallel_config must be None for a causal model"):
        transformer.blocks[0].attn1.processor._parallel_config = "split"
    detach_causal(transformer)
    transformer.blocks[0].attn1.processor._parallel_config = "split"
    with pytest.raises(ValueError, match="transformer must be without context parallelism"):
        attach_causal(transformer)


def test_other_models_are_refused_and_compiled_ones_must_be_causal_before() -> None:
    with pytest.raises(ValueError, match="transformer must be a diffusers WanTransformer3DModel, got Linear"):
        attach_causal(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="must be 1 for causal attention, got 2"):
        attach_causal(tiny_wan(num_layers=1, patch_size=(2, 2, 2)))
    transformer = tiny_wan(num_layers=1)
    attach_causal(transformer)
    compiled = torch.compile(transformer)
    attach_causal(compiled)
    detach_causal(compiled)
    with pytest.raises(ValueError, match="transformer must be a causal one"):
        detach_causal(compiled)


def test_another_processor_in_a_block_is_refused() -> None:
    transformer = tiny_wan(num_layers=2)
    attach_causal(transformer)
    transformer.set_attn_processor(WanAttnProcessor())
    with pytest.raises(ValueError, match="processor of block 0 must be a causal one, got WanAttnProcessor"):
        forward(transformer, tiny_inputs(shape=SHAPE), sees=Visibility.block_causal(FRAMES))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"integration": "additive", "encoding": "plucker", "encoding_options": {}}, 'integration must be "parallel"'),
        ({"encoding": "rayrope", "encoding_options": {}, "compression": 1}, "encoding must be one that does not read"),
    ],
)
def test_branches_without_a_causal_form_are_refused(config: dict[str, Any], message: str) -> None:
    transformer = causal_wan(**config)
    with pytest.raises(ValueError, match=message):
        whole(transformer, tiny_inputs(shape=SHAPE))
