"""Visibility: intervals of key cameras in plain words and integers."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merope import Visibility
from merope.attention.visible_cameras import teacher_forced

COUNTS = st.integers(1, 7)


def seen_cameras(sees: Visibility, key_cameras: int) -> list[list[int]]:
    """The key cameras of every query camera, from the table that kernels read."""
    return [[k for k in range(key_cameras) if a <= k < b or c <= k < d] for (a, b), (c, d) in sees.table().tolist()]


@given(
    cameras=COUNTS, block=COUNTS, more=st.none() | st.integers(0, 5), sink=st.integers(0, 5), cached=st.integers(0, 6)
)
def test_block_causal(cameras: int, block: int, more: int | None, sink: int, cached: int) -> None:
    last = None if more is None else block + more
    sees = Visibility.block_causal(cameras, block, last=last, sink=sink, cached=cached)
    for query, seen in enumerate(seen_cameras(sees, cached + cameras)):
        stop = cached + min((query // block + 1) * block, cameras)
        assert seen == [k for k in range(stop) if last is None or k >= stop - last or k < sink]


@given(cameras=COUNTS, block=COUNTS, more=st.none() | st.integers(0, 5))
def test_teacher_forcing(cameras: int, block: int, more: int | None) -> None:
    last = None if more is None else block + more
    seen = seen_cameras(Visibility.teacher_forcing(cameras, block, last=last), 2 * cameras)
    assert len(seen) == 2 * cameras
    for camera in range(cameras):
        start = camera // block * block
        stop = min(start + block, cameras)
        window = [k for k in range(stop) if last is None or k >= stop - last]
        assert seen[camera] == window
        assert seen[cameras + camera] == [k if k < start else cameras + k for k in window]


@given(block=st.integers(1, 4), blocks=st.integers(1, 5), short=st.integers(0, 3), more=st.none() | st.integers(0, 5))
def test_teacher_forcing_without_what_nobody_needs(block: int, blocks: int, short: int, more: int | None) -> None:
    cameras, last = blocks * block - min(short, block - 1), None if more is None else block + more
    whole = seen_cameras(Visibility.teacher_forcing(cameras, block, last=last), 2 * cameras)
    for prefix in range(0, (blocks - 1) * block + 1, block):
        clean, noisy = teacher_forced(cameras, block, prefix)
        kept = [*range(cameras)[clean], *(cameras + camera for camera in range(cameras)[noisy])]
        assert kept == [*range((blocks - 1) * block), *range(cameras + prefix, 2 * cameras)]
        sees = Visibility.teacher_forcing(cameras, block, last=last, given=prefix)
        assert [[kept[key] for key in row] for row in seen_cameras(sees, len(kept))] == [whole[place] for place in kept]


def test_a_tensor_of_intervals_and_its_table() -> None:
    table = torch.tensor([[[0, 2], [2, 2]], [[0, 1], [3, 5]], [[1, 1], [2, 4]]])
    sees = Visibility(table)  # type: ignore[arg-type]
    assert sees == Visibility([[(0, 2)], [(0, 1), (3, 5)], [(2, 4)]])  # type: ignore[arg-type]
    assert sees == Visibility(sees.table())  # type: ignore[arg-type]
    assert sees.table()[:2].tolist() == table[:2].tolist()
    assert Visibility((((0, 2), (2, 5)),)).intervals == (((0, 5),),)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "backwards": (lambda: Visibility((((3, 1),),)), "query camera 0.*start ≤ stop.*\\(3, 1\\)"),
    "negative": (lambda: Visibility((((-1, 1),),)), "query camera 0.*0 ≤ start"),
    "out of order": (lambda: Visibility((((0, 1),), ((4, 5), (0, 2)))), "query camera 1.*in order.*sort"),
    "overlapping": (lambda: Visibility((((0, 3), (2, 5)),)), "query camera 0.*apart.*\\(2, 5\\).*join"),
    "nothing": (lambda: Visibility((((0, 1),), ((2, 2), (3, 3)))), "query camera 1.*at least one key camera"),
    "given more than the clip has": (lambda: Visibility.teacher_forcing(6, 3, given=6), "given.*not all.*6"),
    "given a part of a block": (lambda: Visibility.teacher_forcing(6, 3, given=2), "given.*whole blocks of 3.*2"),
    "no interval": (lambda: Visibility(((),)), "query camera 0.*one or two pairs"),
    "three intervals": (lambda: Visibility((((0, 1), (2, 3), (4, 5)),)), "query camera 0.*one or two pairs"),
    "floats": (lambda: Visibility(torch.rand(2, 2, 2)), "query camera 0.*integers"),  # type: ignore[arg-type]
    "bools": (lambda: Visibility((((False, True),),)), "query camera 0.*integers"),
    "flat": (lambda: Visibility(torch.tensor([[0, 3]])), "query camera 0.*one or two pairs"),  # type: ignore[arg-type]
    "no cameras": (lambda: Visibility(()), "intervals.*at least one query camera"),
    "words": (lambda: Visibility("causal"), "intervals.*at least one query camera"),  # type: ignore[arg-type]
    "cameras": (lambda: Visibility.block_causal(0), "cameras must be an int ≥ 1, got 0"),
    "block": (lambda: Visibility.block_causal(6, 0), "block must be an int ≥ 1, got 0"),
    "window": (lambda: Visibility.block_causal(6, 3, last=2), "last must be an int ≥ 3, got 2.*own block of 3"),
    "sink": (lambda: Visibility.block_causal(6, sink=-1), "sink must be an int ≥ 0"),
    "cached": (lambda: Visibility.block_causal(6, cached=1.0), "cached must be an int ≥ 0, got 1.0"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, message = CASES[name]
    with pytest.raises(ValueError, match=f"(?s){message}") as refused:
        make()
    assert re.search(r" must be .+, got .+; .+", str(refused.value))
