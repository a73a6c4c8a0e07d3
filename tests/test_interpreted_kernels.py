"""The Triton kernels on the CPU, through Triton's interpreter.

Triton decides at its import whether it interprets: the checks (*_checks.py) run in processes of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CHECKS = (
    "attention/fused_kernel_checks.py",
    "attention/fused_learning_checks.py",
    "attention/fused_visible_checks.py",
    "encodings/table_kernel_checks.py",
    "world/draw_kernel_checks.py",
)


@pytest.mark.parametrize("checks", CHECKS)
def test_kernels_under_the_interpreter(checks: str) -> None:
    command = [sys.executable, "-m", "pytest", str(TESTS / checks), "-x", "-p", "no:cacheprovider"]
    root = TESTS.parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout
