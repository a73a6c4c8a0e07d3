"""The Triton kernels on the CPU, through Triton's interpreter.

Triton decides at its import whether it interprets: the checks (fused_kernel_checks.py) run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_under_the_interpreter() -> None:
    checks = Path(__file__).with_name("fused_kernel_checks.py")
    command = [sys.executable, "-m", "pytest", str(checks), "-x", "-p", "no:cacheprovider"]
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout
