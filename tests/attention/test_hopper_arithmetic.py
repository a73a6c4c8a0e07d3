"""The Hopper kernels' arithmetic in plain PyTorch, on the CPU: their tables, their order, their roundings.

Operands are half precision and turn by packed half-precision instructions, sums are float32. What the tensor cores add
up is float64 here: their own rounding is for tests/gpu.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from merope.attention.kernels.hopper_tables import HopperTables, make_tables
from merope.attention.plan import AttentionPlan
from merope.attention.sdpa import attend_sdpa
from merope.encodings.merope import MeRoPE
from merope.geometry.cameras import Cameras
from tests.scenes import PINHOLE, curved_drive, degenerate_cameras, random_poses

SCALE = 128**-0.5
WEIGHT = 2.0**8
"""Weights and errors carry it through half precision."""
MOST_WEIGHT = 2.0**15
TILE = 128


def half(x: Tensor) -> Tensor:
    """Rounded to half precision: what one packed instruction leaves."""
    return x.half().double()


def view_words(tables: HopperTables, sample: int, camera: int) -> Tensor:  # float16 [padded keys, 9 or 27, 2]
    """Half-vectors, then phasors of directions in order, of a camera. Words of 8 bytes hold float32 in a test."""
    groups = tables.key_views[sample, camera].split(4 * 128, dim=-1)  # of tiles
    words = torch.cat([group.unflatten(-1, (128, -1)) for group in groups], dim=-1).flatten(0, 1)  # [keys, words]
    words = torch.cat((words[:, :9], words[:, 12:], words[:, 10:12]), dim=1)
    numbers = torch.float16 if words.dtype == torch.int32 else torch.float32
    return words.contiguous().view(numbers).unflatten(1, (-1, 2))


@dataclass(frozen=True)
class View:
    """Keys as one query camera sees them: the kernels' numbers for every key."""

    half_vectors: Tensor  # [Nk, 6, 3] m
    phasors: Tensor  # [Nk, 12 or 30, 2] translation, then directions

    @classmethod
    def of(cls, tables: HopperTables, camera: int, keys: int) -> "View":
        words = view_words(tables, 0, camera).double()[:keys]  # [Nk, 9 or 27, 2]
        steps = tables.phasors[0, camera].double()[tables.key_camera[:keys].long()]  # [Nk, 6, 2, 2]
        two_by_two = torch.cat((steps, words[:, 9:].unflatten(1, (-1, 2))), dim=1)
        return cls(words[:, :9].reshape(-1, 6, 3), two_by_two.transpose(-1, -2).flatten(1, 2))

    @property
    def places(self) -> list[slice]:
        """Channels of the pairs."""
        return [slice(72, 96)] if self.phasors.shape[1] == 12 else [slice(72, 96), slice(36, 72)]

    def turn(self, x: Tensor) -> Tensor:  # [Nk, 128], in half precision
        """As turn_chunks and DirectionTurn: every operation rounds."""
        x = x.clone()
        n, y = self.half_vectors[:, :, None], x[:, :36].unflatten(1, (6, 2, 3))
        dot = half(n[..., 0] * y[..., 0])
        for i in (1, 2):
            dot = half(n[..., i] * y[..., i] + dot)
        x[:, :36] = half(y - 2 * dot[..., None] * n).flatten(1)
        for place, phasors in zip(self.places, self.phasors.split((12, 18)[: len(self.places)], dim=1), strict=True):
            (c, s), (a, b) = phasors.unbind(-1), x[:, place].unflatten(1, (-1, 2)).unbind(-1)
            pairs = half(c * a - half(s * b)), half(s * a + half(c * b))
            x[:, place] = torch.stack(pairs, dim=-1).flatten(1)
        return x

    def turn_sums(self, x: Tensor, sign: int) -> Tensor:  # float32 [Nk, 128]
        """As SumTurns and DirectionSumTurns: into this view (1) or out of it (−1), made orthogonal to first order."""
        x = x.clone()
        n, y = self.half_vectors.float()[:, :, None], x[:, :36].unflatten(1, (6, 2, 3))
        along = n * (4 - 2 * (n * n).sum(-1, keepdim=True))
        x[:, :36] = (y - (n * y).sum(-1, keepdim=True) * along).flatten(1)
        unit = self.phasors.float() * (1.5 - 0.5 * (self.phasors**2).sum(-1, keepdim=True)).float()
        for place, phasors in zip(self.places, unit.split((12, 18)[: len(self.places)], dim=1), strict=True):
            x[:, place] = turned_pairs(x[:, place], phasors, sign)
        return x


