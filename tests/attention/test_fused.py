"""The fused backend without a GPU: channel maps, chunks, and what it refuses (kernels: test_interpreted_kernels.py)."""

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import FISHEYE, PINHOLE, mixed_cameras, random_content, random_poses, random_qkv
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import merope
from merope import GTA, AttentionPlan, Cameras, MeRoPE
from merope.attention import dispatch, fused
from merope.attention.kernels import prepared as prepared_module
from merope.attention.kernels.channel_maps import ChannelMap, SideTables
from merope.attention.kernels.chunks import chunk_size
from merope.attention.kernels.prepared import PreparedPlan, cameraless, grouped_dtype, prepare, prepared
from merope.attention.kernels.softmax_attention import kernel_for
from merope.attention.kernels.support import carried_width, why_not_fused
from merope.encodings import ENCODINGS
from tests.foreign_plans import ACCEPTED, FOREIGN, random_plan

GRID = (1, 2)


def plan_of(encoding: merope.encodings.protocol.Encoding, cameras: Cameras, extra: int = 0) -> AttentionPlan:
    content = None
    if encoding.content_channels:
        content = random_content(1, cameras.count * GRID[0] * GRID[1] + extra)
    return encoding.plan(cameras, GRID, extra_tokens=extra, content=content)


def matrix(
    channel_map: ChannelMap, tables: SideTables, sample: int, token: int, camera: int, head: int, heads: int
) -> Tensor:  # [W, source width]
    """A channel map written out, term by term, as the kernels read it."""
    out = np.zeros((channel_map.width, channel_map.source_width))
    batch_stride, head_stride, head_groups, row_stride, camera_stride, line = channel_map.strides.tolist()
    has_camera = float(tables.has_camera[sample if tables.has_camera.shape[0] > 1 else 0, token])
    terms = zip(channel_map.index.tolist(), channel_map.weight.tolist(), strict=True)
    for (sources, fixed, moving), (sign, first, second) in terms:
        for channel, source in enumerate(sources):
            if source < 0:
                continue
            row = int(tables.rows[line[channel], token]) if row_stride[channel] > 0 else 0
            offset = sample * batch_stride[channel] + row * row_stride[channel]
            offset += head * head_groups[channel] // heads * head_stride[channel]
            value = 1.0
            if fixed[channel] >= 0:
                value = float(tables.shared[offset + fixed[channel]])
            elif moving[channel] >= 0:
                value = float(tables.grouped[offset + camera * camera_stride[channel] + moving[channel]])
            out[channel, source] += sign[channel] * (first[channel] + second[channel] * has_camera) * value
    return torch.from_numpy(out)


def assert_maps_hold(plan: AttentionPlan, queries: Iterable[int], keys: Iterable[int], heads: int) -> None:
    """Multiplied out as the kernels do, the maps give the plan's operator of every pair of these tokens."""
    maps = prepare(plan, torch.float32)
    own = plan.for_heads(heads)
    for sample, head, query in product(range(plan.batch), range(heads), queries):
        camera = query // plan.tokens_per_camera if plan.groups > 1 else 0
        turned, back = (matrix(m, maps.query_tables, sample, query, 0, head, heads) for m in (maps.turn, maps.back))
        exact = own.operators(query, sample, head if own_heads(own) > 1 else 0).double()
        for key in keys:
            where = (maps.key_tables, sample, key, camera, head, heads)
            expanded, values = matrix(maps.key, *where), matrix(maps.value, *where)
            torch.testing.assert_close(turned.mT @ expanded, exact[key], rtol=2e-6, atol=2e-6)  # logits: (Oᵀq)ᵀ K k
            wanted = exact[key] if plan.transform_values else torch.eye(plan.head_dim, dtype=torch.float64)
            torch.testing.assert_close(back @ values, wanted, rtol=2e-6, atol=2e-6)


def own_heads(plan: AttentionPlan) -> int:
    return max([1, *(operator.table.shape[1] for block in plan.blocks for operator in block.operators)])


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("name", ENCODINGS)
def test_back_times_key_is_the_operator_of_every_pair_with_a_camera_on_the_query_side(name: str, extra: int) -> None:
    plan = plan_of(merope.encoding(name), Cameras(random_poses(2), PINHOLE), extra)
    assert_maps_hold(plan, (0, 3), (1, 2, *range(4, 4 + extra)), heads=3 if own_heads(plan) > 1 else 1)


@pytest.mark.parametrize("name", [*FOREIGN, *ACCEPTED])
def test_maps_of_foreign_plans_hold_their_operators(name: str) -> None:
    plan = (FOREIGN | ACCEPTED)[name]()
    assert_maps_hold(plan, (0, 4), (1, 3), heads=3 if own_heads(plan) > 1 else 1)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=12)
def test_maps_of_random_plans_hold_their_operators(seed: int) -> None:
    assert_maps_hold(random_plan(seed), (2,), (3,), heads=4)


def test_transposed_maps_and_inverses_are_transposes() -> None:
    plan = MeRoPE().plan(mixed_cameras(batch=True), (1, 2), extra_tokens=1)
    maps = prepare(plan, torch.float32)
    for sample in (0, 1):
        for there, back in ((maps.turn, maps.turn_t), (maps.back, maps.back_t)):
            one, other = (matrix(m, maps.query_tables, sample, 3, 0, 0, 1) for m in (there, back))
            assert torch.equal(one, other.mT)
    for channel_map in (maps.key, maps.value, maps.turn):
        for sources, inverse in zip(channel_map.index[:, 0], channel_map.inverse, strict=True):
            for channel in torch.nonzero(sources >= 0).squeeze(-1).tolist():
                assert inverse[sources[channel]] == channel
            assert int((inverse >= 0).sum()) == int((sources >= 0).sum())


def test_what_is_made_of_a_plan_is_made_once_and_not_of_its_changed_copies() -> None:
    plan = MeRoPE().plan(Cameras(random_poses(3), PINHOLE), GRID, extra_tokens=1)
    first = prepared(plan, torch.bfloat16)
    assert prepared(plan, torch.bfloat16) is first
    assert first.key_tables.grouped.dtype == torch.float16
    assert prepared(plan, torch.float16).key_tables.grouped.dtype == torch.float32
    assert cameraless(plan) is cameraless(plan)
    some = plan.at(slice(None), slice(None))
    assert prepared(some, torch.bfloat16) is not first
    assert prepared(plan, torch.bfloat16) is first


def test_samples_of_a_plan_do_not_take_what_was_made_of_all() -> None:
    """RayNova's first block is the same for all samples, its second is not."""
    plan = merope.encoding("raynova").plan(Cameras(random_poses(2, 2), PINHOLE), GRID)
    whole = prepared(plan, torch.float32)
    part = plan.at(slice(1, 2), slice(None))
    assert prepared(part, torch.float32) is not whole
    assert prepared(part, torch.float32).key_tables.shared.numel() < whole.key_tables.shared.numel()


def test_a_plan_moved_elsewhere_leaves_what_was_made_of_it_behind() -> None:
    plan = MeRoPE().plan(Cameras(random_poses(2), PINHOLE), GRID)
    made = prepared(plan, torch.float32)
    moved = plan.to(dtype=torch.float32)
    assert made in plan.kept.values()
    assert not moved.kept
    assert plan.to(dtype=torch.float64) is plan  # nothing to change: made of it once
    assert prepared(plan, torch.float32) is made


def test_plans_of_one_structure_share_their_maps() -> None:
    """A block that learns a depth makes a plan in every step: listing terms anew would take longer than attending."""
    cameras, encoding = Cameras(random_poses(2), PINHOLE), merope.encoding("rayrope", head_dim=28)
    first, second = (
        prepare(encoding.plan(cameras, GRID, content=random_content(1, 4, seed)), torch.float32) for seed in (0, 1)
    )
    assert second.key is first.key
    assert not torch.equal(second.key_tables.grouped, first.key_tables.grouped)
    other_plans = [
        plan_of(encoding, cameras, extra=1),
        plan_of(encoding, Cameras(random_poses(3), PINHOLE)),
        plan_of(replace(encoding, transform_values=False), cameras),
        plan_of(merope.encoding("crepe", head_dim=28), cameras),
    ]
    assert all(prepare(plan, torch.float32).key is not first.key for plan in other_plans)


def test_few_structures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_module, "_MADE", {})
    monkeypatch.setattr(prepared_module, "STRUCTURES_KEPT", 2)
    plans = [plan_of(GTA(), Cameras(random_poses(count), PINHOLE)) for count in (1, 2, 3)]
    maps = [prepare(plan, torch.float32).key for plan in plans]
    assert prepare(plans[2], torch.float32).key is maps[2]
    assert prepare(plans[1], torch.float32).key is maps[1]
    assert prepare(plans[0], torch.float32).key is not maps[0]
    assert len(prepared_module._MADE) == 2


def test_deterministic_training_does_not_use_cudnn() -> None:
    x = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 1, 1, 128))
    assert kernel_for(x, keys=2) == "cudnn"  # type: ignore[arg-type]
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel_for(x, keys=2) == "flash"  # type: ignore[arg-type]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_single_key_does_not_go_to_cudnn() -> None:
    x = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 1, 1, 128))
    assert kernel_for(x, keys=1) == "flash"  # type: ignore[arg-type]


def test_packing_keeps_everything() -> None:
    maps = prepare(MeRoPE().plan(mixed_cameras(batch=True), (1, 2)), torch.float16)
    again = PreparedPlan.unpack(*maps.pack())
    assert (again.groups, again.tokens_per_group, again.width) == (maps.groups, maps.tokens_per_group, maps.width)
    for one, other in zip(maps.pack()[0], again.pack()[0], strict=True):
        assert one is other
    assert again.key.gated
    assert again.key.grouped
    assert not again.turn.grouped


def test_only_numbers_that_float16_can_hold_are_stored_in_it() -> None:
    assert grouped_dtype(MeRoPE().plan(Cameras(random_poses(2), PINHOLE), GRID), torch.bfloat16) == torch.float16
    # Per-token matrices hold metres: their tables are float32 whatever the inputs.
    plan = GTA().plan(Cameras(random_poses(2, spread_m=1e6), PINHOLE), GRID)
    assert prepare(plan, torch.float16).key_tables.shared.isfinite().all()


def test_carried_channels_are_a_multiple_of_eight() -> None:
    encoding = MeRoPE(head_dim=30, partition=(18, 6, 6, 0))
    plan = encoding.plan(Cameras(random_poses(2), FISHEYE), GRID, extra_tokens=1)
    assert carried_width(plan) == 64  # 30 + 30, rounded up


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 300), st.integers(1, 200))
def test_chunks_fit_and_take_the_fewest_waves(total: int, most: int, tiles: int, processors: int) -> None:
    def waves(size: int) -> int:
        sizes = [min(size, total - start) for start in range(0, total, size)]
        return sum(math.ceil(one * tiles / processors) for one in sizes)

    chosen = chunk_size(total, most, tiles, processors)
    assert 1 <= chosen <= min(most, total)
    assert waves(chosen) == min(waves(size) for size in range(1, min(most, total) + 1))


def test_fused_says_why_it_cannot() -> None:
    plan = MeRoPE().plan(Cameras(random_poses(2), PINHOLE), GRID)
    q, k, v = random_qkv(1, 1, 4, 128)
    with pytest.raises(
        ValueError, match=r'backend must be "auto".*got "fused"; it computes in .* not in torch.float64'
    ):
        merope.attend(q, k, v, plan, backend="fused")
    q, k, v = q.float(), k.float(), v.float()
    with pytest.raises(ValueError, match="it needs a CUDA GPU, the tensors are on cpu"):
        merope.attend(q, k, v, plan, backend="fused")
    poses = random_poses(2).requires_grad_()
    learned = MeRoPE().plan(Cameras(poses, PINHOLE), GRID)
    with pytest.raises(ValueError, match="no gradient to tables of quaternions"):
        merope.attend(q, k, v, learned, backend="fused")
    with torch.no_grad(), pytest.raises(ValueError, match="needs a CUDA GPU"):
        merope.attend(q, k, v, learned, backend="fused")


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: int, samples: int) -> SimpleNamespace:
    """What is asked of q, as if it were bfloat16 on a GPU of that compute capability."""
    for module in (fused, prepared_module):
        monkeypatch.setattr(module, "capability", lambda _: capability)
    device = SimpleNamespace(index=0)
    return SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=device, shape=(samples, 1, 4, 128))


