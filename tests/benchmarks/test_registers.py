"""benchmarks/registers.py reads what the compiler says."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from registers import Kernel, kernels

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gradients_bf16' for 'sm_90a'
ptxas info    : Function properties for gradients_bf16
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 6 barriers
ptxas info    : Compile time = 8.330 ms
ptxas info    : Compiling entry function 'attend_bf16' for 'sm_90a'
ptxas info    : Function properties for attend_bf16
ptxas         .     120 bytes stack frame, 116 bytes spill stores, 144 bytes spill loads
ptxas info    : Used 128 registers, used 8 barriers, 120 bytes cumulative stack size
"""


def test_kernels_of_a_log() -> None:
    assert kernels(LOG) == [Kernel("attend_bf16", 128, 120, 116, 144), Kernel("gradients_bf16", 168, 0, 0, 0)]
