"""The Triton kernels on the CPU, through Triton's interpreter.

Triton decides at its import whether it interprets: the checks (fused_*_checks.py) run in processes of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("checks", ["fused_kernel_checks.py", "fused_learning_checks.py"])
def test_kernels_under_the_interpreter(checks: str) -> None:
    file = Path(__file__).with_name(checks)
    command = [sys.executable, "-m", "pytest", str(file), "-x", "-p", "no:cacheprovider"]
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout
