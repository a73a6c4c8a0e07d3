"""The forward kernel for tiles of 144 queries, on the CPU: where its numbers lie, and what is new in its arithmetic.

Layouts are those of the PTX ISA: accumulators and operands of `wgmma`, matrices of `stmatrix`. What a lane computes is
read from the kernel's text.
"""

import math
import re

import pytest
import torch
from torch import Tensor

from merope.attention.kernels import hopper_module
from tests.attention.test_hopper_arithmetic import TILE, WEIGHT, half

SOURCE = hopper_module.kernel_source(phases=False, visible=False)
ROWS = 144
HALF_BYTES = ROWS * 128
OUTGROWN = 2.0**80
LARGEST_HALF = 65504.0


def expression(function: str, name: str, assigned: str = "=") -> str:
    """What the kernel's `function` sets `name` to, as Python."""
    body = re.search(rf"\b{function}\([^;]*?\) (?:const )?{{(.*?)\n(?:    )?}}", SOURCE, re.DOTALL)
    assert body is not None
    value = re.search(rf"\b{name} ?{re.escape(assigned)} (.*?)(?:, \w+ =|;)", body[1])
    assert value is not None
    return value[1].replace("share.", "").replace("/", "//").replace("kWideHalf", str(HALF_BYTES))


def accumulators(warp: int, lane: int) -> list[tuple[int, int]]:
    """Row and column of a thread's 72 elements of m64n144, rows from the warpgroup's first on."""
    return [(16 * (warp % 4) + lane // 4 + 8 * (e // 2 % 2), 8 * (e // 4) + 2 * (lane % 4) + e % 2) for e in range(72)]


def swizzled(address: int) -> int:
    """The 128-byte swizzle: bits 4 to 6 are exchanged by bits 7 to 9."""
    return address ^ (address >> 7 & 7) << 4


def stored_weights() -> dict[int, tuple[int, int]]:
    """By address after the start of the weights: which query and key lie there (16 bits each)."""
    memory = {}
    for warp in range(8):
        to = []
        for lane in range(32):
            numbers = {"warp": warp, "lane": lane, "group": warp // 4}
            numbers["row"] = eval(expression("store_weights", "row"), {}, numbers)
            numbers["chunk"] = eval(expression("store_weights", "chunk"), {}, numbers)
            to.append(eval(expression("store_weights", "to", "+="), {}, numbers))
        elements = [accumulators(warp, lane) for lane in range(32)]
        for i in range(9):
            for matrix in range(4):
                for lane in range(32):  # .trans: it has column lane / 4 of rows 2 (lane % 4) and the next
                    for j in range(2):
                        key, query = elements[lane][2 * (4 * i + matrix) + j]
                        row = to[8 * matrix + 2 * (lane % 4) + j] + i * 2048
                        memory[row + 2 * (lane // 4)] = (query, 64 * (warp // 4) + key)
    return memory


def test_weights_lie_where_the_tensor_cores_read_them() -> None:
    memory = stored_weights()
    assert len(memory) == ROWS * 128
    for step in range(8):  # as issue_wide_values: rows of queries, 16 keys a step
        start = step // 4 * HALF_BYTES + step % 4 * 32
        for query in range(ROWS):
            for k in range(16):
                at = start + query // 8 * 1024 + query % 8 * 128 + 2 * k
                assert memory[swizzled(at)] == (query, 16 * step + k)


def test_values_are_read_as_channels_by_keys() -> None:
    """A transposed operand: 64 channels side by side, 8 keys 1024 bytes after the 8 before."""
    for step in range(8):
        for channel in range(64):
            for k in range(16):
                key = 16 * step + k
                packed = key * 128 + 16 * (channel // 8 ^ key & 7) + 2 * (channel % 8)
                assert swizzled(step * 2048 + k // 8 * 1024 + k % 8 * 128 + 2 * channel) == packed


def test_columns_of_a_warp_are_combined_once() -> None:
    """`halved` and `combine_warp`: every one of 16 rows is in every column's part."""
    place = re.search(r"if \(!\(lane & 4\)\) parts\[(.*?)\] = x;", SOURCE)
    assert place is not None
    halves = {}  # of lanes from 16 on, those with i >= 9
    for lane in range(32):
        columns = [8 * (k // 2) + 2 * (lane % 4) + k % 2 for k in range(36)]
        rows = {row + 8 * r for row in (lane // 4, (lane ^ 16) // 4) for r in range(2)}
        halves[lane] = [(columns[k + 18 * (lane >> 4)], rows) for k in range(18)]
    parts = {}
    for lane in [lane for lane in range(32) if not lane & 4]:
        for i in range(9):
            odd = lane >> 3 & 1
            column = halves[lane][2 * i + odd][0]
            found = [halves[other][2 * i + odd] for other in (lane, lane ^ 8, lane ^ 4, lane ^ 12)]
            assert {at for at, _ in found} == {column}
            assert eval(place[1], {}, {"lane": lane, "i": i, "odd": odd}) == column
            assert column not in parts
            parts[column] = set.union(*(rows for _, rows in found))
    assert parts == {column: set(range(16)) for column in range(ROWS)}


def staged_banks(row: int, chunk: int, within: int, words: int) -> list[int]:
    start = eval(expression("staged_chunk", "return", ""), {}, {"row": row, "c": chunk}) + within
    return [(start + word) % 32 for word in range(words)]


def test_outputs_are_staged_in_different_banks() -> None:
    for element in range(72):  # of `attend_wide`: a word a lane
        banks = []
        for lane in range(32):
            channel, query = accumulators(0, lane)[element]
            banks += staged_banks(query, channel // 8, channel % 8, words=1)
        assert len(set(banks)) == 32
    for chunk in range(8):  # of `attend`: two words a lane, 16 lanes at a time
        for lanes in (range(16), range(16, 32)):
            banks = [bank for lane in lanes for bank in staged_banks(lane // 4, chunk, 2 * (lane % 4), words=2)]
            assert len(set(banks)) == 32


def copied_order(tiles: int) -> list[tuple[int, int]]:
    """Operand (0: keys, 1: values) and tile, as `copy_tiles` goes through them; `turn_tiles` does so, too."""
    ahead = re.search(r"using WidePipeline = PipelineOf<[^;]*, (\d+)>;", SOURCE)
    assert ahead is not None
    tile = expression("copy_tiles", "t").replace("Pipeline::kAhead", ahead[1])
    steps = [(step, operand) for step in range(tiles + int(ahead[1])) for operand in range(2)]
    order = [(operand, eval(tile, {}, {"step": step, "operand": operand})) for step, operand in steps]
    return [(operand, t) for operand, t in order if 0 <= t < tiles]


@pytest.mark.parametrize("tiles", range(1, 6))
def test_two_stages_suffice_for_the_order_of_tiles(tiles: int) -> None:
    """No tile waits for the release of one that is used after it."""
    order = copied_order(tiles)
    assert sorted(order) == [(operand, t) for operand in range(2) for t in range(tiles)]
    released: set[tuple[int, int]] = set()

    def use(*needed: tuple[int, int]) -> None:  # keys, and values of the tile before
        while order and (order[0][1] < 2 or (order[0][0], order[0][1] - 2) in released):
            copied.add(order.pop(0))
        assert copied.issuperset(needed)
        released.update(needed)

    copied: set[tuple[int, int]] = set()
    use((0, 0))
    for t in range(1, tiles):
        use((0, t), (1, t - 1))
    use((1, tiles - 1))


def sums_of_threads(weights: Tensor, thread: Tensor) -> Tensor:  # float32 [Nq, 64]; infinite beyond its range
    return torch.zeros(len(weights), 64).index_add(1, thread, weights.float())


def weighted_in_columns(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:  # [Nq, Nk], [Nk, C]
    """As `WideSoftmax`: sums of every thread's two rows, and one decision for all 144 queries.

    Output and the logarithms of the sums.
    """
    scores = scores * math.log2(math.e)
    threads = torch.arange(scores.shape[1]) % TILE // 16 * 8 + torch.arange(scores.shape[1]) % 8
    sums, out = torch.zeros(len(scores), 64, dtype=torch.float32), torch.zeros((), dtype=torch.float64)
    shift = math.log2(WEIGHT) - scores[:, :TILE].amax(1, keepdim=True)
    for x, rows, thread in zip(scores.split(TILE, dim=1), values.split(TILE), threads.split(TILE), strict=True):
        sums = sums + sums_of_threads(torch.exp2(x + shift), thread)
        if not bool((torch.exp2(x + shift) <= LARGEST_HALF).all()):
            before, shift = shift, torch.minimum(shift, math.log2(WEIGHT) - x.amax(1, keepdim=True))
            factor = torch.exp2(shift - before).float() * (shift - before >= -126)  # smaller ones are flushed to 0
            sums = torch.where(sums >= OUTGROWN, sums_of_threads(torch.exp2(x + shift), thread), sums * factor)
            out = out * factor
        weights = half(torch.exp2(x + shift))
        assert float(weights.max()) <= LARGEST_HALF
        out = out + weights @ rows
    total = sums.double().sum(1, keepdim=True)
    return out / total, (total.log2() - shift)[:, 0] / math.log2(math.e)


@pytest.mark.parametrize("jump", [0.0, 4.0, 20.0, 60.0, 88.0, 100.0, 5000.0])
def test_weights_of_scores_that_grow_from_tile_to_tile(jump: float) -> None:
    """By less than half precision holds, by less than float32 does, and by more; for some of the queries or for all."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(ROWS, 300, generator=generator, dtype=torch.float64)
    scores[:, 130:] += jump * torch.rand(ROWS, 1, generator=generator, dtype=torch.float64)
    scores[::3, 260:] += jump * torch.rand(ROWS // 3, 1, generator=generator, dtype=torch.float64)
    values = half(torch.randn(300, 128, generator=generator).double())
    out, log_sums = weighted_in_columns(scores, values)
    right = scores.softmax(-1) @ values
    assert float((out - right).norm() / right.norm()) < 2**-11
    torch.testing.assert_close(log_sums, scores.logsumexp(-1), rtol=0, atol=1e-5 * (1 + jump))


def test_a_sum_that_outgrows_the_shift_keeps_what_is_close_to_the_largest() -> None:
    """Weights within float32's range beside others beyond it: factors are flushed to 0, what counts is not."""
    scores = torch.zeros(ROWS, 256, dtype=torch.float64)
    scores[:, 128:] = 128 * math.log(2)
    scores[:, 128::2] -= 10 * math.log(2)
    values = half(torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).double())
    out, log_sums = weighted_in_columns(scores, values)
    right = scores.softmax(-1) @ values
    assert float((out - right).norm() / right.norm()) < 2**-11
    torch.testing.assert_close(log_sums, scores.logsumexp(-1), rtol=0, atol=1e-5)