def turned_pairs(x: Tensor, phasors: Tensor, sign: int = 1) -> Tensor:  # [N, 2n], [N, n, 2]
    c, s = phasors.unbind(-1)
    a, b = x.unflatten(1, (-1, 2)).unbind(-1)
    return torch.stack((c * a - sign * s * b, sign * s * a + c * b), dim=-1).flatten(1)


def turned_triplets(x: Tensor, frames: Tensor) -> Tensor:  # [N, 3n], [N, 3, 3]
    return torch.einsum("nij,ntj->nti", frames, x.unflatten(1, (-1, 3))).flatten(1)


def turned_queries(x: Tensor, tables: HopperTables, sign: int) -> Tensor:  # float64 [Nq, 128]
    """By the queries' own operators (1) or their transposes (−1): TokenTurn."""
    disparity, rotation, native = (y[0].double() for y in (*tables.tensors()[:2], tables.query_native))
    frames = [y.unflatten(-1, (3, 3)) for y in (disparity, rotation[:, :9])]
    frames = frames if sign > 0 else [y.mT for y in frames]
    phases = rotation.unflatten(-1, (-1, 2)) if tables.phases else None
    middle = x[:, 36:72]
    return torch.cat(
        (
            turned_triplets(x[:, :36], frames[0]),
            turned_triplets(middle, frames[1]) if phases is None else turned_pairs(middle, phases, sign),
            x[:, 72:96],
            turned_pairs(x[:, 96:], native, sign),
        ),
        dim=1,
    )


def turned_keys(x: Tensor, tables: HopperTables, sign: int) -> Tensor:  # float64 [Nk, 128]
    """By the keys' own operators (1) or their transposes (−1); z of disparity changes its sign (see `reflect`)."""
    disparity = (x[:, :36].unflatten(1, (-1, 3)) * torch.tensor([1.0, 1.0, -1.0])).flatten(1)
    middle = x[:, 36:72]
    if not tables.phases:
        frames = tables.key_rotation[0].double().unflatten(-1, (3, 3))
        middle = turned_triplets(middle, frames if sign > 0 else frames.mT)
    native = turned_pairs(x[:, 96:], tables.key_native[0].double(), sign)
    return torch.cat((disparity, middle, x[:, 72:96], native), dim=1)