def test_fused_takes_plans_that_learn_a_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cameras = on_a_gpu(monkeypatch, 80, samples=1), Cameras(random_poses(2), PINHOLE)
    for name in ("rayrope", "crepe"):
        plan = merope.encoding(name).plan(cameras, GRID, content=random_content(1, 4).requires_grad_())
        assert why_not_fused(q, plan) is None  # type: ignore[arg-type]


def test_deterministic_training_adds_no_gradients_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    cameras, poses = Cameras(random_poses(2), PINHOLE), random_poses(2).requires_grad_()
    depths = merope.encoding("rayrope").plan(cameras, GRID, content=random_content(1, 4).requires_grad_())
    rows = MeRoPE(disparity=False).plan(Cameras(poses, PINHOLE), GRID)
    by_head = merope.encoding("urope").plan(Cameras(poses, PINHOLE), GRID)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for plan, samples, takes in ((depths, 1, True), (depths, 2, False), (rows, 1, False), (by_head, 1, False)):
        reason = why_not_fused(on_a_gpu(monkeypatch, 80, samples), plan)  # type: ignore[arg-type]
        assert reason is None if takes else "deterministic algorithms are asked for" in str(reason)


def test_the_hopper_kernel_takes_no_plan_that_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    q = on_a_gpu(monkeypatch, 90, samples=1)
    monkeypatch.setattr(fused, "_can_build", lambda _phases, _visible: True)
    plan = MeRoPE(disparity=False).plan(Cameras(random_poses(2).requires_grad_(), PINHOLE), GRID)
    assert fused.hopper_for(q, plan) is None  # type: ignore[arg-type]
    with torch.no_grad():
        tables = fused.hopper_for(q, plan)  # type: ignore[arg-type]
        assert tables is not None
        assert fused.hopper_for(q, plan) is tables  # type: ignore[arg-type]


def test_other_gpus_and_types_do_without_the_hopper_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MeRoPE().plan(Cameras(random_poses(2), PINHOLE), GRID)
    monkeypatch.setattr(fused, "_can_build", lambda _phases, _visible: True)
    assert fused.hopper_for(torch.zeros(1, dtype=torch.bfloat16), plan) is None
    assert fused.hopper_for(on_a_gpu(monkeypatch, 80, samples=1), plan) is None  # type: ignore[arg-type]
    q = on_a_gpu(monkeypatch, 90, samples=1)
    assert fused.hopper_for(q, plan) is not None  # type: ignore[arg-type]
    q.dtype = torch.float32
    assert fused.hopper_for(q, plan) is None  # type: ignore[arg-type]


def test_a_plan_without_blocks_is_plain_attention_bit_for_bit() -> None:
    plan = merope.encoding("none").plan(Cameras(random_poses(2), PINHOLE), GRID, extra_tokens=1)
    q, k, v = (x.half() for x in random_qkv(1, 2, 5, 128))
    fused.make_ready(q, plan)
    assert torch.equal(fused.attend_fused(30 * q, k, v, plan, 2**30), scaled_dot_product_attention(30 * q, k, v))


def test_auto_says_once_that_it_is_sdpa(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_told", set())
    plan = MeRoPE().plan(Cameras(random_poses(2), PINHOLE), GRID)
    q, k, v = random_qkv(1, 1, 4, 128)
    with caplog.at_level(logging.INFO, logger="merope"):
        outputs = [merope.attend(q, k, v, plan) for _ in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        'backend "auto" is "sdpa", not "fused": the tensors are on cpu, its kernels need a CUDA GPU'
    ]
    assert torch.equal(outputs[0], merope.attend(q, k, v, plan, backend="sdpa"))
