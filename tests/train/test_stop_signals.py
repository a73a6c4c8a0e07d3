"""Signals that stop a run reach who listened to them before, and later."""

import os
import signal
import sys
import threading
import time

import pytest

from merope.train import loop


def test_the_handlers_of_signals_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with loop.stop_requests() as wanted:
        assert not wanted()
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        deadline = time.monotonic() + 5
        while not wanted() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert wanted()
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_listened_to_signals_before_hears_of_them_too() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with loop.stop_requests() as wanted:
            signal.raise_signal(signal.SIGINT)  # Python's own handler would end the program, and is not called
            assert wanted()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_a_listener_that_ends_the_program_waits_for_the_checkpoint() -> None:
    done = []

    def stopped() -> None:
        with loop.stop_requests() as wanted:
            signal.raise_signal(signal.SIGTERM)
            done.append(wanted())

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
    try:
        with pytest.raises(SystemExit):
            stopped()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done == [True]
