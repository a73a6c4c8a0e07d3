"""What a stream keeps between its steps gives the numbers of making it anew, and is made once."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanTransformer3DModel
from test_causal_wan import of_frames
from torch import Tensor
from torch.testing import assert_close
from wan_models import cameras, perturb, tiny_config, tiny_inputs, tiny_wan

import merope
from merope.adapters import key_cache
from merope.adapters.attachment import attach
from merope.adapters.block_passes import BlockCondition
from merope.adapters.causal_wan import attach_causal, commit, detach_causal, ready_block
from merope.adapters.key_cache import KeyCache
from merope.adapters.text_keys import TextAttention
from merope.adapters.turned_keys import TurnedKeys, can_keep
from merope.attention.dispatch import attend

SHAPE, BLOCK, LAYERS = (2, 4, 9, 4, 6), 3, 2


def random_keys(tokens: int, seed: int) -> Tensor:  # float64 [2, 4, tokens, 48]
    return torch.randn(2, 4, tokens, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("merope", {"partition": (12, 12, 12, 12), "native_split": (4, 4, 4), "fractions": (0.0, 1.0)}),
        ("gta", {}),
        ("urope", {}),  # whose heads differ
        ("raynova", {}),
    ],
)
def test_turned_keys_attend_as_raw_ones_do(name: str, options: dict[str, Any]) -> None:
    path = cameras(8)
    plan = merope.encoding(name, head_dim=48, **options).plan(path.at(slice(5, None)), (2, 3), key=path)
    kept = TurnedKeys()
    for step in range(2):  # in the second one, the last 18 keys are others
        q, past = random_keys(18, 10 + step), [random_keys(30, seed) for seed in (0, 1)]
        own = [random_keys(18, 20 + step), random_keys(18, 30 + step)]
        k, v = (torch.cat(parts, dim=2) for parts in zip(past, own, strict=True))
        with torch.no_grad():
            assert can_keep(q, plan)
            if step:
                kept.replace_last("layer", *own, plan)
            else:
                kept.keep("layer", k, v, plan)
            assert_close(kept.attend("layer", q, plan), attend(q, k, v, plan), rtol=1e-12, atol=1e-12)
    assert not can_keep(q, plan)  # with gradients, buffers must not be written to


def causal_wan() -> WanTransformer3DModel:
    transformer = tiny_wan(num_layers=LAYERS)
    perturb(attach(transformer, tiny_config(blocks="every")))
    attach_causal(transformer)
    return transformer


@torch.no_grad()
def driven(transformer: WanTransformer3DModel, text: Tensor | None = None) -> tuple[Tensor, KeyCache]:
    """Three blocks of three steps each."""
    inputs = tiny_inputs(shape=SHAPE)
    inputs["encoder_hidden_states"] = text if text is not None else inputs["encoder_hidden_states"]
    cache, made, path = KeyCache(window=9), [], cameras(SHAPE[2])
    for start in range(0, SHAPE[2], BLOCK):
        own = slice(start, start + BLOCK)
        latents = inputs["hidden_states"][:, :, own]
        block = ready_block(transformer, cache, latents, path.at(own))
        for step in range(3):
            given = of_frames(inputs, own) | {"hidden_states": latents * (1 + step)}
            made.append(transformer(**given, attention_kwargs={"past": block})[0])
        cache = commit(transformer, cache, block, latents, inputs["encoder_hidden_states"])
    return torch.cat(made, dim=2), cache


def test_steps_of_a_block_are_those_without_anything_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = causal_wan()
    made, _ = driven(transformer)
    monkeypatch.setattr(key_cache, "can_keep", lambda q, plan: False)
    for block in transformer.blocks:
        block.attn2.set_processor(WanAttnProcessor())
    plain, _ = driven(transformer)
    assert_close(made, plain, rtol=1e-6, atol=1e-6)


def test_the_keys_of_the_cache_are_turned_once_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, keep = [], TurnedKeys.keep

    def counted(self: TurnedKeys, layer: str, *args: Any) -> None:
        kept.append(layer)
        keep(self, layer, *args)

    monkeypatch.setattr(TurnedKeys, "keep", counted)
    driven(causal_wan())
    layers = [f"{part}.{index}" for part in ("base", "camera") for index in range(LAYERS)]
    assert sorted(kept) == sorted(2 * layers)  # the first block has no past; commits turn nothing anew


def test_the_keys_of_a_text_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, calls = causal_wan(), []
    for block in transformer.blocks:
        block.attn2.to_k.register_forward_hook(lambda *_: calls.append(1))
    made, cache = driven(transformer)
    assert len(calls) == LAYERS
    other = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
    assert not torch.allclose(driven(transformer, other)[0], made, rtol=1e-3)
    assert len(calls) == 2 * LAYERS
    reader_of_both = ready_block(transformer, cache, tiny_inputs(shape=SHAPE)["hidden_states"][:, :, :3], cameras(3))
    changed = of_text(transformer, reader_of_both, other)  # the same cache with another text: nothing old is used
    assert_close(changed, of_text(transformer, reader_of_both, other.clone()), rtol=0, atol=0)
    assert len(calls) == 4 * LAYERS


@torch.no_grad()
def of_text(transformer: WanTransformer3DModel, block: BlockCondition, text: Tensor) -> Tensor:
    inputs = of_frames(tiny_inputs(shape=SHAPE), slice(3)) | {"encoder_hidden_states": text}
    return transformer(**inputs, attention_kwargs={"past": block})[0]


def test_detaching_gives_cross_attention_back() -> None:
    transformer = tiny_wan(num_layers=LAYERS)
    before = [block.attn2.processor for block in transformer.blocks]
    attach_causal(transformer)
    assert all(isinstance(block.attn2.processor, TextAttention) for block in transformer.blocks)
    detach_causal(transformer)
    assert [block.attn2.processor for block in transformer.blocks] == before
