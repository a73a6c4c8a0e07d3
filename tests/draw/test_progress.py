"""The progress line: one that is rewritten on a terminal, a few lines in a log."""

import sys

import pytest

from merope.draw import progress
from merope.draw.progress import OVERWRITE, ProgressLine, duration, show_line


class Clock:
    """Seconds that a test sets."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_short_work_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("reading", 3)
    for done in (1, 2, 3):
        line.show(done)
    assert capsys.readouterr().err == ""


def test_a_log_gets_a_line_every_ten_seconds_and_the_last_one(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("scoring", 1000, "worlds", before=10)
    for done in range(11, 1001):
        clock.now_s += 0.125
        line.show(done, note="2 failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "scoring: 18 of 1,000 worlds, 2 failed, 2 min left"
    assert len(lines) == 14
    assert lines[-1] == "scoring: 1,000 of 1,000 worlds, 2 failed"


def test_a_terminal_gets_one_line_in_place(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    line = ProgressLine("scoring", 4)
    for done in (1, 2, 3, 4):
        clock.now_s += 1.0
        line.show(done)
    shown = capsys.readouterr().err
    assert shown.count(OVERWRITE) == 4
    assert shown.count("\n") == 1
    assert shown.endswith("scoring: 4 of 4 clips\n")


def test_a_passing_line_is_not_for_logs(capsys: pytest.CaptureFixture[str]) -> None:
    show_line("step 1")
    show_line("done", keep=True)
    assert capsys.readouterr().err == "done\n"


def test_durations_are_said_as_people_do() -> None:
    assert [duration(s) for s in (0.4, 59.0, 61.0, 3540.0, 11_100.0)] == ["0 s", "59 s", "1 min", "59 min", "3 h 5 min"]
