"""Gradient checkpointing is exact, also with two camera batches in flight."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from wan_models import cameras, perturb, run, tiny_config, tiny_wan

from merope.adapters.attachment import attach


def with_checkpointing(when: str, function: Callable[..., Tensor] | None, config: dict[str, object]) -> nn.Module:
    transformer = tiny_wan(torch.float64, num_layers=2).train()
    if when == "before attach":
        transformer.enable_gradient_checkpointing(function)
    perturb(attach(transformer, tiny_config(**config)))
    if when == "after attach":
        transformer.enable_gradient_checkpointing(function)
    return transformer


def gradients_of_two_forwards(transformer: nn.Module) -> dict[str, Tensor]:
    """Both forwards, with different cameras, stand before the one backward."""
    first = run(transformer, cameras(batch=2, seed=0))
    second = run(transformer, cameras(batch=2, seed=9))
    (first.square().sum() + 3 * second.square().sum()).backward()
    return {name: parameter.grad for name, parameter in transformer.named_parameters()}


def reentrant(module: nn.Module, *args: object) -> Tensor:
    return checkpoint(module, *args, use_reentrant=True)


@pytest.mark.parametrize("encoding", ["merope", "rayrope"])
@pytest.mark.parametrize("when", ["before attach", "after attach"])
def test_gradients_equal_those_without(when: str, encoding: str) -> None:
    config = {"blocks": "every"} | ({} if encoding == "merope" else {"encoding": encoding, "encoding_options": {}})
    plain = gradients_of_two_forwards(with_checkpointing("never", None, config))
    saved = gradients_of_two_forwards(with_checkpointing(when, None, config))
    assert plain.keys() == saved.keys()
    assert all(torch.equal(saved[name], plain[name]) for name in plain)
    assert all(bool(grad.abs().sum() > 0) for name, grad in plain.items() if "processor" in name)


@pytest.mark.parametrize("function", [reentrant, partial(checkpoint, use_reentrant=False)])
def test_any_checkpointing_function_will_do(function: Callable[..., Tensor]) -> None:
    plain = gradients_of_two_forwards(with_checkpointing("never", None, {}))
    saved = gradients_of_two_forwards(with_checkpointing("after attach", function, {}))
    for name, gradient in plain.items():  # the order of a sum may differ
        assert (saved[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


def test_blocks_run_again_with_their_own_cameras() -> None:
    """What would go wrong: a recomputation that reads the cameras of the latest forward."""
    transformer = with_checkpointing("after attach", None, {})
    one = run(transformer, cameras(seed=0))
    run(transformer, cameras(seed=5))
    (of_first,) = torch.autograd.grad(one.square().sum(), transformer.blocks[1].attn1.processor.cam_qkv.weight)
    again = run(transformer, cameras(seed=0))
    (alone,) = torch.autograd.grad(again.square().sum(), transformer.blocks[1].attn1.processor.cam_qkv.weight)
    assert torch.equal(of_first, alone)
