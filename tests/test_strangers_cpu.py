"""The option `--strangers-cpu` changes the last bits of products of other shapes, and nothing else."""

from collections.abc import Iterator

import pytest
import torch
from strangers_cpu import strangers_cpu
from torch import Tensor
from torch.nn.functional import conv2d, linear, scaled_dot_product_attention

ROWS, WIDTH = 6, 64


@pytest.fixture(autouse=True)
def _on_a_strangers_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("strangers_cpu"):
        yield
    else:
        with strangers_cpu():
            yield


def mixed(rows: Tensor) -> Tensor:  # [N, 64] -> [N, 8]
    return torch.einsum("nd,de->ne", rows, torch.linspace(-1, 1, WIDTH * 8).double().sin().reshape(WIDTH, 8))


def attended(rows: Tensor) -> Tensor:  # [N, 64] -> [N, 64]
    keys = torch.linspace(-9, 9, 30 * WIDTH).double().sin().reshape(1, 1, 30, WIDTH)
    return scaled_dot_product_attention(rows[None, None], keys, keys.cos())[0, 0]


BY_ROW = {
    "einsum": mixed,
    "linear": lambda rows: linear(rows, torch.linspace(-3, 3, 5 * WIDTH).double().cos().reshape(5, WIDTH), rows[0, :5]),
    "matrix times vector": lambda rows: rows @ torch.linspace(-3, 3, WIDTH).double().cos(),
    "batched": lambda rows: (rows[:, None] @ rows[:1, :, None].expand(len(rows), -1, -1))[:, 0],
    "attention": attended,
    "convolution": lambda rows: conv2d(rows[:, :, None, None], torch.ones(3, WIDTH, 1, 1).double())[..., 0, 0],
    "sum": lambda rows: rows.sum(-1),
    "mean": lambda rows: rows.mean(-1),
    "norm": lambda rows: rows.norm(dim=-1),
}


@pytest.mark.parametrize("of_rows", BY_ROW.values(), ids=BY_ROW)
def test_the_same_rows_differ_in_their_last_bits_in_another_shape(of_rows) -> None:
    rows = torch.randn(3 * ROWS, WIDTH, dtype=torch.float64)
    few, many = of_rows(rows[:ROWS]), of_rows(rows)[:ROWS]
    assert not torch.equal(few, many)
    torch.testing.assert_close(few, many, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("of_rows", BY_ROW.values(), ids=BY_ROW)
def test_the_same_computation_twice_is_equal(of_rows) -> None:
    rows = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    assert torch.equal(of_rows(rows), of_rows(rows.clone()))


def test_gradients_are_those_of_the_products() -> None:
    rows = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    for of_rows in (mixed, attended):
        torch.autograd.gradcheck(of_rows, rows)


def test_products_keep_their_type_and_masks_their_meaning() -> None:
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    assert (rows @ rows.mT).dtype == torch.bfloat16
    q, k, v = torch.randn(3, 1, 2, 9, 16, dtype=torch.float64)
    seen = torch.ones(9, 9).tril().bool()
    expected = (q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    for how in ({"attn_mask": seen}, {"is_causal": True}):
        got = scaled_dot_product_attention(q, k, v, **how)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("channels", [3, WIDTH + 1])
def test_shapes_that_do_not_fit_are_refused_as_ever(channels: int) -> None:
    rows = torch.randn(ROWS, channels)
    with pytest.raises(RuntimeError):
        linear(rows, torch.randn(5, WIDTH))
    with pytest.raises(RuntimeError):
        conv2d(rows[:, :, None, None], torch.randn(5, WIDTH, 1, 1))


def test_the_usual_order_returns() -> None:
    rows = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    before = rows @ rows.mT
    with strangers_cpu():
        pass
    assert torch.equal(rows @ rows.mT, before)