def as_the_kernels(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of q, k and v, each [N, 128], in the dtype of q."""
    tables = make_tables(plan)
    packed_k, packed_v = (half(turned_keys(x.double(), tables, 1)) for x in (k, v))
    packed_q, packed_grad = (half(turned_queries(x.double(), tables, -1)) for x in (q, grad))
    views = [View.of(tables, camera, len(k)) for camera in range(plan.query_cameras)]
    cameras = [slice(i * plan.tokens_per_camera, (i + 1) * plan.tokens_per_camera) for i in range(len(views))]
    seen = [(view.turn(packed_k), view.turn(packed_v)) for view in views]
    scores = [SCALE * packed_q[own] @ keys.mT for own, (keys, _) in zip(cameras, seen, strict=True)]
    outs = [weighted(s, values) for s, (_, values) in zip(scores, seen, strict=True)]
    out = turned_queries(torch.cat(outs), tables, 1).to(q.dtype)
    mean = (grad.double() * out.double()).sum(-1, keepdim=True)
    largest = float(grad.double().norm(dim=-1).max() * v.double().norm(dim=-1).max())
    error_scale = 2.0 ** (7 - math.floor(math.log2(largest)))
    sums_k, sums_v = torch.zeros(2, len(k), 128)
    grads_q = []
    for view, own, (keys, values), s in zip(views, cameras, seen, scores, strict=True):
        weights = WEIGHT * s.softmax(-1)
        errors = half(weights * error_scale * (packed_grad[own] @ values.mT - mean[own])) / (WEIGHT * error_scale)
        grads_q.append(errors @ keys)
        sums_k = view.turn_sums(view.turn_sums(sums_k, 1) + (errors.mT @ packed_q[own]).float(), -1)
        sums_v = view.turn_sums(view.turn_sums(sums_v, 1) + (half(weights).mT @ packed_grad[own] / WEIGHT).float(), -1)
    grad_q = turned_queries(torch.cat(grads_q), tables, 1)
    grad_k, grad_v = (turned_keys(x.double(), tables, -1) for x in (sums_k, sums_v))
    return [out, *(x.to(q.dtype) for x in (SCALE * grad_q, SCALE * grad_k, grad_v))]


def weighted(scores: Tensor, values: Tensor) -> Tensor:
    """As `Softmax`: weights 2^(score + shift) in half precision, by a shift that later tiles keep if they can."""
    scores, tiles = scores * math.log2(math.e), values.split(TILE)
    shift = out = total = torch.zeros(())
    for number, (x, rows) in enumerate(zip(scores.split(TILE, dim=-1), tiles, strict=True)):
        by_largest = math.log2(WEIGHT) - x.amax(-1, keepdim=True)
        before, shift = shift, by_largest if number == 0 else shift
        top = torch.stack([torch.exp2(x[:, lane_columns] + shift).sum(-1) for lane_columns in columns_of_lanes(x)])
        top = top.amax(0)[:, None].float()  # infinite beyond float32's range
        if number:
            down = torch.where(top > MOST_WEIGHT, top.double().log2().floor() - math.log2(WEIGHT), 0.0)
            shift = torch.where(top.isfinite(), shift - down, torch.minimum(shift, by_largest))
        weights = torch.exp2(x + shift)
        rescale = torch.exp2(shift - before) if number else 0.0
        assert float(half(weights).max()) <= MOST_WEIGHT  # half precision holds them
        out, total = rescale * out + half(weights) @ rows, rescale * total + weights.sum(-1, keepdim=True)
    return (out / total).float().double()


def columns_of_lanes(scores: Tensor) -> list[Tensor]:
    """Which columns of a tile each of the four lanes that share a row has."""
    return [
        column for lane in range(4) if len(column := (torch.arange(scores.shape[-1]) // 2 % 4 == lane).nonzero()[:, 0])
    ]


def with_gradients(attention, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    leaves = [x[None, None].detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return [x[0, 0].detach() for x in (out, *torch.autograd.grad(out, leaves, grad[None, None]))]


def errors(got: list[Tensor], right: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, right, strict=True)]


RIGS = {
    "random": (Cameras(random_poses(5), PINHOLE), (5, 7)),
    "straight": (degenerate_cameras()["straight"], (5, 7)),
    "1e6 m": (Cameras(random_poses(5, spread_m=1e6), PINHOLE), (5, 7)),
    "13 cameras": (Cameras(curved_drive(13), PINHOLE), (5, 8)),
    "64 cameras": (Cameras(random_poses(64), PINHOLE), (2, 3)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("direction_scale", [None, 50.0])
@pytest.mark.parametrize("rig", RIGS)
def test_errors_are_at_most_twice_those_of_pytorch(rig: str, direction_scale: float | None, dtype: torch.dtype) -> None:
    cameras, grid = RIGS[rig]
    plan = MeRoPE(128, direction_scale=direction_scale).plan(cameras, grid)
    generator = torch.Generator().manual_seed(0)
    *inputs, grad = (torch.randn(plan.key_tokens, 128, generator=generator).to(dtype) for _ in range(4))
    exact, exact_grad = [x.double() for x in inputs], grad.double()

    def under_plan(*x: Tensor) -> Tensor:
        return attend_sdpa(*x, plan, 2**30)

    right = with_gradients(under_plan, exact, exact_grad)
    ours = errors(as_the_kernels(plan, *inputs, grad), right)
    plain = errors(
        with_gradients(scaled_dot_product_attention, inputs, grad),
        with_gradients(scaled_dot_product_attention, exact, exact_grad),
    )
    if dtype == torch.float16:  # an encoding rounds more numbers to it than plain attention has
        plain = errors(with_gradients(under_plan, inputs, grad), right)
    assert all(a <= 2 * b for a, b in zip(ours, plain, strict=True)), (ours, plain)


@pytest.mark.parametrize("jump", [0.0, 4.0, 60.0, 100.0, 5000.0])
def test_weights_of_scores_that_grow_from_tile_to_tile(jump: float) -> None:
    """By less than half precision holds, by less than float32 does, and by more."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(16, 300, generator=generator, dtype=torch.float64)
    scores[:, 130:] += jump * torch.rand(16, 1, generator=generator, dtype=torch.float64)
    scores[:, 260:] += jump * torch.rand(16, 1, generator=generator, dtype=torch.float64)
    values = half(torch.randn(300, 128, generator=generator).double())
    right = scores.softmax(-1) @ values
    error = (weighted(scores, values) - right).norm() / right.norm()
    assert error < 2**-11
