"""benchmarks/rounds.py: methods are timed in turn, and ratios are to the first one. The clock is made up."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import rounds

TAKES_MS = {"plain": 2.0, "ours": 3.0}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods in the order in which they were run."""
    ran: list[str] = []

    def time_ms(replay: Callable[[], object]) -> float:
        replay()
        return TAKES_MS[ran[-1]]

    monkeypatch.setattr(rounds, "_time_ms", time_ms)
    monkeypatch.setattr(rounds, "WARM_UP_S", 0.0)
    return ran


def runs(order: list[str]) -> dict[str, Callable[[], object]]:
    return {name: lambda name=name: order.append(name) for name in TAKES_MS}


def test_every_second_round_goes_the_other_way_about(order: list[str]) -> None:
    times = rounds.times_in_rounds(runs(order), repeats=4)
    there, back = ["plain", "ours"], ["ours", "plain"]
    assert order == [*there, *there, *back, *there, *back]  # the first round warms up
    assert times["ours"].median_ms == 3.0


def test_ratios_are_to_the_first_method_at_the_same_rest(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(rounds.time, "sleep", slept.append)
    monkeypatch.setattr(rounds, "peak_mib", lambda run: (run(), TAKES_MS[order[-1]] * 10.0)[1])
    monkeypatch.setattr(rounds, "captured", lambda run: rounds.Replay(run))
    rows = list(rounds.measured(runs(order), repeats=2, rests=(0.0, 4.0)))
    assert [(row.method, row.rest, row.time_ratio, row.memory_ratio) for row in rows] == [
        (method, rest, ratio, ratio) for rest in (0.0, 4.0) for method, ratio in (("plain", 1.0), ("ours", 1.5))
    ]
    assert sorted(set(slept)) == pytest.approx([0.0, 0.008, 0.012])


def test_what_cannot_be_captured_is_launched_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> rounds.Replay:
        raise error

    monkeypatch.setattr(rounds, "captured", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    error: Exception = RuntimeError("operation not permitted\nmore")
    assert rounds.captured_or_launched("ours", len).graph is None
    assert "ours is launched anew each time, it was not captured: operation not permitted\n" in capsys.readouterr().out
    error = torch.OutOfMemoryError("no memory is left")
    with pytest.raises(torch.OutOfMemoryError):
        rounds.captured_or_launched("ours", len)
