"""Packages of estimators leave signals alone."""

import signal
import subprocess
import sys

import pytest

ENDS_ITSELF = """
import os, signal
from merope.evaluate.estimators.packages import import_package
signal.signal(signal.SIGTERM, signal.{handler})
import_package("pycolmap")
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""


@pytest.mark.parametrize(
    ("handler", "code", "said"), [("SIG_IGN", 0, "still here\n"), ("SIG_DFL", -signal.SIGTERM, "")]
)
def test_a_process_with_colmap_answers_sigterm_as_before(handler: str, code: int, said: str) -> None:
    command = [sys.executable, "-c", ENDS_ITSELF.format(handler=handler)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, said)
    assert "stack trace" not in done.stderr
