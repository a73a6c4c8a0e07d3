"""Which intervals of shared keys are attended to in one call, and which gradients are held together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merope import Visibility
from merope.attention.kernels.interval_calls import (
    HELD_BESIDE_SUMS,
    MOST_HELD,
    Call,
    held_together,
    interval_calls,
    keys_of,
    segments,
)
from merope.attention.visible_cameras import Run, key_ranges, runs
from tests.attention.test_visible_attention import visibilities

NONE = torch.empty(0, dtype=torch.int64)
KEY_CAMERAS, TOKENS = 6, 2


def runs_of(sees: Visibility, key_cameras: int, extra_tokens: int = 0) -> tuple[Run, ...]:
    count = len(sees.intervals)
    visible = key_ranges(sees, count, key_cameras, TOKENS, extra_tokens, extra_tokens)
    return () if visible is None else tuple(runs(visible, TOKENS, count * TOKENS + extra_tokens, NONE))


@given(sees=visibilities(5, KEY_CAMERAS), extra_tokens=st.integers(0, 2))
def test_every_seen_pair_is_attended_to_once(sees: Visibility, extra_tokens: int) -> None:
    own = runs_of(sees, KEY_CAMERAS, extra_tokens)
    calls = interval_calls(own)
    shape = (5 * TOKENS + extra_tokens, KEY_CAMERAS * TOKENS + extra_tokens)
    seen, attended, merged = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    for run in own:
        for keys in run.keys:
            seen[run.queries, keys] += 1
        for call in calls:
            if call.serves(run):
                queries = range(call.queries.start, call.queries.stop)[call.of(run)]
                assert queries == range(run.queries.start, run.queries.stop)
                merged[run.queries, call.keys] += 1
    for call in calls:
        attended[call.queries, call.keys] += 1
    assert torch.equal(attended, seen)
    assert torch.equal(merged, seen)


@given(sees=visibilities(4, KEY_CAMERAS))
def test_a_segment_is_seen_by_a_call_as_a_whole_or_not_at_all(sees: Visibility) -> None:
    calls, count = interval_calls(runs_of(sees, KEY_CAMERAS)), KEY_CAMERAS * TOKENS
    cut = segments(calls, count)
    assert [token for part in cut for token in range(count)[part]] == list(range(count))
    for call in calls:
        own = set(range(count)[call.keys])
        for part in cut:
            tokens = set(range(count)[part])
            assert (tokens <= own) == call.sees_all(part) == bool(tokens & own)
            if call.sees_all(part):
                assert range(count)[call.keys][call.place_of(part)] == range(count)[part]


CASES = {
    "causal": (Visibility.block_causal(12), 12, 4),
    "clean and noisy": (Visibility.teacher_forcing(12), 24, 4 + 4 + 3),
    "given frames": (Visibility.teacher_forcing(12, given=3), 18, 3 + 3 + 3),
    "window": (Visibility.block_causal(12, last=6), 12, 4),
    "window and a sink that three blocks share": (Visibility.block_causal(15, last=6, sink=3), 15, 5 + 1),
}


@pytest.mark.parametrize("name", CASES)
def test_number_of_calls(name: str) -> None:
    sees, key_cameras, expected = CASES[name]
    assert len(interval_calls(runs_of(sees, key_cameras))) == expected


def test_extra_tokens_are_one_call_of_all_that_see_them_apart() -> None:
    """For the last block they are neighbours of what it sees."""
    calls = interval_calls(runs_of(Visibility.block_causal(6, 2), 6, extra_tokens=3))
    extra = slice(12, 15)
    assert [call for call in calls if call.keys == extra] == [Call(slice(0, 8), extra), Call(slice(12, 15), extra)]


@pytest.mark.parametrize("cameras", [12, 21, 60])
def test_gradients_that_are_held_together_are_bounded(cameras: int) -> None:
    own = runs_of(Visibility.teacher_forcing(cameras), 2 * cameras)
    calls, tokens = interval_calls(own), 2 * cameras * TOKENS
    batches = list(held_together(calls, tokens))
    assert [call for batch in batches for call in batch] == calls
    most = MOST_HELD if len(batches) == 1 else HELD_BESIDE_SUMS
    assert all(keys_of(batch) <= most * tokens for batch in batches)
    assert (len(batches) == 1) == (cameras <= 21), "seven blocks of both copies are Wan's longest clip"
