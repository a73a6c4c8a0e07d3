"""The Triton kernels on the CPU, through Triton's interpreter.

Triton decides at its import whether it interprets: the checks (*_checks.py) run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CHECKS = (
    "attention/fused_kernel_checks.py",
    "attention/fused_learning_checks.py",
    "attention/fused_visible_checks.py",
    "attention/hopper_parts_checks.py",
    "encodings/table_kernel_checks.py",
    "world/draw_kernel_checks.py",
)


def test_kernels_under_the_interpreter() -> None:
    files = [str(TESTS / checks) for checks in CHECKS]
    root = TESTS.parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(root), str(TESTS)))}
    command = [sys.executable, "-m", "pytest", *files, "-x", "-p", "no:cacheprovider", "-p", "quick_interpreter"]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout
