"""The operators of the Hopper kernels in plain PyTorch, for the CPU: they read the same tables as the kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

from merope.attention.kernels import hopper
from merope.attention.kernels.hopper_tables import HopperTables
from tests.attention.test_hopper_arithmetic import view_words
from tests.attention.test_hopper_tables import disparity_from_tables, translation_from_tables

calls: list[tuple[int, int]] = []
"""Queries and keys of every forward call since it was last cleared."""


def turned(x: Tensor, matrices: Tensor) -> Tensor:  # [H, N, C], [N, L, s, s] -> [H, N, C]
    """Every token's matrices, each on C / (L·s) neighbouring tuples."""
    count, size = matrices.shape[1:3]
    return torch.einsum("nlij,hnlcj->hnlci", matrices.to(x.dtype), x.unflatten(-1, (count, -1, size))).flatten(2)


def rotary(phasors: Tensor) -> Tensor:  # [..., 2] -> [..., 2, 2]
    cosine, sine = phasors.unbind(-1)
    return torch.stack((cosine, -sine, sine, cosine), dim=-1).unflatten(-1, (2, 2))


def of_queries(t: HopperTables, sample: int, tokens: slice) -> list[Tensor]:
    """O on disparity, rotation or directions, translation, native."""
    frame = t.query_disparity[sample, tokens].unflatten(-1, (1, 3, 3))
    own = t.query_rotation[sample, tokens]
    middle = rotary(own.unflatten(-1, (18, 2))) if t.phases else own.unflatten(-1, (1, 3, 3))
    unit = torch.eye(2).expand(len(frame), 1, 2, 2)
    return [frame, middle, unit, rotary(t.query_native[sample, tokens])]


def of_keys(t: HopperTables, sample: int, camera: int, keys: int) -> list[Tensor]:
    """K as a query camera sees it, in the same order."""
    if t.phases:
        words = view_words(t, sample, camera)[:, 9:].unflatten(1, (9, 2))
        cosine, sine = (x.reshape(-1, 18) for x in words.unbind(-2))
        middle = rotary(torch.stack((cosine, sine), dim=-1))
    else:
        middle = t.key_rotation[sample].unflatten(-1, (1, 3, 3))
    anchors, steps = (f(t, sample, camera) for f in (disparity_from_tables, translation_from_tables))
    return [x[:keys] for x in (anchors, middle, steps, rotary(t.key_native[sample]))]


def on_blocks(x: Tensor, matrices: list[Tensor]) -> Tensor:  # [H, N, 128]
    parts = zip(x.split((36, 36, 24, 32), dim=-1), matrices, strict=True)
    return torch.cat([turned(part, own) for part, own in parts], dim=-1)


def transposed(matrices: list[Tensor]) -> list[Tensor]:
    return [x.mT for x in matrices]


def by_camera(t: HopperTables, batch: int, queries: int, keys: int, cameras: int):  # type: ignore[no-untyped-def]
    """Sample, the camera's queries, their O and the keys' K."""
    each = queries // cameras
    for sample in range(batch):
        own = sample if t.query_native.shape[0] > 1 else 0
        for camera in range(cameras):
            tokens = slice(camera * each, (camera + 1) * each)
            yield sample, tokens, of_queries(t, own, tokens), of_keys(t, own, camera, keys)


def forward(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], cameras: int) -> tuple[Tensor, Tensor]:
    t, out, lse = HopperTables(*tables), torch.empty_like(q), q.new_empty(q.shape[:3])
    assert q.shape[2] == t.query_native.shape[1]
    assert k.shape[2] == t.key_native.shape[1]
    calls.append((q.shape[2], k.shape[2]))
    for sample, tokens, o, key in by_camera(t, q.shape[0], q.shape[2], k.shape[2], cameras):
        own = on_blocks(q[sample, :, tokens], transposed(o))
        keys, values = (on_blocks(x[sample], key) for x in (k, v))
        scores = own @ keys.mT * hopper.SCALE
        out[sample, :, tokens] = on_blocks(scores.softmax(-1) @ values, o)
        lse[sample, :, tokens] = scores.logsumexp(-1)
    return out.transpose(1, 2).contiguous(), lse.float()


def backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, tables, cameras, other_norms=None
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of keys that were given, by an output and a log-sum-exp that may be of more."""
    t, sums = HopperTables(*tables), [torch.zeros_like(x) for x in (q, k, v)]
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    for sample, tokens, o, key in by_camera(t, q.shape[0], q.shape[2], k.shape[2], cameras):
        own, some = (on_blocks(x[sample, :, tokens], transposed(o)) for x in (q, grad))
        keys, values = (on_blocks(x[sample], key) for x in (k, v))
        weights = (own @ keys.mT * hopper.SCALE - lse[sample, :, tokens, None]).exp()
        mean = (grad[sample, :, tokens] * out[sample, :, tokens]).sum(-1, keepdim=True)
        errors = weights * (some @ values.mT - mean) * hopper.SCALE
        sums[0][sample, :, tokens] += on_blocks(errors @ keys, o)
        sums[1][sample] += on_blocks(errors.mT @ own, transposed(key))
        sums[2][sample] += on_blocks(weights.mT @ some, transposed(key))
    return tuple(x.transpose(1, 2).contiguous() for x in sums)  # type: ignore[return-value]


def register() -> Callable[[], None]:
    """Put them in place of the kernels."""
    hopper._attend.register_kernel("cpu")(forward)
    hopper._attend_backward.register_kernel("cpu")(backward)
    return calls.clear
