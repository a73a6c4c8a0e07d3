"""The Triton kernels that make tables, on the CPU through Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_under_the_interpreter() -> None:
    file = Path(__file__).with_name("table_kernel_checks.py")
    command = [sys.executable, "-m", "pytest", str(file), "-x", "-p", "no:cacheprovider"]
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout
